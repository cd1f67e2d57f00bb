// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"
)

// listOr returns the first of these that is available: the listing in s if it is not too old, the
// last known state brought up to date, or a new list. s is empty afterwards. A new list makes the
// last known state superfluous, so listOr removes it. If the store is another one, or the new list has
// none of the last known leases, listOr sets m.replaced, for Watch.
func (m *Manager) listOr(ctx context.Context, s *atomic.Pointer[listing]) (listing, error) {
	if l := s.Swap(nil); l != nil && time.Since(l.read) < stashTime {
		return *l, nil
	}

	k := m.known.Load()
	is := unknown
	if k != nil {
		var l listing
		var err error
		// The last known state stays until Watch has a cache: if the start takes long, it is brought up
		// to date again.
		if l, is, err = m.restore(ctx, k); err != nil || is == same {
			return l, err
		}
		klog.FromContext(ctx).V(1).Info("the last known leases are not those of the store, reading all", "revision", k.store.Revision)
	}

	l, err := m.list(ctx)
	if err == nil && k != nil {
		m.known.Store(nil)
		m.replaced.Store(is == another || !k.survivesIn(l))
	}
	return l, err
}

// restore returns the last known state, with the changes since then. So the store sends only the changes,
// and not all leases. If the store is not the same, or that is not known, because the revision of the state
// was compacted, all leases have to be listed.
func (m *Manager) restore(ctx context.Context, k *lastKnown) (l listing, is comparison, err error) {
	cache, now, is, err := m.recognizeStore(ctx, k)
	if err == nil && is == same && now > cache.store.Revision {
		err = m.catchUp(ctx, cache)
	}
	if err != nil || is != same {
		return listing{}, is, err
	}

	l = listing{store: cache.store, read: time.Now(), restored: true}
	for _, key := range slices.Sorted(maps.Keys(cache.entries)) {
		l.entries = append(l.entries, *cache.entries[key])
	}
	return l, same, nil
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
		cache.entries[e.key] = &e
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
