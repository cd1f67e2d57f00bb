// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
)

// stashTime is the maximum age of leases that are used again without a request. It is long because a start may be
// slow: the host is slow, or all hosts use the store at once. In the second case, another list would make the store
// even slower. If the leases have changed since, a compare-and-swap fails or the watch brings the change.
const stashTime = time.Minute

// isFresh reports whether the leases of the cache were read less than stashTime ago, and can be used.
func (c *leaseCache) isFresh() bool { return !c.stale && time.Since(c.read) < stashTime }

// leases returns all leases, for Recall and Acquire: those of the cache if they were read just now and this host has
// not written since, those of the cache brought up to date, or those of a new list. It leaves them in the cache,
// because a start needs all leases three times, and thousands of leases take time. The caller holds the lock.
func (m *Manager) leases(ctx context.Context) (listing, error) {
	cache := m.cache.Load()
	if !cache.isFresh() || m.own.revision > cache.store.Revision {
		now, is, err := m.restore(ctx, cache)
		if err == nil && is != same {
			now, err = m.relist(ctx, cache, is)
		}
		if err != nil {
			return listing{}, err
		}
		cache = now
		m.cache.Store(cache)
	}
	return cache.listing(), nil
}

// relist lists all leases, and returns the cache that replaces the present one. is is the result of the comparison of
// the present one with the store.
func (m *Manager) relist(ctx context.Context, cache *leaseCache, is comparison) (*leaseCache, error) {
	l, err := m.list(ctx)
	if err != nil {
		return nil, err
	}
	return cache.successor(l, is), nil
}

// distrust makes the next call of leases list all leases.
func (m *Manager) distrust() {
	cache := new(*m.cache.Load())
	cache.stale = true
	m.cache.Store(cache)
}

// restore returns the cache with the changes since its revision. So the store sends only the changes, and not all
// leases. If the store is not the same, or that is not known, restore returns no cache.
func (m *Manager) restore(ctx context.Context, cache *leaseCache) (now *leaseCache, is comparison, err error) {
	entries, present, is, err := m.compare(ctx, cache)
	if err != nil || is != same {
		return nil, is, err
	}

	now = new(*cache)
	now.entries = entries
	now.read = time.Now()
	if cache.marked != 0 {
		now.marked = 0
		now.auditAt = m.firstAudit()
	}
	if present.Revision > cache.store.Revision {
		err = m.catchUp(ctx, now)
	}
	return now, same, err
}

// comparison is the result of comparing the store with the cache.
type comparison int

const (
	unknown comparison = iota // a list is necessary
	same
	another // the store is another one, even if the id and the revision are the same
)

// compare compares the cache with the store as it was at the revision of the cache: the number of leases, and the one
// that was written last. A store that was emptied, or restored from a backup, and used since may have the same id and
// the same revision with other leases, but it is unlikely to have that one, because ids of etcd leases are random.
//
// The result is unknown if nothing is known or the leases have to be listed anyway, if the revision was compacted, or
// if leases are missing in the cache. It is another if the store was different, or has not come to that revision.
// entries are those of the store at that revision. present is the store as it is now.
func (m *Manager) compare(ctx context.Context, cache *leaseCache) (
	entries map[string]*entry, present subnet.StoreID, is comparison, err error,
) {
	if cache.store.Revision == 0 || cache.stale {
		return nil, subnet.StoreID{}, unknown, nil
	}

	at := clientv3.WithRev(cache.store.Revision)
	ops := []clientv3.Op{clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithCountOnly(), at)}
	last := cache.newest()
	for key, e := range cache.entries {
		if e == last || e.modRevision == 0 {
			// The requests read the values too, because etcd 3.7 omits the etcd lease if only the key is read.
			ops = append(ops, clientv3.OpGet(m.dir+key, at))
		}
	}

	resp, err := m.txn(ctx, nil, ops...)
	switch {
	case errors.Is(err, rpctypes.ErrCompacted): // a watch could not start at that revision either
		return nil, subnet.StoreID{}, unknown, nil
	case errors.Is(err, rpctypes.ErrFutureRev): // so it is another store
		return nil, subnet.StoreID{}, another, nil
	case err != nil:
		return nil, subnet.StoreID{}, unknown, err
	}

	// This host's lease may have been written after the last known state.
	entries = maps.Clone(cache.entries)
	maps.DeleteFunc(entries, func(_ string, e *entry) bool { return e.modRevision == 0 })
	has := last == nil
	for _, r := range resp.Responses[1:] {
		for _, kv := range r.GetResponseRange().Kvs {
			e := m.entry(kv)
			entries[e.key] = e
			has = has || e.key == last.key && e.is(last.modRevision, last.leaseID)
		}
	}

	present = storeID(resp.Header)
	known := int64(len(entries))
	count := resp.Responses[0].GetResponseRange().Count
	switch {
	case !has, count != cmp.Or(cache.marked, known), present.ID != cache.store.ID:
		return nil, present, another, nil
	case count != known: // leases that could not be read are missing in the last known state
		return nil, present, unknown, nil
	}
	return entries, present, same, nil
}

// catchUp brings a cache to the present revision of its store. It reads the leases that were written since
// the revision of the cache, and counts all leases. If there are fewer than in the cache, some are gone.
func (m *Manager) catchUp(ctx context.Context, cache *leaseCache) error {
	resp, err := m.txn(ctx, nil,
		clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithMinModRev(cache.store.Revision+1)),
		clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithCountOnly()))
	if err != nil {
		return fmt.Errorf("read the changes since the last known state: %w", err)
	}

	cache.store = storeID(resp.Header)
	for _, kv := range resp.Responses[0].GetResponseRange().Kvs {
		e := m.entry(kv)
		cache.entries[e.key] = e
	}
	if cache.count() == resp.Responses[1].GetResponseRange().Count {
		return nil
	}
	return m.removeGone(ctx, cache)
}

// parts is into how many parts removeGone divides a cache, at most. etcd allows 128 operations in a transaction.
const parts = 64

// removeGone removes the leases that the store does not have any more at the revision of the cache. It counts
// the keys of each part of the cache, and then lists only the parts that have lost some.
func (m *Manager) removeGone(ctx context.Context, cache *leaseCache) error {
	at := clientv3.WithRev(cache.store.Revision)
	all := slices.Collect(slices.Chunk(slices.Sorted(maps.Keys(cache.entries)), len(cache.entries)/parts+1))
	get := func(part []string, option clientv3.OpOption) clientv3.Op {
		return clientv3.OpGet(m.dir+part[0], clientv3.WithRange(m.dir+part[len(part)-1]+"\x00"), at, option)
	}

	var ops []clientv3.Op
	for _, part := range all {
		ops = append(ops, get(part, clientv3.WithCountOnly()))
	}
	counts, err := m.txn(ctx, nil, ops...)
	if err != nil {
		return fmt.Errorf("count leases: %w", err)
	}

	gone := map[string]bool{}
	ops = nil
	for i, part := range all {
		if counts.Responses[i].GetResponseRange().Count == int64(len(part)) {
			continue
		}
		ops = append(ops, get(part, clientv3.WithKeysOnly()))
		for _, key := range part {
			gone[key] = true
		}
	}
	lists, err := m.txn(ctx, nil, ops...)
	if err != nil {
		return fmt.Errorf("look for leases that are gone: %w", err)
	}

	for _, r := range lists.Responses {
		for _, kv := range r.GetResponseRange().Kvs {
			delete(gone, m.keyOf(kv))
		}
	}
	maps.DeleteFunc(cache.entries, func(key string, _ *entry) bool { return gone[key] })
	return nil
}
