// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"encoding/json"

	"github.com/flanneld/flanneld/subnet"
)

// Side tells which leases, and which part of their data, one backend can use. During a
// migration a lease may have data for two backends, and hosts of both may be in the network.
type Side struct {
	Type      string                  // in the configuration
	LeaseType string                  // in leases
	Matches   func(subnet.Lease) bool // see Description
	// Strict is set if both backends of the migration have the same type, so that Matches
	// decides about every lease.
	Strict bool
}

// SidesOf returns the sides of b. configured is the type of b in the configuration.
func SidesOf(b Backend, configured string) []Side {
	if sides := b.Describe().Sides; len(sides) > 0 {
		return sides
	}
	return []Side{NewSide(b, configured)}
}

// NewSide returns the side of b, which has only one. The caller sets Strict. configured is the type of b in the
// configuration.
func NewSide(b Backend, configured string) Side {
	d := b.Describe()
	return Side{Type: configured, LeaseType: d.LeaseType, Matches: d.Matches}
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

// Before returns prev, the last claim of this host, with the data that this backend has published in it, alone or in a
// migration, and no other data.
func (s Side) Before(prev subnet.Claim) subnet.Claim {
	l := prev.Lease()
	own, ok := s.Of(&l)
	if !ok {
		own = &l
	}
	before := own.For(s.LeaseType, func(e subnet.Endpoint) json.RawMessage {
		if !ok {
			return nil
		}
		return e.Data
	})
	return before.Claim()
}

func (s Side) matches(l subnet.Lease) bool { return s.Matches == nil || s.Matches(l) }

// NextChecker is a Network with two sides.
type NextChecker interface {
	// CheckNext returns the identities that l claims for the next backend, and l as it would be
	// without that backend. It returns no identities if that backend does not run, or does not use l,
	// or if l has no data for the present one. It is pure, and safe for concurrent use.
	CheckNext(l subnet.Lease) (identities []string, without *subnet.Lease)
}
