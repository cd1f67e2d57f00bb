// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"maps"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
)

// Watch publishes the leases of other nodes. See subnet.Manager.
func (m *Manager) Watch(ctx context.Context, sink func(subnet.Update)) error {
	cache := new(*m.cache.Swap(&leaseCache{})) // Recall or Acquire may still read the former one
	cache.entries = maps.Clone(cache.entries)
	cache.problems = maps.Collect(maps.All(cache.problems)) // never nil
	published := false                                      // sink has got the leases of the cache
	defer func() { m.cache.Store(cache) }()

	return m.retry(ctx, sourceWatch, func() error {
		next, err := m.resume(ctx, cache, published, sink)
		if next != nil {
			cache = next
			published = true
		}
		for err == nil {
			if err = m.followUntilAudit(ctx, cache, sink); err == nil {
				m.audit(ctx, cache, sink)
				err = m.reportConfig(ctx, cache) // its watch may not have come as far as that of the leases
			}
		}
		cache.stale = cache.stale || errors.Is(err, errRelist)
		return err
	})
}

// followUntilAudit watches from the revision of the cache. It returns nil when the audit is due, and otherwise why the
// watch has ended.
func (m *Manager) followUntilAudit(ctx context.Context, cache *leaseCache, sink func(subnet.Update)) error {
	followed := ctx
	if !cache.auditAt.IsZero() {
		var end context.CancelFunc
		followed, end = context.WithDeadlineCause(ctx, cache.auditAt, errDue)
		defer end()
	}

	err := m.follow(followed, []string{m.dir, m.configKey()}, cache.store.Revision+1, watcher{
		on: func(resp *pb.WatchResponse, confirmed int64) error {
			m.applyConfigEvents(cache, resp)
			m.outage.Report(ctx, sourceWatch, nil)
			return m.advance(ctx, cache, resp, confirmed, sink)
		},
		waits:  func() bool { return !cache.grace.IsZero() },
		checks: !m.guest, // a watch of the manager that owns the connection checks it
	})

	if !errors.Is(err, errStalled) {
		cache.streamWasUp(time.Now(), m.timing.dead)
	}
	if errors.Is(context.Cause(followed), errDue) && ctx.Err() == nil {
		return nil
	}
	return err
}

// resume returns a cache of a revision from which a watch can start, and reports the configuration. If sink has got the
// leases of the cache, and the store is still the same, that is the cache as it is, because the watch brings the
// changes. Otherwise it has leases that were brought up to date or listed, and resume publishes them.
func (m *Manager) resume(
	ctx context.Context, cache *leaseCache, published bool, sink func(subnet.Update),
) (*leaseCache, error) {
	next := cache
	is := same
	var err error
	switch {
	case published:
		_, _, is, err = m.compare(ctx, cache)
	case !cache.isFresh():
		next, is, err = m.restore(ctx, cache)
	}
	if err == nil && is != same {
		next, err = m.replacement(ctx, cache, is)
	}
	if err != nil {
		return nil, err
	}

	next.contact(time.Now(), m.cfg.margin(m.cfg.TTL), m.timing.gracePeriod)
	if !published || next != cache {
		maps.DeleteFunc(next.problems, func(key, _ string) bool { return next.entries[key] == nil })
		for _, e := range next.entries {
			m.logUndecodable(ctx, next.problems, e)
		}

		m.client.hosts.Store(next.count())
		sink(next.update(m.self.Load(), nil))
		next.read = time.Time{}
		next.another = false // later updates come from the same store
	}
	return next, m.reportConfig(ctx, next) // after the leases were read: the watch brings later changes
}

// replacement lists all leases, and returns the cache that replaces the one of Watch. is is the result of the comparison
// of that one with the store.
func (m *Manager) replacement(ctx context.Context, cache *leaseCache, is comparison) (*leaseCache, error) {
	if err := m.client.turn(ctx); err != nil { // usually other hosts have to list as well
		return nil, err
	}

	next, err := m.relist(ctx, cache, is)
	known := cache.store.Revision != 0 && cache.marked == 0
	if err == nil && known && (next.another || next.store.ID != cache.store.ID) {
		was := subnet.StoreID{ID: cache.store.ID, Revision: cache.store.Revision}
		klog.FromContext(ctx).Error(nil, "etcd is not the store it was", "was", was, "is", next.store)
	}
	return next, err
}
