// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Errors that callers act on.
var (
	// ErrLeaseLost means that this node has lost its subnet: the subnet now belongs to another node, or
	// the Node of this node has other podCIDRs.
	ErrLeaseLost = errors.New("subnet lease lost")
	// ErrNoSubnets means that every subnet of the configured range is taken.
	ErrNoSubnets = errors.New("out of subnets")
	// ErrNoConfig means that the store answers but has no configuration, or that the file with the
	// configuration cannot be read.
	ErrNoConfig = errors.New("no network configuration")
	// ErrUnfit means that a retry cannot succeed, for example because the store gives this node a
	// subnet that does not fit the configuration, and an operator has to change one of them.
	ErrUnfit = errors.New("subnet does not fit the configuration")
	// ErrInvalidConfig means that the network configuration in the store or in the file cannot be used.
	ErrInvalidConfig = errors.New("invalid network configuration")
)

// FamilyError is the reason why this node cannot use one address family of the network. It may be able to
// use another one.
type FamilyError struct {
	Family prefix.Family
	Err    error
}

func (e *FamilyError) Error() string { return e.Err.Error() }

// Unwrap returns e.Err.
func (e *FamilyError) Unwrap() error { return e.Err }

// StoreID identifies a store, and one state of it.
type StoreID struct {
	ID       string `json:"id"`       // etcd cluster id; subnet/kube derives it from the Nodes' UIDs
	Revision int64  `json:"revision"` // of the snapshot
	// Mark lets the manager recognize this state after a restart. Only the manager knows its form.
	// ID and Revision are not sufficient, because a store that was emptied or restored may have the
	// same ID and a later revision.
	Mark string `json:"mark,omitempty"`
}

// Snapshot contains all leases of other nodes that a store has at one moment.
type Snapshot struct {
	Leases      []*Lease // all but the own one, in no particular order; shared and read-only
	Undecodable []string // keys whose value cannot be read, in no particular order: such a peer keeps its last good state until its key is gone
	Store       StoreID
	Another     bool      // the store is not that of the snapshot before, even if ID and Revision suggest that it is
	Grace       time.Time // see Update
}

// Update describes the leases of other nodes that a store has at one moment. Changed and Undecodable
// name those that have changed, and Snapshot returns all of them.
type Update struct {
	Store StoreID
	// Changed has the leases that differ from the update before, by key, nil for a lease that is
	// gone. The leases are shared and read-only. If the map is nil, any lease may have changed. If
	// Changed and Undecodable are empty, only the revision of the store has changed. A receiver that
	// uses only Snapshot comes to the same result.
	Changed map[string]*Lease
	// Undecodable has keys whose value has become unreadable. Such a peer keeps its last good
	// state. A receiver ignores Undecodable if Changed is nil.
	Undecodable []string
	// Grace is set after an outage in which nodes could not renew their leases. The store deletes such leases
	// as soon as it is available again, and their nodes take them again within seconds. So a peer whose lease
	// goes before Grace is held until the first update or snapshot after that.
	Grace time.Time
	// Snapshot returns all leases. The receiver may call it only until the sink of Watch returns. Its
	// cost depends on the number of leases.
	Snapshot func() Snapshot
}

// Observation is a moment at which a store had the configuration of one of several networks. If the
// configuration is missing from the store later, the Observation tells whether an operator has deleted
// it, or the store was emptied or replaced.
type Observation struct {
	Revision int64 `json:"revision"` // of the store
	// Key and LeaseID belong to the lease that this node had in the network at that moment. They
	// are zero if it had none, or if it was a reservation: an operator may put the same reservation
	// into another store, so it does not identify the store.
	Key     string `json:"key,omitempty"`
	LeaseID int64  `json:"leaseID,omitempty"` // of etcd
}

// Manager talks to a store. All methods with a context, except Release, retry failures that can pass. They
// return when ctx ends, with its error. If a store has no warnings, addresses, locations or several networks,
// the methods for them do nothing and return nothing.
type Manager interface {
	// Config returns the network configuration. It returns ErrNoConfig, wrapped, if there is none or
	// its file cannot be read, and ErrInvalidConfig, wrapped, if it cannot be used. In these cases the
	// caller must wait and ask again.
	Config(ctx context.Context) (Config, error)
	// Recall returns the claim that this node published before, with its subnets, or a claim without
	// endpoints if there is none. own contains the node's public addresses. If it has no endpoints,
	// because they are not known yet, the claim may be that of another node to which the node's subnet
	// was given meanwhile.
	Recall(ctx context.Context, own Claim) (Claim, error)
	// Acquire takes or renews this node's lease, which has one endpoint for each network of cfg. cfg
	// is the configuration that the node uses, even if the store has another one by now. Acquire
	// returns ErrNoSubnets, wrapped, if no subnet is free, and ErrUnfit, wrapped, if another call
	// cannot succeed either.
	Acquire(ctx context.Context, cfg Config, c Claim) (Lease, error)
	// Watch blocks, and calls sink from one goroutine with updates. Each update gives access to
	// all leases. Watch continues after compactions and outages. A snapshot's slices belong to the
	// receiver, and the leases in them are shared and read-only.
	Watch(ctx context.Context, sink func(Update)) error
	// Keep blocks and keeps this host's lease alive. If this node has lost its subnet, Keep returns
	// ErrLeaseLost, wrapped in an error that names the new owner, or the new podCIDRs of the Node.
	Keep(ctx context.Context, own Lease) error

	// Warn publishes a warning about this node, if the store shows warnings to operators. reason is one
	// word in CamelCase, by which operators filter, and message is one line. Warn does not block. It drops
	// warnings that are repeated or too many, and warnings that the store refuses.
	Warn(reason, message string)
	// PublicIPs returns the addresses of this node that the store prescribes, at most one for each family,
	// IPv4 first. The node itself detects its address in a family without a prescribed address.
	PublicIPs(ctx context.Context) ([]netip.Addr, error)
	// NodeIPs returns the node's own addresses, at most one for each family, as the last method that has
	// read them from the store knows them. It returns none before, and does not block.
	NodeIPs() []netip.Addr
	// Location returns the name of the location of this node, or "" if there is none that can be used.
	Location(ctx context.Context) (string, error)
	// Observe reads the configuration of one of several networks and this host's lease from the store, both
	// at the same moment. The Observation is zero if the store does not have the configuration.
	Observe(ctx context.Context, own Lease) (Observation, error)
	// Release deletes the lease own of this node from the store, unless it is a reservation, or another
	// node has taken its subnets since. The manager has no lease after that, even if the store returns an
	// error.
	Release(ctx context.Context, own Lease) error
}

// ConfigWatcher is a Manager whose Watch does not report changes of the network configuration.
type ConfigWatcher interface {
	// WatchConfig blocks. It calls sink from one goroutine with the text of the configuration: at
	// once, and after every change. The text is nil if there is no configuration. WatchConfig
	// returns when ctx ends, with its error.
	WatchConfig(ctx context.Context, sink func(text []byte)) error
}

// Resumer is a Manager that cannot recognize this host's lease by the node's name, but only by its
// public address, which may have changed while the store was unavailable.
type Resumer interface {
	// Resumed tells the manager, before Acquire, that this node had the lease own, from its last
	// known state. own contains the public addresses that the node has published in the store.
	// Acquire continues with that lease, even if the node has another address now, and gives back
	// others that the node has written. After Resumed, Acquire also continues with a lease that has
	// an identity in the data of its claim, such as a VTEP MAC. own is zero if that is all that is
	// known.
	Resumed(own Lease)
}
