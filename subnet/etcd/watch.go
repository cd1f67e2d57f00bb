// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
)

// errRelist says that a watch cannot go on from where it is: the revision was
// compacted, or the store is not the one that was listed.
var errRelist = errors.New("watch cannot be resumed")

// view is the state of the store as Watch knows it.
type view struct {
	entries map[string]*entry // by key, without values
	store   subnet.StoreID
	next    int64  // revision to watch from; 0: there was no list yet
	told    int64  // revision up to which the configuration is known
	stale   bool   // list before the next watch
	another bool   // the store is not the one of the view before, though it has its id
	newest  *entry // the entry that was written last; see newestEntry
	// restored is the revision of the newest entry that came from a former run. Other entries
	// from there have no revision. Zero: all entries are from this run.
	restored int64
	reprieve
}

// Watch publishes the leases of other nodes. See subnet.Manager.
func (m *Manager) Watch(ctx context.Context, sink func(subnet.Update)) error {
	defer m.outage.Forget(sourceWatch)
	var v view
	check := m.newAudit(&v)
	defer check.stop()
	b := m.backoff()
	for {
		err := m.resume(ctx, &v, sink)
		if err == nil {
			followed, end := check.begin(ctx)
			err = m.follow(followed, []string{m.dir, m.configKey()}, v.next, watcher{
				on: func(resp *pb.WatchResponse, settled int64) error {
					b.Reset()
					check.mu.Lock()
					defer check.mu.Unlock()
					m.takeConfig(&v, resp)
					m.report(ctx, sourceWatch, nil)
					return m.advance(ctx, &v, resp, settled, sink)
				},
				waits:  func() bool { return len(v.doomed) > 0 },
				checks: true,
			})
			end()
			if check.repair(ctx, sink) && ctx.Err() == nil {
				continue
			}
			if !errors.Is(err, errStalled) {
				v.alive(time.Now(), m.timing.dead)
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, errClosed) {
			return err
		}
		if errors.Is(err, errRelist) {
			v.stale = true
		}
		if !errors.Is(err, errStalled) {
			m.report(ctx, sourceWatch, err)
		}
		if err := b.Wait(ctx, 0); err != nil {
			return err
		}
	}
}

// resume brings the view to a revision from which a watch can start. If the store is still the
// same, the view stays as it is. Otherwise resume lists all leases.
func (m *Manager) resume(ctx context.Context, v *view, sink func(subnet.Update)) error {
	is, err := m.compare(ctx, v)
	if err != nil {
		return err
	}
	if is == same {
		v.hear(time.Now(), m.margin(m.cfg.TTL), m.timing.reprieve)
		return nil
	}
	list := m.list
	if v.next == 0 { // Acquire may just have made one
		list = func(ctx context.Context) (listing, error) { return m.listOr(ctx, &m.forWatch) }
	} else if err := m.client.turn(ctx); err != nil { // most often others have to list as well
		return err
	}
	l, err := list(ctx)
	if err != nil {
		return err
	}
	v.hear(time.Now(), m.margin(m.cfg.TTL), m.timing.reprieve)
	old := *v
	*v = view{
		entries: make(map[string]*entry, len(l.entries)), store: l.store, next: l.store.Revision + 1,
		restored: l.restored,
		another:  m.replaced.Load() || is == another || l.store.ID == old.store.ID && l.store.Revision < old.store.Revision || !old.explains(l),
		reprieve: old.reprieve,
	}
	if old.store.ID != "" && !v.follows(old) {
		was := subnet.StoreID{ID: old.store.ID, Revision: old.store.Revision}
		klog.FromContext(ctx).Error(nil, "etcd is not the store it was", "was", was, "is", v.store)
	}
	for i := range l.entries {
		l.entries[i].value = nil
		e := m.cfg.Shared.one(&l.entries[i])
		v.entries[e.key] = e
		logUndecodable(ctx, old.entries[e.key], e)
	}
	v.adopt(old)
	m.client.hosts.Store(int64(len(v.entries)))
	sink(v.update(m.ownKey.Load(), nil))
	m.replaced.Store(false) // later updates are of the same store
	v.another = false
	_, err = m.tell(ctx, v) // after the list: the watch brings later changes
	return err
}

// likeness is the result of a comparison of the store with the view.
type likeness int

const (
	unknown likeness = iota // a list is necessary
	same
	another // with the same id, and at the same revision
)

// compare compares the store with the view.
func (m *Manager) compare(ctx context.Context, v *view) (likeness, error) {
	if v.next == 0 || v.stale {
		return unknown, nil
	}
	head, err := m.tell(ctx, v)
	if err != nil || head.ID != v.store.ID || head.Revision < v.store.Revision {
		return unknown, err
	}
	return m.comparePast(ctx, v)
}

// comparePast compares the store at the revision of the view with the view. A store that was
// emptied, or restored from a backup, and used since may have the same id and the same revision
// with other leases.
func (m *Manager) comparePast(ctx context.Context, v *view) (likeness, error) {
	leases := v.count()
	newest, known := v.newestEntry()
	if !known {
		return unknown, nil
	}
	at := clientv3.WithRev(v.next - 1)
	ops := []clientv3.Op{clientv3.OpGet(m.dir, clientv3.WithPrefix(), clientv3.WithCountOnly(), at)}
	if newest != nil {
		// Not without its value: etcd 3.7 leaves the etcd lease out then.
		ops = append(ops, clientv3.OpGet(m.dir+newest.key, at))
	}
	is := another
	err := m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.Txn(ctx).Then(ops...).Commit()
		if errors.Is(err, rpctypes.ErrCompacted) { // and cannot be watched from there either
			is = unknown
			return nil
		}
		if err != nil {
			return err
		}
		if resp.Responses[0].GetResponseRange().Count != leases {
			return nil
		}
		for _, r := range resp.Responses[1:] {
			if kvs := r.GetResponseRange().Kvs; len(kvs) != 1 || !newest.is(kvs[0].ModRevision, clientv3.LeaseID(kvs[0].Lease)) {
				return nil
			}
		}
		is = same
		return nil
	})
	return is, err
}

