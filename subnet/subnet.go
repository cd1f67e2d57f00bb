// Package subnet says who owns which subnet: the domain types, the parsing
// and validation of what a store holds, and the contract of the managers that
// talk to a store. It is pure.
package subnet

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"time"

	"flanneld/pkg/prefix"
)

// TTL is how long a lease lives in the store unless it is renewed.
const TTL = 24 * time.Hour

// Errors that callers act on.
var (
	// ErrLeaseLost means that the own subnet now belongs to another node.
	ErrLeaseLost = errors.New("subnet lease lost")
	// ErrNoSubnets means that every subnet of the configured range is taken.
	ErrNoSubnets = errors.New("out of subnets")
	// ErrNoConfig means that the store answers but holds no configuration.
	ErrNoConfig = errors.New("no network configuration")
	// ErrUnfit means that what the store gives this node does not go with the
	// configuration, and will not until somebody changes either.
	ErrUnfit = errors.New("subnet does not fit the configuration")
	// ErrInvalidConfig means that the store holds a configuration that cannot be used.
	ErrInvalidConfig = errors.New("invalid network configuration")
)

// Endpoint is one address family of a lease.
type Endpoint struct {
	Subnet   netip.Prefix
	PublicIP netip.Addr
	Data     json.RawMessage `json:",omitempty"` // the backend's, opaque here; nil if there is none
}

// Family returns the endpoint's address family.
func (e Endpoint) Family() prefix.Family { return prefix.FamilyOf(e.Subnet.Addr()) }

// Family returns the network's address family.
func (n Network) Family() prefix.Family { return prefix.FamilyOf(n.Prefix.Addr()) }

// Lease is one node's right to its subnets.
type Lease struct {
	Key         string     // where it stands: etcd key below subnets/, or node name
	Order       uint64     // age in the store (etcd create revision, node creation time): who was first
	BackendType string     // as stored; empty for backends that store none
	Endpoints   []Endpoint // one for each family that the lease has, IPv4 first
	Permanent   bool       // it never expires: a reservation, or the own lease of a Kubernetes node
	Expires     time.Time  // own lease only
}

// Endpoint returns the lease's endpoint of family f.
func (l Lease) Endpoint(f prefix.Family) (e Endpoint, ok bool) { return endpoint(l.Endpoints, f) }

// Claim is what a node wants to publish: its public addresses and backend
// data. A valid Subnet in an endpoint is the one that is wanted, because it
// was this node's before.
type Claim struct {
	BackendType string
	Endpoints   []Endpoint // one for each enabled family, IPv4 first
}

// Endpoint returns the claim's endpoint of family f.
func (c Claim) Endpoint(f prefix.Family) (e Endpoint, ok bool) { return claimed(c.Endpoints, f) }

func endpoint(es []Endpoint, f prefix.Family) (Endpoint, bool) {
	for _, e := range es {
		if e.Family() == f {
			return e, true
		}
	}
	return Endpoint{}, false
}

// claimed goes by the public address, because a claim may have no subnet yet.
func claimed(es []Endpoint, f prefix.Family) (Endpoint, bool) {
	for _, e := range es {
		if prefix.FamilyOf(e.PublicIP) == f {
			return e, true
		}
	}
	return Endpoint{}, false
}

// StoreID identifies a store, and one state of it.
type StoreID struct {
	ID       string `json:"id"`       // etcd cluster id; subnet/kube derives it from the Nodes' UIDs
	Revision int64  `json:"revision"` // of the snapshot
	// Mark is what the manager needs to recognize this state after a restart, in a form of its
	// own: a store that was emptied or restored may have the same ID and a later revision.
	Mark string `json:"mark,omitempty"`
}

// Snapshot is everything that a store holds about other nodes at one moment.
type Snapshot struct {
	Leases      []*Lease // complete but for the own one, in no particular order; shared and read-only
	Undecodable []string // keys that are there but cannot be read, in no particular order: they keep their last good state until the key goes
	Store       StoreID
	Another     bool // the store is not the one of the snapshot before, though its ID and Revision do not tell
}

// Update tells what a store holds about other nodes at one moment: all of it,
// and as a hint what has changed.
type Update struct {
	Store StoreID
	// Changed has the leases that differ from the update before, nil for one
	// that is gone; the leases are shared and read-only. A nil map means that there
	// is no telling. Going by Snapshot alone comes to the same.
	Changed map[string]*Lease
	// Undecodable has keys whose value has become unreadable. Such a peer keeps its last good
	// state. It is in use only beside Changed.
	Undecodable []string
	// Snapshot returns the complete set. It may be called until sink returns,
	// and costs as much as there are leases.
	Snapshot func() Snapshot
}

// Manager talks to a store. All methods retry what passes by itself and
// return when ctx ends, with its error.
type Manager interface {
	// Config returns the network configuration. It returns ErrNoConfig or
	// ErrInvalidConfig, wrapped, when the store answered and the answer is no
	// use: the caller waits and asks again.
	Config(ctx context.Context) (Config, error)
	// Recall returns what this node published before: zero if nothing. own
	// carries the node's public addresses.
	Recall(ctx context.Context, own Claim) (Claim, error)
	// Acquire takes or renews this node's lease. cfg is what the node goes by,
	// whatever the store says by now. It returns ErrUnfit, wrapped, when asking
	// again is of no use.
	Acquire(ctx context.Context, cfg Config, c Claim) (Lease, error)
	// Watch blocks and calls sink, from one goroutine, with what is complete
	// only. It survives compaction and outages. A snapshot's slices belong to
	// the receiver, the leases in them are shared and read-only.
	Watch(ctx context.Context, sink func(Update)) error
	// Keep blocks and keeps the own lease alive. It returns ErrLeaseLost,
	// wrapped with the new owner, when another node has the subnet.
	Keep(ctx context.Context, own Lease) error
}
