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

// Ledger remembers peers and decides when they are gone: only when their key
// is missing from a snapshot of the same store at a revision not below the
// last one seen. A store that is another, or older than it was, does not make
// them go: they are held until it contradicts them or one TTL has passed. The
// zero Ledger knows nobody. It is not safe for concurrent use.
type Ledger struct {
	store  StoreID
	peers  map[string]known
	synced bool                 // with a snapshot, since it was restored: nobody goes before
	held   map[string]time.Time // peers that the store does not have, and until when
}

// known is a lease and when it came, or was last followed in a change.
type known struct {
	*Lease
	since time.Time
}

// alone returns k with a copy of its lease. The lease as it came keeps all others
// in memory that were listed with it.
func (k known) alone() known {
	l := *k.Lease
	return known{&l, k.since}
}

// Peer is what a Ledger knows of one other node.
type Peer struct {
	Lease     Lease     `json:"lease"`
	HeldUntil time.Time `json:"heldUntil,omitzero"` // zero: the store has it
}

// LedgerState is a Ledger to be kept on disk.
type LedgerState struct {
	Store StoreID `json:"store"`
	Peers []Peer  `json:"peers"` // by key
}

// Restore replaces what the ledger knows by state, which is shared and read-only from
// then on.
func (l *Ledger) Restore(state LedgerState, now time.Time) {
	l.store, l.synced, l.held = state.Store, false, map[string]time.Time{}
	l.peers = make(map[string]known, len(state.Peers))
	for i := range state.Peers {
		p := &state.Peers[i]
		l.peers[p.Lease.Key] = known{&p.Lease, now}
		if !p.HeldUntil.IsZero() {
			l.held[p.Lease.Key] = p.HeldUntil
		}
	}
}

// State returns what the ledger knows. The leases in it are shared and
// read-only.
func (l *Ledger) State() LedgerState {
	state := LedgerState{Store: l.store, Peers: make([]Peer, 0, len(l.peers))}
	for key, peer := range l.peers {
		state.Peers = append(state.Peers, Peer{*peer.Lease, l.held[key]})
	}
	slices.SortFunc(state.Peers, func(a, b Peer) int { return cmp.Compare(a.Lease.Key, b.Lease.Key) })
	return state
}

// Apply takes a snapshot in. Applying one snapshot again is harmless, and
// needed now and then for held leases to run out. The leases are shared and
// read-only.
func (l *Ledger) Apply(s Snapshot, now time.Time) {
	same := !s.Another && s.Store.ID == l.store.ID && s.Store.Revision >= l.store.Revision
	l.store = s.Store

	peers, held := make(map[string]known, len(s.Leases)), map[string]time.Time{}
	for _, lease := range s.Leases {
		peers[lease.Key] = known{lease, cmp.Or(l.peers[lease.Key].since, now)}
	}
	for _, key := range s.Undecodable {
		if peer, there := l.peers[key]; there {
			peers[key] = peer.alone()
		}
	}
	contradicted := sync.OnceValue(func() func(*Lease) bool { return contradictions(s.Leases, l.peers) })
	for key, peer := range l.peers {
		if _, current := peers[key]; current {
			continue
		}
		until, before := l.held[key]
		if !before && same {
			continue
		}
		// The clock may have been set back since.
		if latest := now.Add(TTL); !before || until.After(latest) {
			until = latest
		}
		if now.Before(until) && !contradicted()(peer.Lease) {
			peers[key], held[key] = peer.alone(), until
		}
	}
	l.peers, l.synced, l.held = peers, true, held
}

// Follow takes in what has changed since the last snapshot or update, at the
// cost of just that. It reports false, and does nothing, where that is not
// enough to go by: the whole snapshot has to be applied then.
func (l *Ledger) Follow(u Update, now time.Time) bool {
	if !l.synced || u.Changed == nil || len(l.held) > 0 || u.Store.ID != l.store.ID || u.Store.Revision < l.store.Revision {
		return false
	}
	l.store = u.Store
	for key, lease := range u.Changed {
		if lease == nil {
			delete(l.peers, key)
		} else {
			l.peers[key] = known{lease, now}
		}
	}
	return true
}

// Expire lets go of peers that were held long enough, and reports whether
// there were any.
func (l *Ledger) Expire(now time.Time) bool {
	if !l.synced {
		return false
	}
	var gone bool
	for key, until := range l.held {
		if !now.Before(until) {
			delete(l.peers, key)
			delete(l.held, key)
			gone = true
		}
	}
	return gone
}

// Held returns the keys of the peers that are held, in order.
func (l *Ledger) Held() []string {
	if !l.synced || len(l.held) == 0 {
		return nil
	}
	return slices.Sorted(maps.Keys(l.held))
}

// IsHeld reports whether the peer with that key is held.
func (l *Ledger) IsHeld(key string) bool {
	_, held := l.held[key]
	return held && l.synced
}

// Len returns how many leases are known.
func (l *Ledger) Len() int { return len(l.peers) }

// Lease returns the lease with that key, which is shared and read-only; nil if it
// is not known.
func (l *Ledger) Lease(key string) *Lease { return l.peers[key].Lease }

// Since returns when the lease with that key came, or was last followed in a
// change; zero if it is not known.
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

// contradictions returns whether one of leases takes the subnet of the known lease
// that is asked about, or shows that its node has another subnet now: it has the
// node's public IP with a subnet that did not go with it before. A lease that did,
// by peers, is of another node with the same public IP.
func contradictions(leases []*Lease, peers map[string]known) func(*Lease) bool {
	type home struct {
		public netip.Addr
		subnet netip.Prefix
	}
	before := map[home]struct{}{}
	for _, peer := range peers {
		for _, e := range peer.Endpoints {
			before[home{e.PublicIP, e.Subnet}] = struct{}{}
		}
	}
	var subnets index
	moved := map[netip.Addr]struct{}{}
	for _, lease := range leases {
		for _, e := range lease.Endpoints {
			if e.Subnet.IsValid() {
				subnets.add(e.Subnet, holder{})
			}
			if _, there := before[home{e.PublicIP, e.Subnet}]; !there && e.PublicIP.IsValid() && !e.PublicIP.IsUnspecified() {
				moved[e.PublicIP] = struct{}{}
			}
		}
	}
	return func(known *Lease) bool {
		return slices.ContainsFunc(known.Endpoints, func(e Endpoint) bool {
			_, overlaps := subnets.find(e.Subnet)
			_, gone := moved[e.PublicIP]
			return overlaps || gone
		})
	}
}
