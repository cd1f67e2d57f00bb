// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/json"

	"github.com/flanneld/flanneld/subnet"
)

// Matcher is implemented by backends that can be both the present and the next backend of a
// migration, such as vxlan with two VNIs.
type Matcher interface {
	// Matches reports whether the data of l fits this backend, and not one of the same type with
	// another configuration: for vxlan, whether the VNI is the same. It returns true if the data
	// does not tell. The type of l must be that of the backend. Matches is pure, and safe for
	// concurrent use.
	Matches(l subnet.Lease) bool
}

// Side tells which leases, and which part of their data, one backend can use. During a
// migration a lease may have data for two backends, and hosts of both may be in the network.
type Side struct {
	Type      string                  // in the configuration
	LeaseType string                  // in leases
	Matches   func(subnet.Lease) bool // nil if the type alone decides
	// Strict is set if both backends of the migration have the same type, so that Matches
	// decides about every lease.
	Strict bool
}

// NewSide returns the side of b: its types, and its method Matches if b is a Matcher. The caller
// sets Strict. configured is the type of b in the configuration.
func NewSide(b Backend, configured string) Side {
	s := Side{Type: configured, LeaseType: b.Describe().LeaseType}
	if m, ok := b.(Matcher); ok {
		s.Matches = m.Matches
	}
	return s
}

// Of returns a lease whose backend type and data are those for this backend. If l itself is such a
// lease, Of returns l. If the next backend in l is this one, Of returns l as it would be without
// its present backend. Otherwise ok is false, and the lease must not be used.
func (s Side) Of(l *subnet.Lease) (_ *subnet.Lease, ok bool) {
	hasNext := l.NextType != "" && l.NextType == s.Type
	if l.BackendType == s.LeaseType && (!s.Strict && !hasNext || s.matches(*l)) {
		return l, true
	}
	if !hasNext {
		return nil, false
	}
	next := l.For(s.LeaseType, func(e subnet.Endpoint) json.RawMessage { return e.NextData })
	return &next, s.matches(next)
}

func (s Side) matches(l subnet.Lease) bool { return s.Matches == nil || s.Matches(l) }

// Reclaimer is a Network that can find out that Claim of its backend may now return more data than
// this host's lease has, or that no peer keeps this host from the next subnet.Stage.
type Reclaimer interface {
	// Reclaim returns a channel that receives when the network finds that out. The owner of the
	// network then publishes the new claim, and replaces the network by one with the new lease or stage.
	Reclaim() <-chan struct{}
}

// Publisher is a Network whose data in this host's lease changes while it runs.
type Publisher interface {
	// Republish returns a channel that receives when Claim of the backend returns other data than
	// this host's lease has. The owner of the network then publishes the new claim, and does not
	// restart the network.
	Republish() <-chan struct{}
	// Published tells the network that the store now has the claim c. It may be called at any time.
	Published(c subnet.Claim)
}

// Selector is a Network that gets each lease with the data for all backends. Other networks get
// only the part for their own backend.
type Selector interface {
	// Selects reports whether the network can use l. It is pure, and safe for concurrent
	// use.
	Selects(l *subnet.Lease) bool
	// CheckNext returns the identities that l claims for the next backend, and l as it would be
	// without that backend. It returns no identities if that backend does not run, or does not use l,
	// or if l has no data for the present one. It is pure, and safe for concurrent use.
	CheckNext(l subnet.Lease) (identities []string, without *subnet.Lease)
}

// TwoSided is a Backend that consists of two backends, which can use different leases.
type TwoSided interface {
	// Sides returns the sides of the present and of the next backend. It is pure.
	Sides() (present, next Side)
}
