// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"maps"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// Monitor implements dataplane.Kernel.
func (k *Kernel) Monitor(s dataplane.Scope) (dataplane.Monitor, error) {
	m := &monitor{kernel: k, scope: s, ready: wait.NewSignal()}
	m.Drain()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.monitors = append(k.monitors, m)
	return m, nil
}

// disturbed counts a change of another program and wakes the monitors. The caller holds
// k.mu.
func (k *Kernel) disturbed() {
	k.foreign++
	k.announce()
}

// Ready implements dataplane.Monitor.
func (m *monitor) Ready() <-chan struct{} { return m.ready }

// Mute implements dataplane.Monitor.
func (m *monitor) Mute() { m.muted = true }

// Close implements dataplane.Monitor.
func (m *monitor) Close() error {
	m.kernel.mu.Lock()
	defer m.kernel.mu.Unlock()
	m.kernel.monitors = slices.DeleteFunc(m.kernel.monitors, func(o *monitor) bool { return o == m })
	return nil
}

// Drain implements dataplane.Monitor. Like the real monitor it reports lost if a link has
// changed. Unlike the real one it describes a replaced route by two events: one route is
// deleted, and one is created. So only the real one leads to Event.Replaced.
func (m *monitor) Drain() (events []dataplane.Event, rerouted, lost bool) {
	m.kernel.mu.Lock()
	defer m.kernel.mu.Unlock()
	m.observe()
	events = m.events
	rerouted = m.kernel.foreign != m.foreign
	m.foreign = m.kernel.foreign
	lost = m.lost || m.kernel.silent != m.silent
	m.silent = m.kernel.silent
	muted := m.muted
	m.events = nil
	m.lost = false
	m.muted = false
	if muted || lost {
		return nil, rerouted || muted || lost, true
	}
	return events, rerouted, false
}

// observe adds the events of what has changed since the last call. The caller holds kernel.mu.
func (m *monitor) observe() {
	before := m.seen
	now := m.kernel.read(m.scope)
	m.seen = now
	gone := m.kernel.nexthopsGone[m.gone:]
	m.gone += len(gone)
	if !maps.Equal(before.Links, now.Links) {
		m.lost = true
		return
	}

	for _, id := range gone {
		m.events = append(m.events, dataplane.Event{Nexthop: id})
	}
	for _, o := range objectsOf(before) {
		r, ok := o.(dataplane.Route)
		if unannounced := ok && r.Dst.Addr().Is4() && slices.Contains(gone, r.NexthopID); !unannounced && !contains(now, o) {
			m.events = append(m.events, dataplane.Event{Object: o, Deleted: true})
		}
	}

	for _, o := range objectsOf(now) {
		if r, ok := o.(dataplane.Route); ok && r.Multipath && !before.HasRoute(r) {
			m.lost = true
		}
		if !contains(before, o) {
			m.events = append(m.events, dataplane.Event{Object: o})
		}
	}
}

func contains(s dataplane.State, o dataplane.Object) bool {
	switch o := o.(type) {
	case dataplane.Link:
		return s.Links[o.Name] == o
	case dataplane.Addr:
		_, ok := s.Addrs[o]
		return ok
	case dataplane.Neigh:
		return s.Neighs[o.NeighKey] == o
	case dataplane.FDB:
		return s.FDB[o.FDBKey] == o
	case dataplane.Route:
		return s.HasRoute(o)
	}
	return false
}