// is reports whether e was written at that revision and with that etcd lease. Unlike a revision,
// the id of an etcd lease does not come again in a store that was emptied.
func (e *entry) is(modRevision int64, lease clientv3.LeaseID) bool {
	return e.modRevision == modRevision && e.leaseID == lease
}

// may reports whether listed may be the same state of the same key as e, which may come from a
// former run.
func (e *entry) may(listed entry) bool {
	if e.modRevision == 0 {
		return e.createRevision == listed.createRevision
	}
	return e.is(listed.modRevision, listed.leaseID)
}

// count returns the number of keys that the store has. Leases with a reprieve are not there.
func (v *view) count() int64 { return int64(len(v.entries) - len(v.doomed)) }

// newestEntry returns the entry in the store that was written last, or nil if there is none.
// known is false if that may be an entry from a former run, whose revision is not known.
func (v *view) newestEntry() (newest *entry, known bool) {
	valid := func(e *entry) bool {
		_, doomed := v.doomed[e.key]
		return v.entries[e.key] == e && !doomed
	}
	if v.newest == nil || !valid(v.newest) {
		v.newest = nil
		for _, e := range v.entries {
			if valid(e) && (v.newest == nil || e.modRevision > v.newest.modRevision) {
				v.newest = e
			}
		}
	}
	if v.newest == nil {
		return nil, true
	}
	return v.newest, v.newest.modRevision >= max(v.restored, 1)
}

// explains reports whether l may be a later state of the store of the view: then all entries of l
// from before the view's revision are in the view.
func (v *view) explains(l listing) bool {
	return !slices.ContainsFunc(l.entries, func(e entry) bool {
		known := v.entries[e.key]
		return e.modRevision < v.next && (known == nil || !known.may(e))
	})
}

// follows reports whether v is of the store of old, and not of an earlier time.
func (v *view) follows(old view) bool {
	return !v.another && v.store.ID == old.store.ID && v.store.Revision >= old.store.Revision
}

// drop takes the leases with these keys out of the view.
func (v *view) drop(changed map[string]*subnet.Lease, keys []string) {
	for _, key := range keys {
		delete(v.entries, key)
		changed[key] = nil
	}
}

// adopt takes over the leases with a reprieve from the view of the same store before an outage.
// For another store there is no reprieve: the ledger holds the leases that it lacks.
func (v *view) adopt(old view) {
	if !v.follows(old) {
		v.doomed = nil
		return
	}
	listed := slices.Collect(maps.Values(v.entries))
	for key, e := range old.entries {
		if _, there := v.entries[key]; !there && v.spares(key) {
			v.entries[key] = e
		}
	}
	maps.DeleteFunc(v.doomed, func(key string, _ struct{}) bool { return v.entries[key] == nil })
	for _, e := range listed {
		v.drop(map[string]*subnet.Lease{}, v.renewed(e, v.entries))
	}
}

