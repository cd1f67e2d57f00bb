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
)

// lastKnown is what this node knew when it ran before: the leases at one revision of a store,
// and enough to recognize that store.
type lastKnown struct {
	store   subnet.StoreID
	own     string            // key of the own lease; empty: none
	entries map[string]*entry // of other nodes, by key, in the form of unread
	count   int64             // number of all keys in the store
	newest  witness           // zero: the store had no leases
}

// witness is the key that was written last, and how.
type witness struct {
	key      string
	revision int64
	lease    clientv3.LeaseID
}

// unread is the id of the etcd lease of an entry that comes from a former run. Its
// modification revision is zero. Neither is known.
const unread clientv3.LeaseID = -1

// mark returns what restore needs to recognize the store at the revision of the view: the
// number of keys, and the key that was written last, with its revision and etcd lease. Another
// history of the store has hardly the same: ids of etcd leases are random. It is empty if that
// key is not known or cannot be read.
func (v *view) mark() string {
	newest, known := v.newestEntry()
	switch {
	case !known:
		return ""
	case newest == nil:
		return "0"
	case newest.err != nil: // the state file lacks it, so all leases have to be listed anyway
		return ""
	}
	return fmt.Sprintf("%d %d %x %s", v.count(), newest.modRevision, int64(newest.leaseID), newest.key)
}

func parseMark(mark string) (count int64, w witness, ok bool) {
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

// cutFields cuts s behind its n-th space.
func cutFields(s string, n int) (head, tail string, ok bool) {
	tail = s
	for range n {
		if _, tail, ok = strings.Cut(tail, " "); !ok {
			return "", "", false
		}
	}
	return strings.TrimSuffix(s, " "+tail), tail, true
}

// newLastKnown returns nil if the state in cfg cannot be used.
func newLastKnown(cfg Config) *lastKnown {
	k := &lastKnown{store: cfg.Known.Store, own: cfg.Own.Key, entries: make(map[string]*entry, len(cfg.Known.Peers))}
	var ok bool
	if k.count, k.newest, ok = parseMark(cfg.Known.Store.Mark); !ok || k.store.Revision < 1 {
		return nil
	}
	for i := range cfg.Known.Peers {
		p := &cfg.Known.Peers[i]
		if !p.HeldUntil.IsZero() { // it was not in the store
			continue
		}
		e := &entry{key: p.Lease.Key, lease: p.Lease, createRevision: int64(p.Lease.Order)}
		if !p.Lease.Permanent {
			e.leaseID = unread
		}
		var err error
		if e.subnets, err = parseKey(e.key); err != nil || e.key == k.own || !goesWith(e.lease, e.key) {
			return nil
		}
		k.entries[e.key] = cfg.Shared.one(e)
	}
	return k
}

// goesWith reports whether the endpoints of a lease are those that its key names.
func goesWith(l subnet.Lease, key string) bool {
	subnets, err := parseKey(key)
	return err == nil && slices.EqualFunc(subnets, l.Endpoints, func(s netip.Prefix, e subnet.Endpoint) bool { return s == e.Subnet })
}

// restore returns the last known state of a former run, brought up to the present by what has
// changed since. It costs the store the changes, and not all leases. ok is false if all leases
// have to be listed: there is no such state, its revision was compacted, or the store is
// another one, which replaced tells Watch.
func (m *Manager) restore(ctx context.Context) (l listing, ok bool, err error) {
	k := m.known.Load()
	if k == nil {
		return listing{}, false, nil
	}
	v, is, err := m.recognizeStore(ctx, k)
	if err == nil && is == same {
		err = m.catchUp(ctx, v)
	}
	switch {
	case errors.Is(err, errRelist), errors.Is(err, errHasty):
		is = unknown
	case err != nil:
		return listing{}, false, err // it is tried again
	}
	m.known.Store(nil)
	if is != same {
		klog.FromContext(ctx).V(1).Info("the last known leases are not those of the store, reading all", "revision", k.store.Revision)
		m.replaced.Store(is == another)
		return listing{}, false, nil
	}
	for _, key := range slices.Sorted(maps.Keys(v.entries)) {
		l.entries = append(l.entries, *v.entries[key])
	}
	l.store, l.read, l.restored = v.store, time.Now(), max(v.restored, 1)
	return l, true, nil
}

// recognizeStore asks the store how it was at the revision of the last known state. It returns
// the view at that revision if that is the same.
func (m *Manager) recognizeStore(ctx context.Context, k *lastKnown) (v *view, is likeness, err error) {
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
		case errors.Is(err, rpctypes.ErrFutureRev): // the revision tells the ledger as well
			return nil
		case err != nil:
			return err
		}
		if now := storeID(resp.Header); now.ID != k.store.ID {
			return nil
		}
		v = &view{entries: maps.Clone(k.entries), store: k.store, next: k.store.Revision + 1, restored: k.newest.revision}
		for _, r := range resp.Responses[1:] {
			for _, kv := range r.GetResponseRange().Kvs {
				e := m.entry(kv)
				v.entries[e.key] = &e
			}
		}
		if k.newest.key != "" {
			w := v.entries[k.newest.key]
			if w == nil || !w.is(k.newest.revision, k.newest.lease) {
				return nil
			}
		}
		if resp.Responses[0].GetResponseRange().Count != k.count {
			return nil
		}
		is = same
		if v.count() != k.count { // the state lacks leases that could not be read
			is = unknown
		}
		v.store.Revision = resp.Header.Revision
		return nil
	})
	return v, is, err
}

