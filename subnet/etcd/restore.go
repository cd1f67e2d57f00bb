// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
)

// listOr returns the first of these that is available: the listing in s if it is not too old, the
// last known state brought up to date, or a new list. s is empty afterwards. A new list makes the
// last known state superfluous, so listOr removes it. If the new list has none of the last known
// leases, listOr sets m.replaced.
func (m *Manager) listOr(ctx context.Context, s *stash) (listing, error) {
	if l := s.Swap(nil); l != nil && time.Since(l.read) < stashTime {
		return *l, nil
	}
	l, ok, err := m.restore(ctx)
	if ok || err != nil {
		return l, err
	}
	if l, err = m.list(ctx); err != nil {
		return l, err
	}
	if k := m.known.Swap(nil); k != nil && !k.survivesIn(l) {
		m.replaced.Store(true)
	}
	return l, nil
}

// restore returns the last known state, brought up to the present by the changes since then. So the
// store sends only the changes, and not all leases. ok is false if all leases have to be listed:
// there is no such state, its revision was compacted, the changes are too many or do not come in
// time, or the store is another one. If the store is another one, restore sets m.replaced, for
// Watch. After an error the caller tries again.
func (m *Manager) restore(ctx context.Context) (l listing, ok bool, err error) {
	k := m.known.Load()
	if k == nil || k.ended {
		return listing{}, false, nil
	}
	cache, is, err := m.recognizeStore(ctx, k)
	if err == nil && is == same {
		err = m.catchUp(ctx, cache)
	}
	switch {
	case errors.Is(err, errRelist), errors.Is(err, errAnswersEarly):
		is = unknown
	case err != nil:
		return listing{}, false, err // the last known state can still be used
	}
	if is != same {
		ended := *k
		ended.ended = true
		m.known.Store(&ended)
		klog.FromContext(ctx).V(1).Info("the last known leases are not those of the store, reading all", "revision", k.store.Revision)
		m.replaced.Store(is == another)
		return listing{}, false, nil
	}
	// The last known state stays until Watch has a cache: if the start takes long, it is brought up
	// to date again.
	for _, key := range slices.Sorted(maps.Keys(cache.entries)) {
		l.entries = append(l.entries, *cache.entries[key])
	}
	l.store, l.read, l.restored = cache.store, time.Now(), max(cache.restored, 1)
	return l, true, nil
}

// errCaughtUp ends the watch of replay when all events have come, and errNotCaughtUp ends one that
// takes too long.
var errCaughtUp, errNotCaughtUp = errors.New("all events have come"), errors.New("events are missing")

// catchUp brings a cache of an earlier revision up to the present by the events in between. The
// present is cache.store.Revision, as recognizeStore has set it. If the server, or a proxy before
// it, does not report in time that all events have come, catchUp compares the cache with an outline
// of the store instead. It returns errRelist, perhaps wrapped, if all leases have to be listed.
func (m *Manager) catchUp(ctx context.Context, cache *leaseCache) error {
	head := cache.store.Revision
	if head < cache.next {
		return nil
	}
	cache.store.Revision = cache.next - 1
	limit := m.timing.catchUp
	if m.slow.Load() { // many hosts ask the store at once, and for each outline it would read all keys
		limit = m.timing.catchUpLate
	}
	err := m.replay(ctx, limit, cache, true, func(confirmed int64) bool { return confirmed >= head || cache.next > head })
	if !errors.Is(err, errAnswersEarly) {
		return err
	}
	now, err := m.outlineSince(ctx, cache.next)
	if err != nil {
		return err
	}
	if !now.isOf(cache) {
		if err := m.replay(ctx, m.timing.catchUpLate, cache, false, func(int64) bool { return now.isOf(cache) }); err != nil {
			return err
		}
	}
	cache.next, cache.store.Revision = max(cache.next, now.revision+1), max(cache.store.Revision, now.revision)
	return nil
}

// patient is a factor: replay waits for the last event at least this many times as long as the
// server needed for its first answer, even if the limit of replay is shorter.
const patient = 10

// replay applies events to a cache until done reports that all have come. After the first answer of
// the server it waits for limit, or longer if that answer took long: see patient. If done has not
// reported true by then, replay returns errAnswersEarly if probes is true, and errRelist otherwise.
// If the first answer does not come within the deadline of a request, replay returns another error,
// after which the caller tries again.
func (m *Manager) replay(ctx context.Context, limit time.Duration, cache *leaseCache, probes bool, done func(confirmed int64) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var late *time.Timer
	began := time.Now()
	err := m.follow(ctx, []string{m.dir}, cache.next, watcher{probes: probes, on: func(resp *pb.WatchResponse, confirmed int64) error {
		if late == nil {
			late = time.AfterFunc(max(limit, patient*time.Since(began)), func() { cancel(errNotCaughtUp) })
		}
		if err := m.advance(ctx, cache, resp, confirmed, func(subnet.Update) {}); err != nil {
			return err
		}
		if done(confirmed) {
			return errCaughtUp
		}
		return nil
	}})
	if late != nil {
		late.Stop()
	}
	switch {
	case errors.Is(err, errCaughtUp):
		return nil
	case !errors.Is(context.Cause(ctx), errNotCaughtUp):
		return err
	case probes:
		// A proxy answers no probes, and a store that all hosts ask at once answers late. A
		// list of all leases would make that worse.
		return errAnswersEarly
	}
	return errRelist
}

// outline describes the leases of the store at a revision: how many there are, and which were
// written since an earlier revision, with the revision of the last write of each.
type outline struct {
	revision, count int64
	written         map[string]int64
}

// outlineSince returns the outline of the store at present, with the leases that were written at
// revision next or later. It is for servers that do not report when all events have come. It
// returns errRelist, wrapped, if more than pageSize leases were written.
func (m *Manager) outlineSince(ctx context.Context, next int64) (o outline, err error) {
	err = m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.Txn(ctx).Then(
			clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithCountOnly()),
			clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithMinModRev(next), clientv3.WithLimit(pageSize)),
		).Commit()
		if err != nil {
			return err
		}
		written := resp.Responses[1].GetResponseRange()
		if written.More {
			return errRelist
		}
		o = outline{resp.Header.Revision, resp.Responses[0].GetResponseRange().Count, map[string]int64{}}
		for _, kv := range written.Kvs {
			o.written[m.keyOf(kv)] = kv.ModRevision
		}
		return nil
	})
	return o, err
}

// isOf reports whether the cache has reached the state of the outline. A cache with all written
// keys has at least the keys of the store, because only events delete keys from it. So an equal
// number of keys means that the keys are equal.
func (o outline) isOf(cache *leaseCache) bool {
	for key, revision := range o.written {
		if e := cache.entries[key]; e == nil || e.modRevision != revision {
			return false
		}
	}
	return cache.count() == o.count
}
