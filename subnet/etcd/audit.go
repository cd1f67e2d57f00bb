// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// errDue ends a watch because it is time to list the leases.
var errDue = errors.New("a list is due")

// untilDue returns a context for a watch. If the cache comes from the last known state, the context
// ends with errDue as its cause at the time of the audit, and before that if the cache stays partial.
// It stays partial if no lease changes, because before 3.4.25 and 3.5.8 etcd does not say when it has
// sent all events, and its grpc-proxy never does. The random time keeps the hosts that start together
// from listing at the same moment. The caller must call complete when the cache is not partial any
// more, and end when the watch has ended.
func (m *Manager) untilDue(ctx context.Context, cache *leaseCache) (watch context.Context, complete, end func()) {
	if cache.restored == 0 {
		return ctx, func() {}, func() {}
	}

	watch, cancel := context.WithCancelCause(ctx)
	due := func() { cancel(errDue) }
	audit := time.AfterFunc(time.Until(cache.auditAt), due)
	unconfirmed := time.AfterFunc(m.timing.unconfirmed+m.client.share(), due)
	complete = func() { unconfirmed.Stop() }
	if !cache.partial() {
		complete()
	}
	return watch, complete, func() {
		audit.Stop()
		complete()
		cancel(nil)
	}
}

// firstAudit returns when to audit a cache that was just restored. All hosts may have started at
// once. No audit begins in the first sixth of the time, which is ten minutes, so that the store has
// time for those starts.
func (m *Manager) firstAudit() time.Time {
	first := m.timing.audit / 6
	return time.Now().Add(first + rand.N(m.timing.audit-first))
}

// audit compares a cache that was restored from the last known state with a list, once, at the time
// in cache.auditAt, and while no watch changes the cache. It lists the leases at the revision of the
// cache. So a difference is an error of the last known state, and not a change whose event has not
// come yet. audit corrects the cache and publishes the corrections. If the list fails, the revision
// was compacted, or the store is another one, it sets another time. It leaves the leases that the
// cache only retains.
func (m *Manager) audit(ctx context.Context, cache *leaseCache, sink func(subnet.Update)) {
	if cache.restored == 0 || time.Now().Before(cache.auditAt) {
		return
	}

	l, err := m.listAt(ctx, cache.store.Revision)
	if err != nil || l.store.ID != cache.store.ID {
		cache.auditAt = time.Now().Add(wait.Vary(m.timing.audit/10, 0.5))
		return
	}

	gone := maps.Clone(cache.entries)
	maps.DeleteFunc(gone, func(key string, _ *entry) bool {
		_, expiring := cache.expiring[key]
		return expiring
	})

	changed := map[string]*subnet.Lease{}
	var unreadable []string
	for i := range l.entries {
		is := &l.entries[i]
		is.value = nil
		was := gone[is.key]
		delete(gone, is.key)
		cache.replace(is) // it has the revision of its last write, which an entry from the last known state does not have
		switch {
		case was != nil && alike(was, is):
		case is.err != nil:
			unreadable = append(unreadable, is.key)
		default:
			changed[is.key] = &is.lease
		}
	}

	cache.drop(changed, slices.Collect(maps.Keys(gone)))
	cache.restored = 0

	keys := slices.Sorted(maps.Keys(changed))
	keys = append(keys, unreadable...)
	if len(keys) == 0 {
		return
	}

	klog.FromContext(ctx).Error(nil, "leases of the last known state differed from those of etcd and were corrected", "leases", len(keys), "first", subnet.Shorten(keys[0]))
	if m.cfg.OnRepaired != nil {
		m.cfg.OnRepaired(len(keys))
	}

	u := cache.update(m.self.Load(), changed)
	u.Undecodable = unreadable
	sink(u)
}

// alike reports whether two entries of one key have the same content. was may come from the state
// file, which has no revision of the last write, and has JSON in another form.
func alike(was, is *entry) bool {
	if was.modRevision != 0 {
		return was.is(is.modRevision, is.leaseID)
	}
	x, errX := codec.Encode(was.lease.Claim())
	y, errY := codec.Encode(is.lease.Claim())
	return is.err == nil && errX == nil && errY == nil && bytes.Equal(x, y) &&
		was.createRevision == is.createRevision && was.lease.Permanent == is.lease.Permanent
}
