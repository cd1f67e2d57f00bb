// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"slices"
	"strconv"
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
	// auditAt is when to audit a cache that was restored from the last known state. It is zero if all entries were
	// read in this run, or an audit has compared them.
	auditAt time.Time
	gracePeriod
}

func (c *leaseCache) count() int64 { return int64(len(c.entries)) }

// newest returns the entry that was written last, or nil if there is none.
func newest(entries map[string]*entry) (last *entry) {
	for _, e := range entries {
		if last == nil || e.modRevision > last.modRevision {
			last = e
		}
	}
	return last
}

// mayPrecede reports whether the cache may be an earlier state of the store that has the leases l.
// This requires that the cache has all entries of l that were written up to its revision.
func (c *leaseCache) mayPrecede(l listing) bool {
	return !slices.ContainsFunc(l.entries, func(e entry) bool {
		known := c.entries[e.key]
		return e.modRevision <= c.store.Revision && (known == nil || !known.is(e.modRevision, e.leaseID))
	})
}

func (c *leaseCache) unreadable(key string) bool {
	e := c.entries[key]
	return e != nil && e.err != nil
}

// update returns the update to publish. Its mark is the number of leases. changed has the leases that have
// changed, nil for one that is gone; a nil map means that any lease may have changed. The update
// contains no leases of own.
func (c *leaseCache) update(own *self, changed map[string]*subnet.Lease) subnet.Update {
	for key, l := range changed {
		if l != nil && own.has(c.entries[key]) {
			// The receiver may still have the key as the lease of another node.
			changed[key] = nil
		}
	}
	c.store.Mark = strconv.FormatInt(c.count(), 10)
	return subnet.Update{
		Store: c.store, Changed: changed, Grace: c.grace,
		Snapshot: func() subnet.Snapshot { return c.snapshot(own) },
	}
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
