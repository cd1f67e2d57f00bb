// SPDX-License-Identifier: Apache-2.0

package etcd

import "sync"

// Shared keeps leases that managers of one process have read from the same store, each of
// them once. The daemon has one manager and needs none. A simulation of N hosts would
// otherwise need memory for N² leases. The zero value is ready to use.
type Shared struct {
	mu      sync.Mutex
	entries map[sharedKey]*entry // as it was read last
}

type sharedKey struct {
	key    string
	former bool // it comes from a former run
}

// one returns the entry that all managers share for the lease in e, so that it is in memory
// once. If s is nil it returns e. The caller must not change the result.
func (s *Shared) one(e *entry) *entry {
	if s == nil {
		return e
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := sharedKey{e.key, e.modRevision == 0}
	if known := s.entries[key]; known != nil && known.createRevision == e.createRevision && known.is(e.modRevision, e.leaseID) {
		return known
	}
	if s.entries == nil {
		s.entries = map[sharedKey]*entry{}
	}
	alone := *e // e may be part of a list, which stays in memory as a whole
	s.entries[key] = &alone
	return &alone
}