// errCaughtUp ends the watch of catchUp.
var errCaughtUp = errors.New("all events have come")

// catchUp brings a view of an earlier revision up to the present by the events in between. If
// the server, or a proxy before it, does not tell when all events have come, that takes too long.
func (m *Manager) catchUp(ctx context.Context, v *view) error {
	head := v.store.Revision
	if head < v.next {
		return nil
	}
	v.store.Revision = v.next - 1
	err := m.replay(ctx, v, true, func(settled int64) bool { return settled >= head || v.next > head })
	if !errors.Is(err, errHasty) {
		return err
	}
	now, err := m.outlineSince(ctx, v.next)
	if err != nil {
		return err
	}
	if !now.isOf(v) {
		if err := m.replay(ctx, v, false, func(int64) bool { return now.isOf(v) }); err != nil {
			return err
		}
	}
	v.next, v.store.Revision = max(v.next, now.revision+1), max(v.store.Revision, now.revision)
	return nil
}

// replay applies events to a view until done says that all have come.
func (m *Manager) replay(ctx context.Context, v *view, probes bool, done func(settled int64) bool) error {
	ctx, cancel := context.WithTimeout(ctx, m.timing.catchUp)
	defer cancel()
	err := m.follow(ctx, []string{m.dir}, v.next, watcher{probes: probes, on: func(resp *pb.WatchResponse, settled int64) error {
		if err := m.advance(ctx, v, resp, settled, func(subnet.Update) {}); err != nil {
			return err
		}
		if done(settled) {
			return errCaughtUp
		}
		return nil
	}})
	switch {
	case errors.Is(err, errCaughtUp):
		return nil
	case errors.Is(err, context.DeadlineExceeded) && probes:
		// A proxy answers no probes, and a store that all hosts ask at once answers late. A
		// list of all leases would make that worse.
		return errHasty
	case errors.Is(err, context.DeadlineExceeded):
		return errRelist
	}
	return err
}

// outline describes the leases at a revision, given those at an earlier one: how many there are,
// and the revisions of those that were written since.
type outline struct {
	revision, count int64
	written         map[string]int64
}

// outlineSince returns the outline of the store, given its state before revision next. It is for
// servers that do not tell when all events have come.
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

// isOf reports whether the view has come to the outline. It has all keys that the store has
// then, because only events delete keys, so an equal number means equal keys.
func (o outline) isOf(v *view) bool {
	for key, revision := range o.written {
		if e := v.entries[key]; e == nil || e.modRevision != revision {
			return false
		}
	}
	return v.count() == o.count
}

// completeOwn reads the leases of this node that come from a former run: a write needs their
// revision. A lease that has changed meanwhile is a conflict.
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
