// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// newNodeCache returns a cache that contains the last known state. The cache is empty if there is
// none, if an earlier call has used it, or if the configuration cannot be read.
func (m *Manager) newNodeCache(ctx context.Context) *nodeCache {
	cache := &nodeCache{keys: m.keys, problems: loglimit.NewChanges(loglimit.Many)}
	f := m.lastKnown.Swap(nil)
	cfg, err := m.Config(ctx)
	if f == nil || f.Known.Store.ID == "" || err != nil {
		return cache
	}
	cache.store = f.Known.Store
	cache.entries = map[string]*entry{}
	add := func(l subnet.Lease) {
		e := &entry{name: l.Key, order: l.Order, lease: &l, ofLease: true}
		cache.entries[l.Key] = e
		for _, n := range cfg.Networks {
			ep, ok := l.Endpoint(n.Family())
			if !ok { // the Node may have a podCIDR of this family by now
				e.cidrs = nil
				return
			}
			e.cidrs = append(e.cidrs, ep.Subnet)
		}
	}

	for _, p := range f.Known.Peers {
		if p.HeldUntil.IsZero() { // the store has lost the Node of a held peer
			add(p.Lease)
		}
	}

	if mark, ok := parseMark(f.Known.Store.Mark); ok {
		cache.mark = mark
		cache.standing = lastKnown
	}
	cache.store.Mark = ""
	if f.Own.Key != "" {
		add(f.Own)
	}
	return cache
}

// publishMark publishes the revision and the mark of the cache when Watch ends, so that the next
// start needs no list. It publishes nothing if the cache is incomplete. Other updates have no mark,
// because the revision changes with every heartbeat, and each mark would cause a write of the state
// file.
func (c *nodeCache) publishMark(sink func(subnet.Update)) {
	own := c.entries[c.own]
	if c.standing != current || c.server != upToDate || own == nil || own.uid == "" || c.lastChanged.version == 0 || c.lastChanged.version > c.store.Revision {
		return
	}

	for _, e := range c.entries {
		if e.needsRequest() || e.fresh || e.err != nil && e.notes[annotation.Managed].Text == "true" { // the state file would not contain the Node
			return
		}
	}

	u := c.update(map[string]*subnet.Lease{})
	u.Store.Mark = mark{own.uid, c.lastChanged}.String()
	sink(u)
}

// restore compares the last known state, which cache contains, with the store. s is this host's Node as
// the store has it now. The cache is current after that, or outdated if the state is incomplete, its revision
// was compacted, or the store is another one.
func (m *Manager) restore(ctx context.Context, cache *nodeCache, s *ownNode) error {
	last := cache.mark
	name := *m.name.Load()
	revision := cache.store.Revision
	own := cache.entries[name]
	is := own != nil && cache.full() && s.exists && s.uid == last.uid && revision > 0 && s.revision >= revision
	if is {
		var err error
		if is, err = m.hadChange(ctx, last.lastChange, revision); err != nil {
			return err
		}
	}

	if !is {
		cache.standing = outdated
		klog.FromContext(ctx).V(1).Info("the last known state cannot be continued, listing all Nodes", "revision", revision)
		return nil
	}

	own.uid = s.uid
	if s.version <= revision { // a later change comes as an event
		own.version = s.version
	}

	cache.own = name
	cache.standing = current
	cache.lastChanged = last.lastChange
	cache.auditAt = time.Now().Add(m.client.random(m.timing.audit))
	m.nodes.Store(int64(len(cache.entries)))
	return nil
}

// full reports whether the podCIDRs of all entries are known. restore calls it while the cache
// contains only the last known state. newNodeCache has then taken the podCIDRs of each Node from the
// subnets of its lease. If a lease has no subnet of an enabled family, the Node may have got a podCIDR
// of that family since the state was saved. So the podCIDRs of that Node are not known.
func (c *nodeCache) full() bool {
	for _, e := range c.entries {
		if e.cidrs == nil {
			return false
		}
	}
	return true
}

// hadChange reports whether the Node with the name in w had the version in w when the store was at
// revision. It also reports false if the server cannot show that revision any more.
func (m *Manager) hadChange(ctx context.Context, w lastChange, revision int64) (is bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, m.timing.request)
	defer cancel()
	q := query{name: w.name, metadata: true, revision: revision, exact: true}
	_, err = m.client.list(ctx, m.decoder, q, func(n *wire.Node) { is = n.Revision == w.version })
	if refused(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read node %s as it was: %w", w.name, err)
	}
	return is, nil
}

// refused reports whether err is the answer of a server that cannot show the state at a revision:
// 410 if it was compacted, and other codes from servers that do not know such requests.
func refused(err error) bool {
	return hasCode(err, http.StatusGone, http.StatusBadRequest, http.StatusNotFound, http.StatusUnprocessableEntity,
		http.StatusInternalServerError, http.StatusGatewayTimeout)
}

// mark is what restore needs to recognize the store at the revision of the last known state:
// the uid of this host's Node, and the Node that had changed last. Nodes change all the time, so
// it is unlikely that another history of the store has that Node at that version.
type mark struct {
	uid string
	lastChange
}

// lastChange names the Node that changed last, of those that still exist. version is the revision
// of the store at which it changed.
type lastChange struct {
	name    string
	version int64
}

