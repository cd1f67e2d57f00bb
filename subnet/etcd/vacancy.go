package etcd

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"flanneld/subnet"
)

// fullPool is a listing in which no subnet was free.
type fullPool struct {
	listing
	pools []subnet.Pool
	who   netip.Addr // see identity
}

// errVacancy ends the watch of a full pool: a subnet may be free now.
var errVacancy = errors.New("a lease has gone or changed")

// awaitVacancy waits if the last attempt to acquire the same lease has found no free subnet,
// until a change may have made one free. It leaves the listing, brought up to date, for
// Acquire. Without it every host that waits would read all leases every second.
func (m *Manager) awaitVacancy(ctx context.Context, pools []subnet.Pool, c subnet.Claim) error {
	full := m.full.Swap(nil)
	left := m.timing.vacant
	if full != nil {
		left -= time.Since(full.read)
	}
	if full == nil || left <= 0 || !slices.Equal(full.pools, pools) || full.who != identity(c) {
		return nil
	}
	inner, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	err := m.follow(inner, []string{m.dir, m.configKey()}, full.store.Revision+1, watcher{on: func(resp *pb.WatchResponse, _ int64) error {
		m.report(ctx, sourceLease, nil)
		if storeID(resp.Header).ID != full.store.ID {
			return errRelist
		}
		if m.advanceFull(full, resp) {
			return errVacancy
		}
		return nil
	}})
	switch {
	case errors.Is(err, errVacancy):
		m.forAcquire.put(full.listing)
		return nil
	case ctx.Err() != nil, inner.Err() == nil && !errors.Is(err, errRelist):
		return err
	}
	return nil
}

// advanceFull applies a response to the listing. It reports whether the host should try
// again: a lease has gone, one carries the own address, or the configuration has changed,
// which the caller of Acquire compares with the one that it uses.
func (m *Manager) advanceFull(full *fullPool, resp *pb.WatchResponse) (again bool) {
	next := full.store.Revision + 1
	for _, ev := range resp.Events {
		if ev.Kv.ModRevision < next {
			continue
		}
		full.store.Revision = ev.Kv.ModRevision
		if string(ev.Kv.Key) == m.configKey() {
			again = true
			continue
		}
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
		again = again || e.err == nil && carries(e.lease, full.who)
	}
	return again
}
