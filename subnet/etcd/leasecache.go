// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/flanneld/flanneld/subnet"
)

// leaseCache is the copy of the store's leases that Watch keeps.
type leaseCache struct {
	entries        map[string]*entry // by key, without their values
	store          subnet.StoreID    // the cache has the leases of exactly this revision; 0: there was no list yet
	configRevision int64             // revision up to which the configuration is known
	stale          bool              // the leases must be listed before the next watch
	another        bool              // the store is another one than that of the former cache, even if both have the same id
	// byAge has all entries, sorted by the revision of their last write, and some entries that the
	// cache does not have any more. It is nil if newestEntry has to sort them again.
	byAge []*entry
	// auditAt is when to audit a cache that was restored from the last known state. It is zero if all entries were
	// read in this run, or an audit has compared them.
	auditAt time.Time
	gracePeriod
}

func (c *leaseCache) count() int64 { return int64(len(c.entries)) }

// spareAges limits byAge: it may have at most this many entries more than twice the number of
// leases.
const spareAges = 100

// written adds an entry that was just written, and so is the newest one.
func (c *leaseCache) written(e *entry) {
	c.entries[e.key] = e
	if c.byAge != nil {
		c.byAge = append(c.byAge, e)
	}
}

// newestEntry returns the entry that was written last, or nil if there is none. After a lease is gone, it does not look at all entries: with 10,000 leases that would take as
// long as all else that a change takes.
func (c *leaseCache) newestEntry() *entry {
	if c.byAge == nil || len(c.byAge) > 2*len(c.entries)+spareAges {
		c.byAge = slices.SortedFunc(maps.Values(c.entries), func(x, y *entry) int { return cmp.Compare(x.modRevision, y.modRevision) })
	}

	for i, e := range slices.Backward(c.byAge) {
		if c.entries[e.key] == e {
			return e
		}
		c.byAge = c.byAge[:i]
	}
	return nil
}

// mayPrecede reports whether the cache may be an earlier state of the store that has the leases l.
// This requires that the cache has all entries of l that were written up to its revision.
func (c *leaseCache) mayPrecede(l listing) bool {
	return !slices.ContainsFunc(l.entries, func(e entry) bool {
		known := c.entries[e.key]
		return e.modRevision <= c.store.Revision && (known == nil || !known.is(e.modRevision, e.leaseID))
	})
}

// follows reports whether the cache is of the same store as old, at the same revision or a later one.
func (c *leaseCache) follows(old leaseCache) bool {
	return !c.another && c.store.ID == old.store.ID && c.store.Revision >= old.store.Revision
}

func (c *leaseCache) unreadable(key string) bool {
	e := c.entries[key]
	return e != nil && e.err != nil
}

// update returns the update to publish, and computes its mark. changed has the leases that have
// changed, nil for one that is gone; a nil map means that any lease may have changed. The update
// contains no leases of own.
func (c *leaseCache) update(own *self, changed map[string]*subnet.Lease) subnet.Update {
	for key, l := range changed {
		if l != nil && own.has(c.entries[key]) {
			// The receiver may still have the key as the lease of another node.
			changed[key] = nil
		}
	}
	c.store.Mark = ""
	if w := c.mark(); !c.unreadable(w.key) { // the state file contains no unreadable lease, so with one the next start must list all anyway
		c.store.Mark = w.String()
	}
	return subnet.Update{Store: c.store, Changed: changed, Grace: c.grace, Snapshot: func() subnet.Snapshot { return c.snapshot(own) }}
}

func (c *leaseCache) snapshot(own *self) subnet.Snapshot {
	s := subnet.Snapshot{Leases: make([]*subnet.Lease, 0, len(c.entries)), Store: c.store, Another: c.another, Grace: c.grace}
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

// mark returns the mark of the store at the revision of the cache.
func (c *leaseCache) mark() mark {
	newest := c.newestEntry()
	if newest == nil {
		return mark{}
	}
	return mark{c.count(), newest.key, newest.modRevision, newest.leaseID}
}
