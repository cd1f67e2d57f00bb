// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
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

// restore returns the last known state, with the changes since then that come in time: see catchUp.
// So the store sends only the changes, and not all leases. ok is false if all leases have to be
// listed: there is no such state, its revision was compacted, or the store is another one. If the
// store is another one, restore sets m.replaced, for Watch. After an error the caller tries again.
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
	case errors.Is(err, errRelist):
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

	l.store = cache.store
	l.head = cache.head
	l.read = time.Now()
	l.restored = max(cache.restored, 1)
	return l, true, nil
}

// errCaughtUp ends the watch of catchUp.
var errCaughtUp = errors.New("all events have come, or the time is over")

// catchUp applies the events since the last known state to the cache. It returns when all have come,
// and no later than timing.catchUp, because nothing depends on it but the choice of a reservation
// that was made while the host was down. The events that are missing then come in Watch. catchUp
// returns errRelist if the store does not have the events.
func (m *Manager) catchUp(ctx context.Context, cache *leaseCache) error {
	if !cache.partial() {
		return nil
	}

	ctx, cancel := context.WithTimeoutCause(ctx, m.timing.catchUp, errCaughtUp)
	defer cancel()

	err := m.follow(ctx, []string{m.dir}, cache.store.Revision+1, watcher{partial: cache.partial, on: func(resp *pb.WatchResponse, confirmed int64) error {
		if err := m.advance(ctx, cache, resp, confirmed, func(subnet.Update) {}); err != nil {
			return err
		}
		if !cache.partial() {
			return errCaughtUp
		}
		return nil
	}})
	if errors.Is(err, errCaughtUp) || errors.Is(context.Cause(ctx), errCaughtUp) {
		return nil
	}
	return err
}
