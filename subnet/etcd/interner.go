// SPDX-License-Identifier: Apache-2.0

package etcd

import "sync"

// Interner makes the managers of one process share the memory of equal leases of one store. The
// daemon has one manager and does not need it. test/storm runs the managers of N hosts: without an
// Interner their caches would have N² leases of several hundred bytes: 773 MB instead of 345 with
// 1,000 hosts. test/storm cannot share leases itself, because the caches are private. The zero Interner is ready to use, and safe for
// concurrent use.
type Interner struct {
	mu      sync.Mutex
	entries map[internKey]*entry // the entry of that key that was read last
}

type internKey struct {
	key      string
	restored bool // the entry comes from the last known state
}

// intern returns the entry that all managers share for the lease in e. If s is nil it returns e.
// The caller must not change the entry that it gets.
func (s *Interner) intern(e *entry) *entry {
	if s == nil {
		return e
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	key := internKey{e.key, e.modRevision == 0}
	if known := s.entries[key]; known != nil && known.createRevision == e.createRevision && known.is(e.modRevision, e.leaseID) {
		return known
	}
	if s.entries == nil {
		s.entries = map[internKey]*entry{}
	}

	detached := *e // e may be part of a list, which would stay in memory as a whole
	s.entries[key] = &detached
	return &detached
}
