// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"context"
	"errors"
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

// Manager talks to a store. All methods retry failures that can pass. They return when ctx ends,
// with its error.
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
}
