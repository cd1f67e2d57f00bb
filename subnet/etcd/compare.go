// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"maps"

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
	found, present, is, err := m.compareAt(ctx, k.store.Revision, k.count, k.entries, k.own)
	switch {
	case is != same:
		return nil, 0, is, err
	case present.ID != k.store.ID:
		return nil, 0, another, nil
	}

	cache = &leaseCache{entries: maps.Clone(k.entries), store: k.store}
	maps.Copy(cache.entries, found)
	if cache.count() != k.count { // leases that could not be read are missing in the state
		return nil, 0, unknown, nil
	}
	return cache, present.Revision, same, nil
}

// compareAt compares the store as it was at a revision with the number of leases and the newest one of known.
// Another history of the store is unlikely to have that one, because ids of etcd leases are random. found has
// the entries at that revision with the key of the newest one and with own, unless that is empty. present is the
// store as it is now. The result is unknown if the revision was compacted, and another if the store was
// different, or has not come to that revision.
func (m *Manager) compareAt(
	ctx context.Context, revision, count int64, known map[string]*entry, own string,
) (found map[string]*entry, present subnet.StoreID, is comparison, err error) {
	at := clientv3.WithRev(revision)
	ops := []clientv3.Op{clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithCountOnly(), at)}
	// The requests read the values too, because etcd 3.7 omits the etcd lease if only the key is read.
	last := newest(known)
	if last != nil {
		ops = append(ops, clientv3.OpGet(m.dir+last.key, at))
	}
	if own != "" {
		ops = append(ops, clientv3.OpGet(m.dir+own, at))
	}

	resp, err := m.txn(ctx, nil, ops...)
	switch {
	case errors.Is(err, rpctypes.ErrCompacted): // a watch could not start at that revision either
		return nil, subnet.StoreID{}, unknown, nil
	case errors.Is(err, rpctypes.ErrFutureRev): // so it is another store
		return nil, subnet.StoreID{}, another, nil
	case err != nil:
		return nil, subnet.StoreID{}, another, err
	}

	found = map[string]*entry{}
	for _, r := range resp.Responses[1:] {
		for _, kv := range r.GetResponseRange().Kvs {
			e := m.entry(kv)
			found[e.key] = &e
		}
	}

	is = another
	has := last == nil || found[last.key] != nil && found[last.key].is(last.modRevision, last.leaseID)
	if has && resp.Responses[0].GetResponseRange().Count == count {
		is = same
	}
	return found, storeID(resp.Header), is, nil
}
