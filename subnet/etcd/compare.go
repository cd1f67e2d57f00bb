// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"maps"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// comparison is the result of comparing the store with the cache.
type comparison int

const (
	unknown comparison = iota // a list is necessary
	same
	another // the store is another one, even if the id and the revision are the same
)

// compareAt compares the cache with the store as it was at the revision of the cache: the number of
// keys, and the key that was written last. A store that was emptied, or restored from a backup, and
// used since may have the same id and the same revision with other leases. compareAt returns
// unknown if the revision was compacted, or if the cache does not know the key that was written
// last.
func (m *Manager) compareAt(ctx context.Context, cache *leaseCache) (comparison, error) {
	leases := cache.count()
	newest, known := cache.newestEntry()
	if !known {
		return unknown, nil
	}

	at := clientv3.WithRev(cache.store.Revision)
	ops := []clientv3.Op{clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithCountOnly(), at)}
	if newest != nil {
		// The request reads the value too, because etcd 3.7 omits the etcd lease if only the key is
		// read.
		ops = append(ops, clientv3.OpGet(m.dir+newest.key, at))
	}

	is := another
	err := m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.Txn(ctx).Then(ops...).Commit()
		if errors.Is(err, rpctypes.ErrCompacted) { // a watch could not start at that revision either
			is = unknown
			return nil
		}
		if err != nil {
			return err
		}
		if resp.Responses[0].GetResponseRange().Count != leases {
			return nil
		}

		for _, r := range resp.Responses[1:] {
			if kvs := r.GetResponseRange().Kvs; len(kvs) != 1 || !newest.is(kvs[0].ModRevision, clientv3.LeaseID(kvs[0].Lease)) {
				return nil
			}
		}
		is = same
		return nil
	})
	return is, err
}

// recognizeStore compares the last known state with the store as it was at the revision of that
// state. If they are the same, it returns a cache of the leases at that revision. It returns unknown if they cannot be
// compared, because the revision was compacted or leases are missing in the state. In all other
// cases it returns another.
func (m *Manager) recognizeStore(ctx context.Context, k *lastKnown) (cache *leaseCache, is comparison, err error) {
	at := clientv3.WithRev(k.store.Revision)
	ops := []clientv3.Op{clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithCountOnly(), at)}
	if k.newest.key != "" {
		ops = append(ops, clientv3.OpGet(m.dir+k.newest.key, at))
	}
	if k.own != "" && k.own != k.newest.key {
		ops = append(ops, clientv3.OpGet(m.dir+k.own, at))
	}

	is = another
	err = m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.Txn(ctx).Then(ops...).Commit()
		switch {
		case errors.Is(err, rpctypes.ErrCompacted):
			is = unknown
			return nil
		case errors.Is(err, rpctypes.ErrFutureRev): // the store has not come to that revision, so it is another one
			return nil
		case err != nil:
			return err
		}
		if now := storeID(resp.Header); now.ID != k.store.ID {
			return nil
		}

		cache = &leaseCache{entries: maps.Clone(k.entries), store: k.store, head: resp.Header.Revision, restored: k.newest.revision}
		for _, r := range resp.Responses[1:] {
			for _, kv := range r.GetResponseRange().Kvs {
				e := m.entry(kv)
				cache.entries[e.key] = &e
			}
		}
		if k.newest.key != "" {
			w := cache.entries[k.newest.key]
			if w == nil || !w.is(k.newest.revision, k.newest.lease) {
				return nil
			}
		}
		if resp.Responses[0].GetResponseRange().Count != k.count {
			return nil
		}

		is = same
		if cache.count() != k.count { // leases that could not be read are missing in the state
			is = unknown
		}
		return nil
	})
	return cache, is, err
}
