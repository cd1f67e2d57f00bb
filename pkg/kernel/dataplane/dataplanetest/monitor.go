// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"maps"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// Monitor implements dataplane.Kernel.
func (k *Kernel) Monitor(s dataplane.Scope, changed wait.Signal) (dataplane.Monitor, error) {
	m := &monitor{kernel: k, scope: s, ready: changed}
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
	m.events = nil
	m.lost = false
	if lost {
		return nil, true, true
	}
	return events, rerouted, false
}

// observe adds the events of what has changed since the last call. The caller holds kernel.mu.
func (m *monitor) observe() {
	before := m.seen
	now := m.kernel.read(m.scope)
	m.seen = now
	if !maps.Equal(before.Links, now.Links) {
		m.lost = true
		return
	}

	for o := range before.All() {
		if !now.Has(o) {
			m.events = append(m.events, dataplane.Event{Object: o, Deleted: true})
		}
	}
	for o := range now.All() {
		if !before.Has(o) {
			m.events = append(m.events, dataplane.Event{Object: o})
		}
	}
}
