// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"maps"
	"slices"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/subnet"
)

// comparison is the result of comparing the store with the cache.
type comparison int

const (
	unknown comparison = iota // a list is necessary
	same
	another // the store is another one, even if the id and the revision are the same
)

// recognizeStore compares the last known state with the store as it was at the revision of that
// state. If they are the same, it returns a cache of the leases at that revision, and the present revision of the
// store. It returns unknown if they cannot be compared, because the revision was compacted or leases are missing in
// the state. In all other cases it returns another.
func (m *Manager) recognizeStore(ctx context.Context, k *lastKnown) (cache *leaseCache, now int64, is comparison, err error) {
	was, is, err := m.readPast(ctx, k.store.Revision, k.newest.key, k.own)
	if was == nil || was.store.ID != k.store.ID || !was.matches(k.mark) {
		return nil, 0, is, err
	}

	cache = &leaseCache{entries: maps.Clone(k.entries), store: k.store}
	maps.Copy(cache.entries, was.entries)
	if cache.count() != k.count { // leases that could not be read are missing in the state
		return nil, 0, unknown, nil
	}
	return cache, was.store.Revision, same, nil
}

// past is what the store had at an earlier revision.
type past struct {
	count   int64             // number of all keys of leases
	entries map[string]*entry // by key: those that were asked for
	store   subnet.StoreID    // at present
}

// matches reports whether w may be the mark of the store at the revision of p.
func (p *past) matches(w mark) bool {
	newest := p.entries[w.newest.key]
	return p.count == w.count && (w.newest.key == "" || newest != nil && newest.is(w.newest.revision, w.newest.lease))
}

// readPast reads the number of leases in the store at a revision, and the entries with some keys. It
// ignores empty keys. If the revision was compacted, was is nil and the result is unknown. Otherwise the
// result is another, and was is nil if the store has not come to that revision.
func (m *Manager) readPast(ctx context.Context, revision int64, keys ...string) (was *past, is comparison, err error) {
	at := clientv3.WithRev(revision)
	ops := []clientv3.Op{clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithCountOnly(), at)}
	slices.Sort(keys)
	for _, key := range slices.Compact(keys) {
		if key != "" {
			// The request reads the value too, because etcd 3.7 omits the etcd lease if only the key is
			// read.
			ops = append(ops, clientv3.OpGet(m.dir+key, at))
		}
	}

	resp, err := m.txn(ctx, nil, ops...)
	switch {
	case errors.Is(err, rpctypes.ErrCompacted): // a watch could not start at that revision either
		return nil, unknown, nil
	case errors.Is(err, rpctypes.ErrFutureRev): // so it is another store
		return nil, another, nil
	case err != nil:
		return nil, another, err
	}

	was = &past{count: resp.Responses[0].GetResponseRange().Count, entries: map[string]*entry{}, store: storeID(resp.Header)}
	for _, r := range resp.Responses[1:] {
		for _, kv := range r.GetResponseRange().Kvs {
			e := m.entry(kv)
			was.entries[e.key] = &e
		}
	}
	return was, another, nil
}
