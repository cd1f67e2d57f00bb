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
// last known state superfluous, so listOr removes it. If the store is another one, or the new list has
// none of the last known leases, listOr sets m.replaced, for Watch.
func (m *Manager) listOr(ctx context.Context, s *stash) (listing, error) {
	if l := s.Swap(nil); l != nil && time.Since(l.read) < stashTime {
		return *l, nil
	}

	k := m.known.Load()
	is := unknown
	if k != nil {
		var l listing
		var err error
		// The last known state stays until Watch has a cache: if the start takes long, it is brought up
		// to date again.
		if l, is, err = m.restore(ctx, k); err != nil || is == same {
			return l, err
		}
		klog.FromContext(ctx).V(1).Info("the last known leases are not those of the store, reading all", "revision", k.store.Revision)
	}

	l, err := m.list(ctx)
	if err == nil && k != nil {
		m.known.Store(nil)
		m.replaced.Store(is == another || !k.survivesIn(l))
	}
	return l, err
}

// restore returns the last known state, with the changes since then that come in time: see catchUp.
// So the store sends only the changes, and not all leases. If the store is not the same, or that is
// not known, because the revision of the state was compacted, all leases have to be listed.
func (m *Manager) restore(ctx context.Context, k *lastKnown) (l listing, is comparison, err error) {
	cache, is, err := m.recognizeStore(ctx, k)
	if err == nil && is == same {
		err = m.catchUp(ctx, cache)
	}

	switch {
	case errors.Is(err, errRelist):
		return listing{}, unknown, nil
	case err != nil, is != same:
		return listing{}, is, err
	}

	l = listing{store: cache.store, head: cache.head, read: time.Now(), restored: max(cache.restored, 1)}
	for _, key := range slices.Sorted(maps.Keys(cache.entries)) {
		l.entries = append(l.entries, *cache.entries[key])
	}
	return l, same, nil
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