// advance applies one response to the view and publishes the result. The revision of the view also
// advances without events: otherwise it would soon be compacted.
func (m *Manager) advance(ctx context.Context, v *view, resp *pb.WatchResponse, settled int64, sink func(subnet.Update)) error {
	// A grpc-proxy that merges watches leaves the id out when it says that one has begun.
	if resp.Header.ClusterId != 0 && storeID(resp.Header).ID != v.store.ID {
		return errRelist
	}
	v.alive(time.Now(), m.timing.dead)
	v.hear(time.Now(), m.margin(m.cfg.TTL), m.timing.reprieve)
	before := v.store.Revision
	v.next, v.store.Revision = max(v.next, settled+1), max(v.store.Revision, settled)
	changed := map[string]*subnet.Lease{}
	v.drop(changed, v.ended(ctx))
	if !news(resp, v.next) && len(changed) == 0 && v.store.Revision == before {
		return nil
	}
	known := v.next // one transaction may change several keys at one revision
	for _, ev := range resp.Events {
		if ev.Kv.ModRevision < known {
			continue
		}
		read := m.entry(ev.Kv)
		read.value = nil
		e := &read
		switch ev.Type {
		case mvccpb.DELETE:
			if !v.spares(e.key) {
				v.drop(changed, []string{e.key})
			}
		default:
			e = m.cfg.Shared.one(e)
			v.drop(changed, v.renewed(e, v.entries))
			logUndecodable(ctx, v.entries[e.key], e)
			v.entries[e.key], v.newest = e, e
			if e.err == nil {
				changed[e.key] = &e.lease
			}
		}
		v.next = max(v.next, ev.Kv.ModRevision+1)
	}
	v.store.Revision = max(v.store.Revision, resp.Header.Revision)
	m.client.hosts.Store(int64(len(v.entries)))
	u := v.update(m.ownKey.Load(), changed)
	for _, ev := range resp.Events {
		if key := m.keyOf(ev.Kv); v.unreadable(key) {
			delete(changed, key)
			u.Undecodable = append(u.Undecodable, key)
		}
	}
	sink(u)
	return nil
}

func (v *view) unreadable(key string) bool {
	e := v.entries[key]
	return e != nil && e.err != nil
}

// update returns the update that is published. own is the key to leave out, if there is one.
func (v *view) update(own *string, changed map[string]*subnet.Lease) subnet.Update {
	if own != nil {
		if _, ok := changed[*own]; ok {
			// Before, it may have belonged to another node.
			changed[*own] = nil
		}
	}
	v.store.Mark = v.mark()
	return subnet.Update{Store: v.store, Changed: changed, Snapshot: func() subnet.Snapshot { return v.snapshot(own) }}
}

func (v *view) snapshot(own *string) subnet.Snapshot {
	s := subnet.Snapshot{Leases: make([]*subnet.Lease, 0, len(v.entries)), Store: v.store, Another: v.another}
	for key, e := range v.entries {
		switch {
		case own != nil && key == *own:
		case e.err != nil:
			s.Undecodable = append(s.Undecodable, key)
		default:
			s.Leases = append(s.Leases, &e.lease)
		}
	}
	return s
}

// logUndecodable logs when a lease becomes unreadable, for another reason than
// before, or readable again. before is nil if there was none.
func logUndecodable(ctx context.Context, before, now *entry) {
	was := ""
	if before != nil && before.err != nil {
		was = before.err.Error()
	}
	switch {
	case now.err == nil && was != "":
		klog.FromContext(ctx).Info("lease can be read again", "key", subnet.Shorten(now.key))
	case now.err != nil && now.err.Error() != was:
		klog.FromContext(ctx).Error(now.err, "lease cannot be read and keeps its last good state", "key", subnet.Shorten(now.key))
	}
}

// news reports whether resp has events from revision next on.
func news(resp *pb.WatchResponse, next int64) bool {
	return slices.ContainsFunc(resp.Events, func(ev *mvccpb.Event) bool { return ev.Kv.ModRevision >= next })
}
