// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"context"
	"maps"
	"slices"

	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/wait"
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
	foreign := m.kernel.foreign
	silent := m.kernel.silent
	gone := m.kernel.nexthopsGone[m.gone:]
	m.kernel.mu.Unlock()
	now, err := m.kernel.Read(context.Background(), m.scope)
	if err != nil {
		return nil, true, true
	}
	before := m.seen
	m.seen = now
	rerouted = foreign != m.foreign
	m.foreign = foreign
	m.gone += len(gone)
	lost = silent != m.silent
	m.silent = silent
	if m.muted {
		m.muted = false
		return nil, true, true
	}
	if !maps.Equal(before.Links, now.Links) {
		return nil, true, true
	}

	for _, id := range gone {
		events = append(events, dataplane.Event{Nexthop: id})
	}
	for _, o := range objectsOf(before) {
		r, ok := o.(dataplane.Route)
		if unannounced := ok && r.Dst.Addr().Is4() && slices.Contains(gone, r.NexthopID); !unannounced && !contains(now, o) {
			events = append(events, dataplane.Event{Object: o, Deleted: true})
		}
	}

	for _, o := range objectsOf(now) {
		if r, ok := o.(dataplane.Route); ok && r.Multipath && !before.HasRoute(r) {
			lost = true
		}
		if !contains(before, o) {
			events = append(events, dataplane.Event{Object: o})
		}
	}
	return events, rerouted, lost
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
