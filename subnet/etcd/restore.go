// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// lastKnown is the last known state: the leases at one revision of a store, and enough to recognize
// that store.
type lastKnown struct {
	store   subnet.StoreID
	own     string            // key of the own lease; empty: none
	created int64             // revision at which the own lease was created
	entries map[string]*entry // of other nodes, by key; leases have unknownLeaseID
	count   int64             // number of all keys of leases in the store
	newest  newestKey         // zero: the store had no leases and no reservations
	ended   bool              // restore has failed for good, so the state is only compared with a list of all leases
}

// newestKey is the key that was written last, with the revision of that write and its etcd lease.
type newestKey struct {
	key      string
	revision int64
	lease    clientv3.LeaseID
}

// unknownLeaseID stands for the id of the etcd lease of an entry that comes from the last known
// state. The id is not known, and neither is the revision of the last write, which is zero in such
// an entry.
const unknownLeaseID clientv3.LeaseID = -1

// mark returns what restore needs to recognize the store at the revision of the cache: the number
// of keys, and the key that was written last, with its revision and etcd lease. Another history of
// the store is unlikely to have the same mark, because ids of etcd leases are random. The mark is
// "0" if the store has no keys of leases. It is empty if the last key is not known, or its lease
// cannot be read.
func (c *leaseCache) mark() string {
	newest, known := c.newestEntry()
	switch {
	case !known:
		return ""
	case newest == nil:
		return "0"
	case newest.err != nil: // the state file does not contain this lease, so the next start must list all anyway
		return ""
	}
	return fmt.Sprintf("%d %d %x %s", c.count(), newest.modRevision, int64(newest.leaseID), newest.key)
}

func parseMark(mark string) (count int64, w newestKey, ok bool) {
	if mark == "0" {
		return 0, w, true
	}
	var id uint64
	head, key, cut := cutFields(mark, 3)
	if !cut || key == "" {
		return 0, w, false
	}
	if n, err := fmt.Sscanf(head, "%d %d %x", &count, &w.revision, &id); n != 3 || err != nil || count < 1 || w.revision < 1 {
		return 0, w, false
	}
	w.key, w.lease = key, clientv3.LeaseID(id)
	return count, w, true
}

// cutFields cuts s at its n-th space, which is in neither part. ok is false if s has fewer spaces.
func cutFields(s string, n int) (head, tail string, ok bool) {
	tail = s
	for range n {
		if _, tail, ok = strings.Cut(tail, " "); !ok {
			return "", "", false
		}
	}
	return strings.TrimSuffix(s, " "+tail), tail, true
}

// newLastKnown returns the last known state in cfg, or nil if it cannot be used because it has no
// valid mark or revision, or a lease that does not match its key.
func newLastKnown(cfg Config) *lastKnown {
	k := &lastKnown{store: cfg.Known.Store, own: cfg.Own.Key, created: int64(cfg.Own.Order), entries: make(map[string]*entry, len(cfg.Known.Peers))}
	var ok bool
	if k.count, k.newest, ok = parseMark(cfg.Known.Store.Mark); !ok || k.store.Revision < 1 {
		return nil
	}
	for i := range cfg.Known.Peers {
		p := &cfg.Known.Peers[i]
		if !p.HeldUntil.IsZero() { // the store did not have the held peer
			continue
		}
		e := &entry{key: p.Lease.Key, lease: p.Lease, createRevision: int64(p.Lease.Order)}
		if !p.Lease.Permanent {
			e.leaseID = unknownLeaseID
		}
		var err error
		if e.subnets, err = codec.ParseKey(e.key); err != nil || e.key == k.own || !matchesKey(e.lease, e.key) {
			return nil
		}
		k.entries[e.key] = cfg.Interner.intern(e)
	}
	return k
}

// survivesIn reports whether l has one of the last known leases, or there were none. If it reports
// false, the store was replaced or emptied. The revision does not always show that: it may be later
// than the last known one, and the history of the store may not go back to the last known state.
func (k *lastKnown) survivesIn(l listing) bool {
	return k.own == "" && len(k.entries) == 0 || slices.ContainsFunc(l.entries, func(e entry) bool {
		known := k.entries[e.key]
		return known != nil && known.createRevision == e.createRevision || e.key == k.own && e.createRevision == k.created
	})
}

