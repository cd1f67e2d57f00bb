// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/big"
	"net/netip"
	"sync"
	"time"

	"github.com/flanneld/flanneld/subnet"
)

// identity is what a host must know about a lease. A lease with the same key and another address
// is another lease.
type identity struct {
	key    string
	public netip.Addr
}

// registry gives leases numbers, and knows which of them should exist.
type registry struct {
	mu      sync.RWMutex
	numbers map[identity]int
	all     []identity       // the index is the number of the lease
	byKey   map[string][]int // numbers of the leases with a key; there are several if the key moved to another host
	live    big.Int          // a bit for each number, set if the lease should exist
}

func newRegistry() *registry {
	return &registry{numbers: map[identity]int{}, byKey: map[string][]int{}}
}

func (r *registry) number(id identity) int {
	r.mu.RLock()
	n, ok := r.numbers[id]
	r.mu.RUnlock()
	if ok {
		return n
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	if n, ok := r.numbers[id]; ok {
		return n
	}

	n = len(r.numbers)
	r.numbers[id] = n
	r.all = append(r.all, id)
	r.byKey[id.key] = append(r.byKey[id.key], n)
	return n
}

func (r *registry) numbersOf(key string) []int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.byKey[key]
}

// expect adds a lease to those that should exist. If the parameter there is false, it removes
// the lease from them. It returns the number of the lease.
func (r *registry) expect(id identity, there bool) (number int) {
	number = r.number(id)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.live.SetBit(&r.live, number, bit(there))
	return number
}

func (r *registry) identity(number int) identity {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.all[number]
}

func (r *registry) expected() *big.Int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return new(big.Int).Set(&r.live)
}

func bit(set bool) uint {
	if set {
		return 1
	}
	return 0
}

// observation records which leases of others one host knows.
type observation struct {
	registry *registry

	mu  sync.Mutex
	own int // number of this host's lease; -1 before it is acquired
	// have has a bit for each number, set if the host knows the lease of another host. N hosts that each know N
	// leases store N² of them.
	have    big.Int
	changed time.Time
	store   subnet.StoreID // id of the store in the last update
	ledger  *subnet.Ledger // for the last known state; only the reference and its witness have it, and it is nil in other hosts
}

func (s *observation) stored() subnet.StoreID {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.store
}

// state returns the state that the daemon of this host would keep on disk. Only hosts with a ledger
// may call it.
func (s *observation) state() subnet.LedgerState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ledger.State()
}

func identify(l *subnet.Lease) identity {
	return identity{l.Key, l.Endpoints[0].PublicIP}
}

func (s *observation) take(u subnet.Update) {
	s.mu.Lock()
	defer s.mu.Unlock()
	changed := false
	s.store = u.Store
	if u.Changed == nil {
		var have big.Int
		for _, l := range u.Snapshot().Leases {
			have.SetBit(&have, s.registry.number(identify(l)), 1)
		}
		changed = have.Cmp(&s.have) != 0
		s.have.Set(&have)
	}

	for key, l := range u.Changed {
		now := -1
		if l != nil {
			now = s.registry.number(identify(l))
			changed = s.know(now, true) || changed
		}
		for _, n := range s.registry.numbersOf(key) {
			if n != now {
				changed = s.know(n, false) || changed
			}
		}
	}

	now := time.Now()
	if changed {
		s.changed = now
	}
	if s.ledger == nil {
		return
	}
	if _, ok := s.ledger.Follow(u, now); !ok {
		s.ledger.Apply(u.Snapshot(), now)
	}
}

func (s *observation) know(number int, known bool) (changed bool) {
	changed = s.have.Bit(number) != bit(known)
	s.have.SetBit(&s.have, number, bit(known))
	return changed
}

func (s *observation) acquired(l subnet.Lease) {
	n := s.registry.expect(identify(&l), true)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.own, s.changed = n, time.Now()
}

// right reports whether the host has a lease and knows exactly the other expected leases. It
// also returns when the host's knowledge last changed.
func (s *observation) right(expected *big.Int) (bool, time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.own >= 0 && s.have.Cmp(new(big.Int).SetBit(expected, s.own, 0)) == 0, s.changed
}

// difference returns a text about the first difference: the host has no lease, does not know an
// expected one, or knows one that should not exist. It returns "" if the host is right.
func (s *observation) difference(expected *big.Int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.own < 0 {
		return "has no lease"
	}

	for i := range max(s.have.BitLen(), expected.BitLen()) {
		has := s.have.Bit(i) == 1
		want := expected.Bit(i) == 1 && i != s.own
		if has == want {
			continue
		}
		id := s.registry.identity(i)
		if want {
			return fmt.Sprintf("does not know the lease %s of %s", id.key, id.public)
		}
		return fmt.Sprintf("knows the lease %s of %s, which should not exist", id.key, id.public)
	}
	return ""
}