func (m mark) String() string { return fmt.Sprintf("%s %d %s", m.uid, m.version, m.name) }

// parseMark parses the text of a mark. ok is false if the text is not one.
func parseMark(text string) (m mark, ok bool) {
	n, err := fmt.Sscanf(text, "%s %d %s", &m.uid, &m.version, &m.name)
	return m, n == 3 && err == nil && m.version > 0
}

// auditPage is the number of Nodes on a page of the list of metadata. The metadata of a Node has
// some 4 kB.
const auditPage = 250

// audit begins to compare a cache that was restored from the last known state with a list of all Nodes.
// This happens once and at a random time. The list is read in pages with pauses in between. Meanwhile the
// cache records which Nodes are deleted. If the list fails, the audit begins again later.
func (f *follower) audit(ctx context.Context) {
	f.cache.deleted = map[string]struct{}{}
	f.wg.Go(func() {
		l, err := f.readPages(ctx)
		if err != nil {
			klog.FromContext(ctx).V(1).Info("the last known state cannot be compared with the Nodes yet", "reason", err.Error())
			f.post(ctx, func() {
				f.cache.deleted = nil
				f.cache.auditAt = time.Now().Add(f.timing.audit/20 + f.client.random(f.timing.audit/10))
				f.auditing.Reset(time.Until(f.cache.auditAt))
			})
			return
		}
		f.post(ctx, func() {
			f.list = l
			f.compare(ctx)
		})
	})
}

// readPages returns all Nodes without podCIDRs, in a cache with the revision of the last page.
func (m *Manager) readPages(ctx context.Context) (*nodeCache, error) {
	all := &nodeCache{entries: map[string]*entry{}}
	q := query{metadata: true, limit: auditPage}
	for {
		l, err := m.client.list(ctx, m.decoder, q, func(n *wire.Node) {
			e := &entry{name: string(n.Name), uid: string(n.UID), order: uint64(n.Created), version: n.Revision, host: string(n.Hostname)}
			e.setNotes(n)
			all.entries[e.name] = e
		})
		if err != nil {
			return nil, err
		}
		if all.store.Revision = max(all.store.Revision, l.Revision); l.Continue == "" {
			return all, nil
		}

		q.more = l.Continue
		if err := wait.For(ctx, m.timing.auditPage/2+m.client.random(m.timing.auditPage)); err != nil {
			return nil, err
		}
	}
}

// compare compares the cache with the list of the audit when the cache has reached the revision of the list. It
// corrects and publishes what differs. Before that, and if there is no list, it does nothing.
func (f *follower) compare(ctx context.Context) {
	if f.list == nil || f.cache.store.Revision < f.list.store.Revision {
		return
	}

	l := f.list
	names := f.cache.differing(l)
	f.list = nil
	f.cache.deleted = nil
	f.cache.auditAt = time.Time{}
	if len(names) == 0 {
		return
	}

	klog.FromContext(ctx).Error(nil, "leases of the last known state differed from the Nodes and were corrected", "leases", len(names), "first", names[0])
	if f.cfg.OnRepaired != nil {
		f.cfg.OnRepaired(len(names))
	}
	for _, name := range names {
		f.cache.correct(l.entries[name], name)
		f.publish(ctx, name)
	}
}

// correct replaces the entry with that name by is, the Node as listed, or removes the entry if is
// is nil. If there was no entry, or the entry was of another Node with that name, the podCIDRs are
// not known, and the caller has to request the Node.
func (c *nodeCache) correct(is *entry, name string) {
	if is == nil {
		delete(c.entries, name)
		return
	}

	is.fresh = true
	if e := c.entries[name]; e != nil {
		is.loggedProblem = e.loggedProblem
		if e.order == is.order {
			is.cidrs = e.cidrs
			is.cidrsErr = e.cidrsErr
			is.ofLease = e.ofLease
			is.lease = e.lease
			is.fresh = false
		}
	}
	c.entries[name] = is
	c.decode(is)
}

// differing returns the names of the Nodes whose entries differ from the list l. The cache must
// have reached the revision of l. Changes after that revision do not count. differing recognizes
// them by c.deleted, which contains the names of Nodes that were deleted since the list began, and
// by the version of an entry. An entry without a uid has had no event since the restart.
func (c *nodeCache) differing(l *nodeCache) []string {
	var names []string
	for name, is := range l.entries {
		e := c.entries[name]
		_, gone := c.deleted[name]
		switch {
		case e == nil:
			if !gone && is.notes[annotation.Managed].Text == "true" { // Nodes that flannel does not manage have no lease, and no state file has them
				names = append(names, name)
			}
		case e.uid == "" || e.version < is.version:
			if c.differs(e, is) {
				names = append(names, name)
			}
		}
	}

	for name, e := range c.entries {
		if _, there := l.entries[name]; !there && e.version <= l.store.Revision {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// differs reports whether is, a Node as listed, is another Node than that of the entry e, or gives
// another lease or error.
func (c *nodeCache) differs(e *entry, is *entry) bool {
	if e.uid != "" && e.uid != is.uid || e.order != is.order {
		return true
	}
	now := *e
	now.notes = is.notes
	now.fresh = false
	c.decode(&now)
	return now.fresh || textOf(now.err) != textOf(e.err) && e.lease != nil
}
