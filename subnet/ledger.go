// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"cmp"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Ledger is the daemon's cache of the leases of other nodes, its peers. It decides when a peer is
// gone: only when its key is missing from the same store, at the last known revision or a later one.
// If the store was replaced, or is at an earlier revision than before, the ledger holds the peers that
// are missing from the store: they stay in the ledger until a lease in the store contradicts them or
// one TTL has passed. After a long outage it also holds peers whose leases have run out, until
// Update.Grace. The zero Ledger has no peers. A Ledger is not safe for concurrent use.
type Ledger struct {
	store  StoreID
	peers  map[string]knownLease
	synced bool            // a snapshot was applied since the last Restore; the ledger removes no peer before that
	held   map[string]hold // the held peers, by key
	// unreadable has the keys of leases that cannot be read, and of which the ledger knows no earlier
	// version either.
	unreadable map[string]struct{}
}

// hold says why and until when a peer is held.
type hold struct {
	until time.Time
	grace bool // the store has deleted the lease: see Update.Grace; if false, it has forgotten the lease
}

// knownLease is a lease and the time when the ledger got it, or when Follow last applied a change
// of it.
type knownLease struct {
	*Lease
	since time.Time
}

// detached returns k with a copy of its lease. All leases of one listing are in one block of memory.
// The copy does not keep that block in use.
func (k knownLease) detached() knownLease {
	l := *k.Lease
	return knownLease{&l, k.since}
}

// Peer is the lease of another node in the form that is stored on disk.
type Peer struct {
	Lease     Lease     `json:"lease"`
	HeldUntil time.Time `json:"heldUntil,omitzero"` // when the hold ends; zero if the peer is not held
}

// LedgerState is the content of a Ledger in the form that is stored on disk.
type LedgerState struct {
	Store StoreID `json:"store"`
	Peers []Peer  `json:"peers"` // sorted by key
}

// Restore replaces the content of the ledger by state. The caller must not change state
// afterwards.
func (l *Ledger) Restore(state LedgerState, now time.Time) {
	*l = Ledger{store: state.Store, peers: make(map[string]knownLease, len(state.Peers)), held: map[string]hold{}}
	for i := range state.Peers {
		p := &state.Peers[i]
		l.peers[p.Lease.Key] = knownLease{&p.Lease, now}
		if !p.HeldUntil.IsZero() {
			l.held[p.Lease.Key] = hold{until: p.HeldUntil}
		}
	}
}

// First returns the n peers with the smallest keys, or all if there are fewer.
func (l *Ledger) First(n int) []*Lease {
	all := slices.SortedFunc(l.Leases(), func(a, b *Lease) int { return cmp.Compare(a.Key, b.Key) })
	return all[:min(n, len(all))]
}

// State returns the content of the ledger. The leases in it are shared and read-only.
func (l *Ledger) State() LedgerState {
	state := LedgerState{Store: l.store, Peers: make([]Peer, 0, len(l.peers))}
	for key, peer := range l.peers {
		state.Peers = append(state.Peers, Peer{*peer.Lease, l.held[key].until})
	}
	slices.SortFunc(state.Peers, func(a, b Peer) int { return cmp.Compare(a.Lease.Key, b.Lease.Key) })
	return state
}

// Apply replaces the peers by those of a snapshot. It holds a peer that is missing from the snapshot,
// unless the snapshot proves that the peer is gone. The leases are shared and read-only. A second call
// with the same snapshot and the same value of now changes nothing.
func (l *Ledger) Apply(s Snapshot, now time.Time) {
	same := !s.Another && s.Store.ID == l.store.ID && s.Store.Revision >= l.store.Revision
	l.store = s.Store

	peers := make(map[string]knownLease, len(s.Leases))
	held := map[string]hold{}
	for _, lease := range s.Leases {
		peers[lease.Key] = knownLease{lease, cmp.Or(l.peers[lease.Key].since, now)}
	}

	l.unreadable = map[string]struct{}{}
	for _, key := range s.Undecodable {
		if peer, there := l.peers[key]; there {
			peers[key] = peer.detached()
		} else {
			l.unreadable[key] = struct{}{}
		}
	}

	contradicted := l.contradictedBy(s.Leases)
	contradictedSince := l.contradictedBy(slices.DeleteFunc(slices.Clone(s.Leases), func(lease *Lease) bool {
		return l.peers[lease.Key].Lease == lease
	}))
	for key, peer := range l.peers {
		if _, current := peers[key]; current {
			continue
		}

		h, before := l.held[key]
		if !before && same {
			h = hold{s.Grace, true}
		} else if latest := now.Add(TTL); !before || h.grace && !same || h.until.After(latest) {
			h = hold{latest, h.grace && same} // h.until is after latest if the clock was set back
		}
		by := contradicted
		if h.grace { // the store had the lease beside those that are as before
			by = contradictedSince
		}
		if now.Before(h.until) && !by(peer.Lease) {
			peers[key] = peer.detached()
			held[key] = h
		}
	}

	l.peers = peers
	l.synced = true
	l.held = held
}

