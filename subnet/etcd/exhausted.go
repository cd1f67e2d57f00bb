// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/flanneld/flanneld/subnet"
)

// errMaybeFree ends the watch of an exhausted pool because Acquire has to try again: a subnet may
// be free now, or the configuration has changed.
var errMaybeFree = errors.New("a lease has gone or changed")

// awaitFreeSubnet waits until a change may have made a subnet free or the configuration has
// changed, if the last attempt to acquire a lease for the same pools and address has found no free
// subnet. After the change it puts the updated listing into forAcquire. It returns nil without a
// listing if there was no such attempt, or if the old listing cannot be used any more, so that the
// caller lists again. It returns an error if the watch fails. Without this method every host that
// waits would read all leases every second.
func (m *Manager) awaitFreeSubnet(ctx context.Context, pools []subnet.Pool, c subnet.Claim) error {
	full := m.exhausted.Swap(nil)
	left := m.timing.trustListing
	if full != nil {
		left -= time.Since(full.read)
	}
	if full == nil || left <= 0 || !slices.Equal(full.pools, pools) || full.who != identity(c) {
		return nil
	}

	inner, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	read := full.store.Revision
	err := m.follow(inner, []string{m.dir, m.configKey()}, read+1, watcher{on: func(resp *pb.WatchResponse, _ int64) error {
		m.report(ctx, sourceLease, nil)
		if storeID(resp.Header).ID != full.store.ID {
			return errRelist
		}
		if m.applyToExhausted(full, resp) || m.changesConfig(resp, read) {
			return errMaybeFree
		}
		return nil
	}})

	switch {
	case errors.Is(err, errMaybeFree):
		m.forAcquire.put(full.listing)
		return nil
	case ctx.Err() != nil, inner.Err() == nil && !errors.Is(err, errRelist):
		return err
	}
	return nil
}

// changesConfig reports whether resp contains a change of the configuration after the given
// revision. A change ends the wait, so that the caller of Acquire can use the new configuration. A
// stream orders the events of each key, but not those of two keys, so a later change of a lease may
// come first. Therefore after must be the revision of the original listing.
func (m *Manager) changesConfig(resp *pb.WatchResponse, after int64) bool {
	return slices.ContainsFunc(resp.Events, func(ev *mvccpb.Event) bool {
		return string(ev.Kv.Key) == m.configKey() && ev.Kv.ModRevision > after
	})
}

// applyToExhausted applies a response to the listing. It reports whether the host should try again,
// because a lease was deleted, or was written with this host's address.
func (m *Manager) applyToExhausted(full *exhaustedPool, resp *pb.WatchResponse) (again bool) {
	next := full.store.Revision + 1
	for _, ev := range resp.Events {
		if ev.Kv.ModRevision < next || string(ev.Kv.Key) == m.configKey() {
			continue
		}

		full.store.Revision = ev.Kv.ModRevision
		e := m.entry(ev.Kv)
		i, found := slices.BinarySearchFunc(full.entries, e.key, func(e entry, key string) int { return cmp.Compare(e.key, key) })
		switch {
		case ev.Type == mvccpb.DELETE:
			again = true
			if found {
				full.entries = slices.Delete(full.entries, i, i+1)
			}
			continue
		case found:
			full.entries[i] = e
		default:
			full.entries = slices.Insert(full.entries, i, e)
		}
		again = again || e.err == nil && hasPublicIP(e.lease, full.who)
	}
	return again
}
