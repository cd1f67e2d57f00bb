// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// mirror caches the kernel's state. A read fills it. The kernel's announcements and the
// Reconciler's own acknowledged writes keep it up to date. If it might be wrong it
// becomes invalid, and the next look reads the kernel again.
type mirror struct {
	kernel  Kernel
	scope   Scope
	monitor Monitor // nil if every look reads
	resync  time.Duration

	State
	valid    bool
	until    time.Time // the first look after this time reads in any case
	rerouted bool      // result of Monitor.Drain; the Reconciler resets it after it has reported it
}

// void makes the next look read the kernel.
func (m *mirror) void() { m.valid = false }

// look brings the mirror up to date. If it must read the kernel, it reads scope. It returns
// the keys of the objects that other programs have changed. all is true if any object may
// have changed.
func (m *mirror) look(ctx context.Context, scope Scope) (changed Keys, all bool, err error) {
	if m.monitor != nil {
		events, rerouted, lost := m.monitor.Drain()
		m.rerouted = m.rerouted || rerouted
		if lost {
			m.void()
		}
		for _, e := range events {
			if m.valid && m.hear(e) {
				changed.Add(e.Object)
			}
		}
		if m.valid && time.Now().Before(m.until) {
			return changed, false, nil
		}
	}
	m.void()
	if m.State, err = m.kernel.Read(ctx, scope); err != nil {
		return changed, true, fmt.Errorf("read kernel state: %w", err)
	}
	m.valid = m.monitor != nil
	m.until = time.Now().Add(m.resync * 4 / 5) // the earliest time of a caller whose timer has a jitter of a fifth of resync
	return changed, true, nil
}

// hear applies an event and reports whether it changed the mirror. Own writes are
// announced too, and change nothing.
func (m *mirror) hear(e Event) bool {
	if e.Nexthop != 0 {
		return m.hearNexthop(e.Nexthop)
	}
	switch o := e.Object.(type) {
	case Route:
		return m.hearRoute(o, e)
	case Neigh:
		return hear(m.Neighs, o.NeighKey, o, e.Deleted)
	case FDB:
		return hear(m.FDB, o.FDBKey, o, e.Deleted)
	case Addr:
		return hear(m.Addrs, o, struct{}{}, e.Deleted)
	}
	return false
}

func hear[K, V comparable](have map[K]V, key K, value V, deleted bool) bool {
	old, ok := have[key]
	switch {
	case deleted:
		delete(have, key)
		return ok
	case ok && old == value:
		return false
	}
	have[key] = value
	return true
}

// hearNexthop invalidates the mirror if a route in it uses a nexthop object that has been
// deleted or has another gateway now, even if another program created the object.
func (m *mirror) hearNexthop(id uint32) bool {
	for r := range m.AllRoutes() {
		if r.NexthopID == id {
			m.void()
			return false
		}
	}
	return false
}

func (m *mirror) hearRoute(r Route, e Event) bool {
	i := slices.IndexFunc(m.Routes[r.Dst], func(have Route) bool {
		return have.canonical() == r.canonical() && have.Protocol == r.Protocol && have.NexthopID == r.NexthopID
	})
	switch {
	case e.Deleted && i >= 0:
		m.Remove(m.Routes[r.Dst][i])
		return true
	case e.Deleted:
		return false
	case i >= 0: // the kernel may have set more attributes than the request
		m.Routes[r.Dst][i] = r
		return false
	case e.Replaced: // the kernel does not say which route was replaced
		m.void()
		return true
	}
	m.Add(r)
	return true
}

// wrote applies changes that the kernel has acknowledged.
func (m *mirror) wrote(ops []Op) {
	for _, op := range ops {
		switch o := op.Object.(type) {
		case Link: // a change of a link deletes or resets objects on it
			m.void()
		case Route:
			m.wroteRoute(o, op.Delete)
		default:
			if op.Delete {
				m.Remove(o)
			} else {
				m.Add(o)
			}
		}
	}
}

func (m *mirror) wroteRoute(r Route, deleted bool) {
	if deleted {
		m.Remove(r)
		// The kernel may have deleted another route, because a delete request does not
		// contain all attributes: an IPv6 one matches any route through a nexthop object,
		// an IPv4 one without a gateway matches any route on the device, and a request
		// for a multipath route does not contain the next hops.
		if r.Multipath || len(m.alike(r)) > 0 { // the kernel has chosen one
			m.void()
		}
		return
	}
	alike := m.alike(r)
	if len(alike) > 1 { // the kernel has chosen one
		m.void()
	}
	for _, old := range alike {
		m.Remove(old)
	}
	m.Add(r)
}

// alike returns the routes that a put of r may replace or a delete of r may remove. They
// may have another type than r.
func (m *mirror) alike(r Route) []Route {
	var found []Route
	for _, have := range m.Routes[r.Dst] {
		if have.Priority == r.Priority && have.TOS == r.TOS {
			found = append(found, have)
		}
	}
	return found
}