// matchesKey reports whether the endpoints of a lease have exactly the subnets that its key names.
func matchesKey(l subnet.Lease, key string) bool {
	subnets, err := codec.ParseKey(key)
	return err == nil && slices.EqualFunc(subnets, l.Endpoints, func(s netip.Prefix, e subnet.Endpoint) bool { return s == e.Subnet })
}

// restore returns the last known state, brought up to the present by the changes since then. So the
// store sends only the changes, and not all leases. ok is false if all leases have to be listed:
// there is no such state, its revision was compacted, there were too many changes, or the store is
// another one. In the last case restore sets m.replaced, for Watch. After an error the caller tries
// again.
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

// recognizeStore compares the last known state with the store as it was at the revision of that
// state. If they are the same, it returns a cache of the leases at that revision, in which
// store.Revision is already the present revision of the store. It returns unknown if they cannot be
// compared, because the revision was compacted or the state lacks leases.
func (m *Manager) recognizeStore(ctx context.Context, k *lastKnown) (cache *leaseCache, is comparison, err error) {
	at := clientv3.WithRev(k.store.Revision)
	ops := []clientv3.Op{clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithCountOnly(), at)}
	if k.newest.key != "" {
		ops = append(ops, clientv3.OpGet(m.dir+k.newest.key, at))
	}
	if k.own != "" && k.own != k.newest.key {
		ops = append(ops, clientv3.OpGet(m.dir+k.own, at))
	}
	is = another
	err = m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.Txn(ctx).Then(ops...).Commit()
		switch {
		case errors.Is(err, rpctypes.ErrCompacted):
			is = unknown
			return nil
		case errors.Is(err, rpctypes.ErrFutureRev): // the store has not come to that revision, so it is another one
			return nil
		case err != nil:
			return err
		}
		if now := storeID(resp.Header); now.ID != k.store.ID {
			return nil
		}
		cache = &leaseCache{entries: maps.Clone(k.entries), store: k.store, next: k.store.Revision + 1, restored: k.newest.revision}
		for _, r := range resp.Responses[1:] {
			for _, kv := range r.GetResponseRange().Kvs {
				e := m.entry(kv)
				cache.entries[e.key] = &e
			}
		}
		if k.newest.key != "" {
			w := cache.entries[k.newest.key]
			if w == nil || !w.is(k.newest.revision, k.newest.lease) {
				return nil
			}
		}
		if resp.Responses[0].GetResponseRange().Count != k.count {
			return nil
		}
		is = same
		if cache.count() != k.count { // the state lacks leases that could not be read
			is = unknown
		}
		cache.store.Revision = resp.Header.Revision
		return nil
	})
	return cache, is, err
}

// errCaughtUp ends the watch of replay when all events have come, and errNotCaughtUp ends one that
// takes too long.
var errCaughtUp, errNotCaughtUp = errors.New("all events have come"), errors.New("events are missing")

// catchUp brings a cache of an earlier revision up to the present by the events in between. If the
// server, or a proxy before it, does not report in time that all events have come, catchUp compares
// the cache with an outline of the store instead. It returns errRelist, perhaps wrapped, if all
// leases have to be listed.
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
// The first answer has the deadline of every request, after which replay returns an error and the
// caller tries again.
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
// returns errRelist, wrapped, if there are more than pageSize of them.
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

// completeOwn reads those leases of this node that l has from the last known state, because a write
// needs their revision. It puts them into l. It returns errConflict if one of them has changed
// since the listing or is gone.
func (m *Manager) completeOwn(ctx context.Context, l *listing, ours func(entry) bool) error {
	for i, e := range l.entries {
		if e.modRevision != 0 || !ours(e) {
			continue
		}
		found, _, err := m.read(ctx, e.key)
		switch {
		case err != nil:
			return err
		case found == nil || found.modRevision > l.store.Revision:
			return errConflict
		}
		l.entries[i] = *found
	}
	return nil
}