// Follow applies the changes since the last snapshot or update. Its cost depends on the number
// of changes and not on the number of peers. dropped has the keys of held peers that Follow has
// removed because a change contradicts them, or because their grace period is over. If changes alone
// are not sufficient, Follow changes nothing and ok is false: the caller must apply the whole snapshot.
func (l *Ledger) Follow(u Update, now time.Time) (dropped []string, ok bool) {
	if !l.synced || u.Changed == nil || u.Store.ID != l.store.ID || u.Store.Revision < l.store.Revision {
		return nil, false
	}

	l.store = u.Store
	for key, lease := range u.Changed {
		if _, held := l.held[key]; lease == nil && !held && l.peers[key].Lease != nil && now.Before(u.Grace) {
			l.held[key] = hold{u.Grace, true}
		}
	}

	// Unchanged leases contradict no held peer: Apply or an earlier call of Follow has compared them.
	contradicted := l.contradictedBy(slices.DeleteFunc(slices.Collect(maps.Values(u.Changed)), func(c *Lease) bool { return c == nil }))
	for key, h := range l.held {
		over := h.grace && !now.Before(h.until)
		if u.Changed[key] == nil && !slices.Contains(u.Undecodable, key) && (over || contradicted(l.peers[key].Lease)) {
			dropped = append(dropped, key)
		}
	}
	for _, key := range dropped {
		l.remove(key)
	}

	for _, key := range u.Undecodable {
		if _, there := l.peers[key]; there {
			delete(l.held, key)
		} else {
			l.unreadable[key] = struct{}{}
		}
	}

	for key, lease := range u.Changed {
		delete(l.unreadable, key)
		switch _, held := l.held[key]; {
		case lease != nil:
			l.remove(key)
			l.peers[key] = knownLease{lease, now}
		case !held: // a held peer stays, because the store did not have it before either
			l.remove(key)
		}
	}
	return dropped, true
}

// Keep sets the Kept of a known lease.
func (l *Ledger) Keep(key string, kept map[string]uint64) {
	peer := l.peers[key].detached()
	peer.Kept = kept
	l.peers[key] = peer
}

// HasUnreadable reports whether the store has a lease about which nothing is known, because it
// cannot be read and never could.
func (l *Ledger) HasUnreadable() bool { return len(l.unreadable) > 0 }

func (l *Ledger) remove(key string) {
	delete(l.peers, key)
	delete(l.held, key)
}

// isSpecified reports whether a can be a public address. A lease without a public address has the
// zero Addr, 0.0.0.0 or ::.
func isSpecified(a netip.Addr) bool { return a.IsValid() && !a.IsUnspecified() }

// Expire removes held peers whose hold is over, and reports whether there were any. It removes
// none before Apply was called. A grace period ends only after an answer of the store: while the
// store is unreachable, no node can take its lease again.
func (l *Ledger) Expire(now time.Time) bool {
	if !l.synced {
		return false
	}

	known := len(l.peers)
	latest := now.Add(TTL)
	for key, h := range l.held {
		switch {
		case h.until.After(latest): // the clock may have been set back
			h.until = latest
			l.held[key] = h
		case !h.grace && !now.Before(h.until):
			l.remove(key)
		}
	}
	return len(l.peers) < known
}

// Held returns the keys of the held peers that the store has forgotten, sorted. No peer counts as held before
// Apply was called; this applies to IsHeld, too.
func (l *Ledger) Held() (keys []string) {
	for key := range l.held {
		if l.IsHeld(key) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// IsHeld reports whether the peer with that key is held because the store has forgotten it.
func (l *Ledger) IsHeld(key string) bool {
	h, held := l.held[key]
	return held && !h.grace && l.synced
}

// Len returns the number of known leases, including those of held peers.
func (l *Ledger) Len() int { return len(l.peers) }

// Lease returns the lease with that key, which is shared and read-only, or nil if it is not
// known.
func (l *Ledger) Lease(key string) *Lease { return l.peers[key].Lease }

// Since returns when the ledger got the lease with that key, or when Follow last applied a change
// of it. It returns zero if the lease is not known.
func (l *Ledger) Since(key string) time.Time { return l.peers[key].since }

// Leases iterates over all known leases, which are shared and read-only.
func (l *Ledger) Leases() iter.Seq[*Lease] {
	return func(yield func(*Lease) bool) {
		for _, peer := range l.peers {
			if !yield(peer.Lease) {
				return
			}
		}
	}
}

// contradictedBy returns a function that reports whether one of the new leases contradicts a held peer. There
// are two cases. The subnets of both overlap, because another node has taken the subnet. Or both have the same
// public IP, and no peer had this public IP together with the subnet of the new lease: the node of the held
// peer then has another subnet now. If a peer had both, it is another node with the same public IP.
func (l *Ledger) contradictedBy(leases []*Lease) func(*Lease) bool {
	type location struct {
		public netip.Addr
		subnet netip.Prefix
	}

	// Usually no peer is held, and the tables are not needed.
	find := sync.OnceValues(func() (*prefixTable, map[netip.Addr]struct{}) {
		subnets := new(prefixTable)
		fresh := map[location]struct{}{}
		for _, lease := range leases {
			for _, e := range lease.Endpoints {
				subnets.Insert(e.Subnet, prefixOwner{})
				if isSpecified(e.PublicIP) {
					fresh[location{e.PublicIP, e.Subnet}] = struct{}{}
				}
			}
		}

		for _, peer := range l.peers {
			for _, e := range peer.Endpoints {
				delete(fresh, location{e.PublicIP, e.Subnet})
			}
		}

		moved := map[netip.Addr]struct{}{}
		for at := range fresh {
			moved[at.public] = struct{}{}
		}
		return subnets, moved
	})

	return func(known *Lease) bool {
		subnets, moved := find()
		return slices.ContainsFunc(known.Endpoints, func(e Endpoint) bool {
			_, overlaps := subnets.find(e.Subnet)
			_, gone := moved[e.PublicIP]
			return overlaps || gone
		})
	}
}
