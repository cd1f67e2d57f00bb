// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
)

// Watch publishes the leases of other nodes. See subnet.Manager.
func (m *Manager) Watch(ctx context.Context, sink func(subnet.Update)) error {
	defer m.outage.Forget(sourceWatch)
	cache := m.cache.Swap(nil)
	kept := cache != nil // the cache comes from an earlier Watch, and sink has not got it yet
	if !kept {
		cache = &leaseCache{}
	}

	defer m.cache.Store(cache)
	b := m.backoff()
	for {
		err := m.resume(ctx, cache, kept, sink)
		kept = kept && err != nil
		if err == nil {
			m.audit(ctx, cache, sink)
			followed, end := cache.untilAudit(ctx)
			err = m.follow(followed, []string{m.dir, m.configKey()}, cache.store.Revision+1, watcher{
				on: func(resp *pb.WatchResponse, confirmed int64) error {
					m.applyConfigEvents(cache, resp)
					m.report(ctx, sourceWatch, nil)
					return m.advance(ctx, cache, resp, confirmed, sink)
				},
				waits:  func() bool { return !cache.grace.IsZero() },
				checks: !m.guest, // a watch of the manager that owns the connection checks it
			})

			end()
			if !errors.Is(err, errStalled) {
				cache.streamWasUp(time.Now(), m.timing.dead)
			}
			if errors.Is(context.Cause(followed), errDue) && ctx.Err() == nil {
				continue
			}
		}

		cache.stale = cache.stale || errors.Is(err, errRelist)
		if err := m.again(ctx, sourceWatch, err, b); err != nil {
			return err
		}
	}
}

// resume brings the cache to a revision from which a watch can start. If the store is still the
// same, the cache stays as it is, and resume publishes it only if kept is true, which means that
// the cache comes from an earlier Watch. If the store may be another one, resume lists all leases
// and publishes them. If there was no list yet, it publishes the listing of listOr. It reports the
// configuration in all cases.
func (m *Manager) resume(ctx context.Context, cache *leaseCache, kept bool, sink func(subnet.Update)) error {
	is, err := m.compare(ctx, cache)
	if err != nil {
		return err
	}
	if is == same {
		cache.contact(time.Now(), m.cfg.margin(m.cfg.TTL), m.timing.gracePeriod)
		if kept {
			m.forWatch.Store(nil) // the cache is sufficient
			sink(cache.update(m.self.Load(), nil))
		}
		return nil
	}

	list := m.list
	if cache.store.Revision == 0 { // Acquire may just have left a listing
		list = func(ctx context.Context) (listing, error) { return m.listOr(ctx, &m.forWatch) }
	} else if err := m.client.turn(ctx); err != nil { // usually other hosts have to list as well
		return err
	}

	l, err := list(ctx)
	if err != nil {
		return err
	}
	m.known.Store(nil) // the cache replaces the last known state
	cache.contact(time.Now(), m.cfg.margin(m.cfg.TTL), m.timing.gracePeriod)
	old := *cache
	*cache = leaseCache{
		entries: make(map[string]*entry, len(l.entries)), store: l.store,
		another:     m.replaced.Load() || is == another || l.store.ID == old.store.ID && l.store.Revision < old.store.Revision || !old.mayPrecede(l),
		gracePeriod: old.gracePeriod,
	}
	if l.restored {
		cache.auditAt = m.firstAudit()
	}
	if old.store.ID != "" && (cache.another || cache.store.ID != old.store.ID) {
		was := subnet.StoreID{ID: old.store.ID, Revision: old.store.Revision}
		klog.FromContext(ctx).Error(nil, "etcd is not the store it was", "was", was, "is", cache.store)
	}

	for i := range l.entries {
		l.entries[i].value = nil
		e := &l.entries[i]
		cache.entries[e.key] = e
		m.logUndecodable(ctx, old.entries[e.key], e)
	}

	m.client.hosts.Store(int64(len(cache.entries)))
	sink(cache.update(m.self.Load(), nil))
	m.replaced.Store(false) // later updates come from the same store
	cache.another = false
	_, err = m.reportConfig(ctx, cache) // after the list: the watch brings later changes
	return err
}

// compare compares the cache with the store as it was at the revision of the cache: the number of keys, and the
// key that was written last. A store that was emptied, or restored from a backup, and used since may have the
// same id and the same revision with other leases. compare also reports the configuration, which it reads to
// know the store's revision. It returns unknown if there was no list yet, if the leases have to be listed
// anyway, if the store has another id or an earlier revision than the cache, or if the revision was compacted.
func (m *Manager) compare(ctx context.Context, cache *leaseCache) (comparison, error) {
	if cache.store.Revision == 0 || cache.stale {
		return unknown, nil
	}
	head, err := m.reportConfig(ctx, cache)
	if err != nil || head.ID != cache.store.ID || head.Revision < cache.store.Revision {
		return unknown, err
	}

	_, _, is, err := m.compareAt(ctx, cache.store.Revision, cache.count(), cache.entries, "")
	return is, err
}
