package dataplane

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// mirror is what is known of the kernel: filled by a read, kept true by what
// the kernel announces and by own writes that it has acknowledged. It is only
// a cache. Whenever it might be wrong it is void, and the next look reads
// again.
type mirror struct {
	kernel  Kernel
	scope   Scope
	monitor Monitor // nil: every look reads
	resync  time.Duration

	State
	valid bool
	until time.Time // the first look from then on reads, whatever it says
	// fresh says that nobody has used the devices yet: the next read leaves out
	// routes of others, of which a host may have many. The mirror is partial then:
	// it does not tell which of them a put would meet. For the first puts that will
	// do, and no longer.
	fresh, partial bool
	rerouted       bool // see Monitor; for who asks to clear
}

// void has the next look read.
func (m *mirror) void() { m.valid = false }

// bulk is from how many own writes on it is less work to read everything than to
// hear of each.
const bulk = 1000

// mute has the kernel announce nothing while ops are carried out, if they are most
// of what there will be. It reports whether it did: the next look reads then.
func (m *mirror) mute(ops []Op) bool {
	if m.monitor == nil || len(ops) < bulk || len(ops) < m.size() {
		return false
	}
	m.monitor.Mute()
	m.void()
	return true
}

// look brings the mirror up to date. It returns the keys of what others have
// changed or, with all set, that everything may have.
func (m *mirror) look(ctx context.Context) (changed Keys, all bool, err error) {
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
	scope := m.scope
	scope.Connected, m.fresh = m.fresh, false
	if m.State, err = m.kernel.Read(ctx, scope); err != nil {
		return changed, true, fmt.Errorf("read kernel state: %w", err)
	}
	m.partial = scope.Connected
	m.valid = m.monitor != nil
	m.until = time.Now().Add(m.resync * 4 / 5) // the soonest that who ticks around resync looks
	return changed, true, nil
}

// hear takes an announcement in and reports whether it was news: own writes
// come back as well.
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

// hearNexthop voids the mirror if a route in it uses a nexthop object that has gone or leads
// elsewhere, whoever made the object.
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
	case i >= 0: // the kernel may know more of it than we asked for
		m.Routes[r.Dst][i] = r
		return false
	case e.Replaced: // whom, it does not say
		m.void()
		return true
	}
	m.Add(r)
	return true
}

// wrote takes in changes that the kernel has acknowledged.
func (m *mirror) wrote(ops []Op) {
	m.reserve(puts(ops))
	for _, op := range ops {
		switch o := op.Object.(type) {
		case Link: // takes things along, or resets them
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
		// A delete does not say all that tells a route from others: an IPv6 one fits
		// any through a nexthop object, an IPv4 one without a gateway any by its
		// device, and one with several next hops does not name them.
		if r.Multipath || len(m.alike(r)) > 0 { // the kernel chose one
			m.void()
		}
		return
	}
	alike := m.alike(r)
	if len(alike) > 1 { // the kernel chose one
		m.void()
	}
	for _, old := range alike {
		m.Remove(old)
	}
	m.Add(r)
}

// alike returns the routes that a put of r may replace, or a delete hit: a route of
// another type can be one.
func (m *mirror) alike(r Route) []Route {
	var found []Route
	for _, have := range m.Routes[r.Dst] {
		if have.Priority == r.Priority && have.TOS == r.TOS {
			found = append(found, have)
		}
	}
	return found
}
