// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
)

// errDue ends a watch because it is time for the audit.
var errDue = errors.New("the audit is due")

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
// come yet. audit corrects and publishes the cache. If the list fails, the revision was compacted, or the
// store is another one, it sets another time.
func (m *Manager) audit(ctx context.Context, cache *leaseCache, sink func(subnet.Update)) {
	if cache.auditAt.IsZero() || time.Now().Before(cache.auditAt) {
		return
	}

	l, err := m.listAt(ctx, cache.store.Revision)
	if err != nil || l.store.ID != cache.store.ID {
		cache.auditAt = time.Now().Add(wait.Vary(m.timing.audit/10, 0.5))
		return
	}
	cache.auditAt = time.Time{}

	right := byKey(l.entries)
	both := maps.Clone(cache.entries)
	maps.Copy(both, right)
	maps.DeleteFunc(both, func(key string, _ *entry) bool { return alike(cache.entries[key], right[key]) })
	wrong := slices.Sorted(maps.Keys(both))
	if len(wrong) == 0 {
		return
	}

	klog.FromContext(ctx).Error(nil, "leases of the last known state differed from those of etcd and were corrected", "leases", len(wrong), "first", subnet.Shorten(wrong[0]))
	if m.cfg.OnRepaired != nil {
		m.cfg.OnRepaired(len(wrong))
	}
	cache.entries = right
	sink(cache.update(m.self.Load(), nil))
}

// alike reports whether two entries of one key are the same. An entry is nil if there is none.
func alike(was, is *entry) bool {
	return was != nil && is != nil && was.is(is.modRevision, is.leaseID) && (was.err == nil) == (is.err == nil) && was.lease.Same(&is.lease)
}
