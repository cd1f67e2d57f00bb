// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
)

// errRelist means that a watch cannot continue from its revision, because the revision was
// compacted, or the store is not the one that was listed.
var errRelist = errors.New("watch cannot be resumed")

// Watch publishes the leases of other nodes. See subnet.Manager.
func (m *Manager) Watch(ctx context.Context, sink func(subnet.Update)) error {
	defer m.outage.Forget(sourceWatch)
	cache := m.cache.Swap(nil)
	kept := cache != nil // the cache comes from an earlier Watch, and sink has not got it yet
	if !kept {
		cache = &leaseCache{}
	}
	check := m.newAudit(cache)
	defer m.cache.Store(cache)
	defer check.stop()
	b := m.backoff()
	for {
		err := m.resume(ctx, cache, kept, sink)
		kept = kept && err != nil
		if err == nil {
			followed, end := check.begin(ctx)
			err = m.follow(followed, []string{m.dir, m.configKey()}, cache.next, watcher{
				on: func(resp *pb.WatchResponse, confirmed int64) error {
					b.Reset()
					check.mu.Lock()
					defer check.mu.Unlock()
					m.applyConfigEvents(cache, resp)
					m.report(ctx, sourceWatch, nil)
					return m.advance(ctx, cache, resp, confirmed, sink)
				},
				waits:  func() bool { return len(cache.expiring) > 0 },
				checks: !m.guest, // a watch of the manager that owns the connection checks it
			})
			end()
			if check.repair(ctx, sink) && ctx.Err() == nil {
				continue
			}
			if !errors.Is(err, errStalled) {
				cache.streamWasUp(time.Now(), m.timing.dead)
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, errClosed) {
			return err
		}
		if errors.Is(err, errRelist) {
			cache.stale = true
		}
		if !errors.Is(err, errStalled) {
			m.report(ctx, sourceWatch, err)
		}
		if err := b.Wait(ctx, 0); err != nil {
			return err
		}
	}
}

// resume brings the cache to a revision from which a watch can start. If the store is still the
// same, the cache stays as it is, and is published if kept is true, which means that it comes from
// an earlier Watch. Otherwise resume lists all leases and publishes them. It also reports the
// configuration.
func (m *Manager) resume(ctx context.Context, cache *leaseCache, kept bool, sink func(subnet.Update)) error {
	is, err := m.compare(ctx, cache)
	if err != nil {
		return err
	}
	if is == same {
		cache.contact(time.Now(), m.margin(m.cfg.TTL), m.timing.gracePeriod)
		if kept {
			m.forWatch.Store(nil) // the cache is sufficient
			sink(cache.update(m.ownKey.Load(), nil))
		}
		return nil
	}
	list := m.list
	if cache.next == 0 { // Acquire may just have left a listing
		list = func(ctx context.Context) (listing, error) { return m.listOr(ctx, &m.forWatch) }
	} else if err := m.client.turn(ctx); err != nil { // usually other hosts have to list as well
		return err
	}
	l, err := list(ctx)
	if err != nil {
		return err
	}
	m.known.Store(nil) // the cache replaces it
	cache.contact(time.Now(), m.margin(m.cfg.TTL), m.timing.gracePeriod)
	old := *cache
	*cache = leaseCache{
		entries: make(map[string]*entry, len(l.entries)), store: l.store, next: l.store.Revision + 1,
		restored:    l.restored,
		another:     m.replaced.Load() || is == another || l.store.ID == old.store.ID && l.store.Revision < old.store.Revision || !old.mayPrecede(l),
		gracePeriod: old.gracePeriod,
	}
	if old.store.ID != "" && !cache.follows(old) {
		was := subnet.StoreID{ID: old.store.ID, Revision: old.store.Revision}
		klog.FromContext(ctx).Error(nil, "etcd is not the store it was", "was", was, "is", cache.store)
	}
	for i := range l.entries {
		l.entries[i].value = nil
		e := m.cfg.Interner.intern(&l.entries[i])
		cache.entries[e.key] = e
		if cache.newest == nil || e.modRevision > cache.newest.modRevision {
			cache.newest = e
		}
		logUndecodable(ctx, old.entries[e.key], e)
	}
	cache.retainFrom(old)
	m.client.hosts.Store(int64(len(cache.entries)))
	sink(cache.update(m.ownKey.Load(), nil))
	m.replaced.Store(false) // later updates come from the same store
	cache.another = false
	_, err = m.reportConfig(ctx, cache) // after the list: the watch brings later changes
	return err
}

// comparison is the result of comparing the store with the cache.
type comparison int

const (
	unknown comparison = iota // a list is necessary
	same
	another // the store is another one, even if the id and the revision are the same
)

// compare compares the store with the cache, and reports the configuration, which it reads to know
// the store's revision. If there was no list yet, or the leases have to be listed anyway, it only
// returns unknown.
func (m *Manager) compare(ctx context.Context, cache *leaseCache) (comparison, error) {
	if cache.next == 0 || cache.stale {
		return unknown, nil
	}
	head, err := m.reportConfig(ctx, cache)
	if err != nil || head.ID != cache.store.ID || head.Revision < cache.store.Revision {
		return unknown, err
	}
	return m.compareAt(ctx, cache)
}

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
	at := clientv3.WithRev(cache.next - 1)
	ops := []clientv3.Op{clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithCountOnly(), at)}
	if newest != nil {
		// This reads the value too, because etcd 3.7 omits the etcd lease if only the key is read.
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

// advance applies one response to the cache and publishes the result. The revision of the cache
// also advances without events, because an old revision is soon compacted. advance returns
// errRelist if the response comes from another store.
func (m *Manager) advance(ctx context.Context, cache *leaseCache, resp *pb.WatchResponse, confirmed int64, sink func(subnet.Update)) error {
	// A grpc-proxy that merges watches omits the cluster id when it confirms that a watch has begun.
	if resp.Header.ClusterId != 0 && storeID(resp.Header).ID != cache.store.ID {
		return errRelist
	}
	cache.streamWasUp(time.Now(), m.timing.dead)
	cache.contact(time.Now(), m.margin(m.cfg.TTL), m.timing.gracePeriod)
	before := cache.store.Revision
	cache.next, cache.store.Revision = max(cache.next, confirmed+1), max(cache.store.Revision, confirmed)
	changed := map[string]*subnet.Lease{}
	cache.drop(changed, cache.expired(ctx))
	if !hasEvents(resp, cache.next) && len(changed) == 0 && cache.store.Revision == before {
		return nil
	}
	known := cache.next // fixed before the loop: one transaction may change several keys at one revision
	for _, ev := range resp.Events {
		if ev.Kv.ModRevision < known {
			continue
		}
		read := m.entry(ev.Kv)
		read.value = nil
		e := &read
		switch ev.Type {
		case mvccpb.DELETE:
			if !cache.retain(e.key) {
				cache.drop(changed, []string{e.key})
			}
		default:
			e = m.cfg.Interner.intern(e)
			cache.drop(changed, cache.replaced(e, cache.entries))
			logUndecodable(ctx, cache.entries[e.key], e)
			cache.written(e)
			if e.err == nil {
				changed[e.key] = &e.lease
			}
		}
		cache.next = max(cache.next, ev.Kv.ModRevision+1)
	}
	cache.store.Revision = max(cache.store.Revision, resp.Header.Revision)
	m.client.hosts.Store(int64(len(cache.entries)))
	u := cache.update(m.ownKey.Load(), changed)
	for _, ev := range resp.Events {
		if key := m.keyOf(ev.Kv); cache.unreadable(key) {
			delete(changed, key)
			u.Undecodable = append(u.Undecodable, key)
		}
	}
	sink(u)
	return nil
}

// logUndecodable logs when a lease becomes unreadable, when the reason changes, and when the lease
// can be read again. before is the former entry, or nil if there was none.
func logUndecodable(ctx context.Context, before, now *entry) {
	was := ""
	if before != nil && before.err != nil {
		was = before.err.Error()
	}
	switch {
	case now.err == nil && was != "":
		klog.FromContext(ctx).Info("lease can be read again", "key", subnet.Shorten(now.key))
	case now.err != nil && now.err.Error() != was:
		klog.FromContext(ctx).Error(now.err, "lease cannot be read and keeps its last good state", "key", subnet.Shorten(now.key))
	}
}

// hasEvents reports whether resp has an event of revision next or later.
func hasEvents(resp *pb.WatchResponse, next int64) bool {
	return slices.ContainsFunc(resp.Events, func(ev *mvccpb.Event) bool { return ev.Kv.ModRevision >= next })
}
