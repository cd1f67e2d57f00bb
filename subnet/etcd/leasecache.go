// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// leaseCache is what the manager remembers of the leases in the store. It begins with the last known state of an
// earlier run. Recall and Acquire leave in it what they have listed or brought up to date. Watch takes it, keeps it up
// to date, and leaves it to the next Watch:
//
//	last known state --restore, list--> read by Recall or Acquire --resume--> followed by Watch
//	       |                                                                     ^
//	       +------------------------------restore, list--------------------------+
//
// Only Watch changes a cache, after it has taken it. The zero leaseCache knows nothing.
type leaseCache struct {
	entries map[string]*entry // by key
	store   subnet.StoreID    // the cache has the leases of exactly this revision; 0: nothing is known
	read    time.Time         // when the store had exactly these leases; zero if a request has to find out whether it has
	stale   bool              // the leases must be listed before they are used again
	another bool              // the store is not that of the former cache, even if it has the same id: see Snapshot
	// marked is the number of leases that the store had, according to a last known state which the store has not
	// confirmed yet. It is zero in all other caches.
	marked         int64
	configRevision int64             // revision up to which the configuration is known
	problems       map[string]string // by key, why a lease cannot be read, as Watch has logged it
	// auditAt is when to audit a cache that was restored from the last known state. It is zero if all entries were
	// read in this run, or an audit has compared them.
	auditAt time.Time
	gracePeriod
}

// newLeaseCache returns a cache with the last known state in cfg. It is empty if the state has no valid mark or
// revision, a lease that does not match its key or lacks its revision or etcd lease, as in states of earlier
// versions, or this host's lease among the peers.
func newLeaseCache(cfg Config) *leaseCache {
	c := &leaseCache{store: cfg.Known.Store, entries: make(map[string]*entry, len(cfg.Known.Peers)+1)}
	mark, _, _ := strings.Cut(c.store.Mark, " ") // earlier versions have more in it
	var err error
	if c.marked, err = strconv.ParseInt(mark, 10, 64); err != nil || c.store.Revision < 1 {
		return &leaseCache{}
	}

	for i := range cfg.Known.Peers {
		p := &cfg.Known.Peers[i]
		if !p.HeldUntil.IsZero() { // the store did not have the held peer
			continue
		}

		e := newEntry(p.Lease)
		named, err := codec.ParseKey(e.key)
		if err != nil || !slices.Equal(named, e.subnets) || e.key == cfg.Own.Key || e.modRevision == 0 ||
			e.leased() == p.Lease.Permanent {
			return &leaseCache{}
		}
		c.entries[e.key] = e
	}
	if cfg.Own.Key != "" {
		c.entries[cfg.Own.Key] = newEntry(cfg.Own)
	}
	return c
}

// newEntry returns the entry of a lease. That of this host's lease in the last known state has no modRevision.
func newEntry(l subnet.Lease) *entry {
	return &entry{
		key: l.Key, lease: l, subnets: l.Subnets(), leaseID: clientv3.LeaseID(l.LeaseID),
		createRevision: int64(l.Order), modRevision: int64(l.Claimed),
	}
}

// successor returns the cache with the leases l, which replaces c. is is the result of the comparison of c with the
// store of l.
func (c *leaseCache) successor(l listing, is comparison) *leaseCache {
	wentBack := c.store.ID == l.store.ID && l.store.Revision < c.store.Revision
	return &leaseCache{
		entries: byKey(l.entries), store: l.store, read: time.Now(), problems: c.problems, gracePeriod: c.gracePeriod,
		another: c.another || is == another || wentBack || !c.mayPrecede(l),
	}
}

func byKey(entries []*entry) map[string]*entry {
	all := make(map[string]*entry, len(entries))
	for _, e := range entries {
		all[e.key] = e
	}
	return all
}

// listing returns the leases in the cache, in any order.
func (c *leaseCache) listing() listing {
	l := listing{store: c.store, entries: make([]*entry, 0, len(c.entries))}
	l.entries = slices.AppendSeq(l.entries, maps.Values(c.entries))
	return l
}

func (c *leaseCache) count() int64 { return int64(len(c.entries)) }

// newest returns the entry that was written last, or nil if there is none.
func (c *leaseCache) newest() (last *entry) {
	var revision int64
	for _, e := range c.entries {
		if e.modRevision > revision {
			revision = e.modRevision
			last = e
		}
	}
	return last
}

// mayPrecede reports whether the cache may be an earlier state of the store that has the leases l.
//
// This requires that the cache has all entries of l that were written up to its revision. A last known state may lack
// some, so it is enough if l has one of its leases, or it has none: otherwise the store was replaced or emptied. The
// revision does not always show that, because it may be later than the last known one, and the history of the store
// may not go back to that one.
func (c *leaseCache) mayPrecede(l listing) bool {
	if c.marked != 0 {
		return len(c.entries) == 0 || slices.ContainsFunc(l.entries, func(e *entry) bool {
			known := c.entries[e.key]
			return known != nil && known.createRevision == e.createRevision
		})
	}
	return !slices.ContainsFunc(l.entries, func(e *entry) bool {
		known := c.entries[e.key]
		return e.modRevision <= c.store.Revision && (known == nil || !known.is(e.modRevision, e.leaseID))
	})
}

// update returns the update to publish. Its mark is the number of leases. changed has the keys of the leases that have
// changed; nil means that any lease may have. The update contains no leases of own.
func (c *leaseCache) update(own *self, changed []string) subnet.Update {
	c.store.Mark = strconv.FormatInt(c.count(), 10)
	u := subnet.Update{Store: c.store, Grace: c.grace, Snapshot: func() subnet.Snapshot { return c.snapshot(own) }}
	if changed == nil {
		return u
	}

	u.Changed = map[string]*subnet.Lease{}
	slices.Sort(changed)
	for _, key := range slices.Compact(changed) {
		switch e := c.entries[key]; {
		case e == nil || own.has(e): // the receiver may still have the key as the lease of another node
			u.Changed[key] = nil
		case e.err != nil:
			u.Undecodable = append(u.Undecodable, key)
		default:
			u.Changed[key] = &e.lease
		}
	}
	return u
}

func (c *leaseCache) snapshot(own *self) subnet.Snapshot {
	s := subnet.Snapshot{
		Leases: make([]*subnet.Lease, 0, len(c.entries)),
		Store:  c.store, Another: c.another, Grace: c.grace,
	}
	for key, e := range c.entries {
		switch {
		case own.has(e):
		case e.err != nil:
			s.Undecodable = append(s.Undecodable, key)
		default:
			s.Leases = append(s.Leases, &e.lease)
		}
	}
	return s
}
