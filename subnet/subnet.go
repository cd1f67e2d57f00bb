// SPDX-License-Identifier: Apache-2.0

// Package subnet contains the domain types of leases and of the network configuration, their
// parsing and validation, the decisions about leases, and the contract of the managers that
// talk to a store. It is pure.
package subnet

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"time"

	"github.com/flanneld/flanneld/pkg/prefix"
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
	// ErrUnfit means that the subnet that the store gives this node does not fit the
	// configuration, and that an operator has to change one of them.
	ErrUnfit = errors.New("subnet does not fit the configuration")
	// ErrInvalidConfig means that the store holds a configuration that cannot be used.
	ErrInvalidConfig = errors.New("invalid network configuration")
)

// Endpoint is one address family of a lease.
type Endpoint struct {
	Subnet   netip.Prefix
	PublicIP netip.Addr
	Data     json.RawMessage `json:",omitempty"` // of the backend, opaque here; nil if there is none
}

// Family returns the endpoint's address family.
func (e Endpoint) Family() prefix.Family { return prefix.FamilyOf(e.Subnet.Addr()) }

// Family returns the network's address family.
func (n Network) Family() prefix.Family { return prefix.FamilyOf(n.Prefix.Addr()) }

// Lease is one node's right to its subnets.
type Lease struct {
	Key         string     // etcd key below subnets/, or name of the Node
	Order       uint64     // time of its creation in the store: etcd's create revision, or the Node's creation time
	BackendType string     // as stored; empty for backends that store none
	Endpoints   []Endpoint // one for each family that the lease has, IPv4 first
	Permanent   bool       // it does not expire: a reservation, or the own lease of a Kubernetes node
	Expires     time.Time  // own lease only
}

// Endpoint returns the lease's endpoint of family f.
func (l Lease) Endpoint(f prefix.Family) (e Endpoint, ok bool) { return endpoint(l.Endpoints, f) }

// Claim contains the public addresses and backend data that a node wants to publish. A valid
// Subnet in an endpoint is the subnet that the node had before and wants again.
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

// claimed compares public addresses, because a claim may have no subnet yet.
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

// Snapshot contains all leases of other nodes that a store has at one moment.
type Snapshot struct {
	Leases      []*Lease // all but the own one, in no particular order; shared and read-only
	Undecodable []string // keys whose value cannot be read, in no particular order: they keep their last good state until the key goes
	Store       StoreID
	Another     bool // the store is not the one of the snapshot before, although ID and Revision suggest it
}

// Update describes the leases of other nodes that a store has at one moment: all of them, and as
// a hint those that have changed.
type Update struct {
	Store StoreID
	// Changed has the leases that differ from the update before, nil for a lease that is gone. The
	// leases are shared and read-only. If the map is nil, any lease may have changed. A receiver
	// that uses only Snapshot comes to the same result. If the map is empty, only the revision of
	// the store has changed.
	Changed map[string]*Lease
	// Undecodable has keys whose value has become unreadable. Such a peer keeps its last good
	// state. It is in use only beside Changed.
	Undecodable []string
	// Snapshot returns the complete set. It may be called until sink returns. Its cost depends on
	// the number of leases.
	Snapshot func() Snapshot
}

// Manager talks to a store. All methods retry failures that can pass. They return when ctx ends,
// with its error.
type Manager interface {
	// Config returns the network configuration. It returns ErrNoConfig or ErrInvalidConfig,
	// wrapped, if the store has no configuration or one that cannot be used: the caller waits
	// and asks again.
	Config(ctx context.Context) (Config, error)
	// Recall returns the claim that this node published before, or zero. own contains the node's
	// public addresses.
	Recall(ctx context.Context, own Claim) (Claim, error)
	// Acquire takes or renews this node's lease. cfg is the configuration that the node uses, even
	// if the store has another one by now. Acquire returns ErrUnfit, wrapped, if another call
	// cannot succeed either.
	Acquire(ctx context.Context, cfg Config, c Claim) (Lease, error)
	// Watch blocks, and calls sink from one goroutine with updates that are complete. It survives
	// compaction and outages. A snapshot's slices belong to the receiver, the leases in them are
	// shared and read-only.
	Watch(ctx context.Context, sink func(Update)) error
	// Keep blocks and keeps the own lease alive. It returns ErrLeaseLost, wrapped with the new
	// owner, if another node has the subnet.
	Keep(ctx context.Context, own Lease) error
}
