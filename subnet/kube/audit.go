// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// audit compares a cache that was restored from the last known state with a list of all Nodes, once
// and at a random time. It reads the list in pages with pauses in between. A goroutine of its own
// reads the list. Only the goroutine that follows the watch uses everything else.
type audit struct {
	m     *Manager
	cache *nodeCache
	due   *time.Timer
	got   chan listed
	list  *listed // the list, while the cache has not reached its revision
}

// listed contains all Nodes at one revision, by name, without podCIDRs. The zero listed means that
// the list has failed.
type listed struct {
	revision int64
	nodes    map[string]*entry
}

// auditPage is the number of Nodes on a page of the list of metadata. The metadata of a Node has
// some 4 kB.
const auditPage = 250

func newAudit(m *Manager, cache *nodeCache) *audit {
	a := &audit{m: m, cache: cache, got: make(chan listed), due: time.NewTimer(time.Until(cache.auditAt))}
	if cache.restored == 0 {
		a.due.Stop()
	}
	return a
}

// begin starts a goroutine of wg that reads the list and sends it on a.got. From then on the cache
// records which Nodes are deleted.
func (a *audit) begin(ctx context.Context, wg *sync.WaitGroup) {
	a.cache.deleted = map[string]struct{}{}
	wg.Go(func() {
		l, err := a.read(ctx)
		if err != nil {
			klog.FromContext(ctx).V(1).Info("the last known state cannot be compared with the Nodes yet", "reason", err.Error())
			l = listed{}
		}
		select {
		case a.got <- l:
		case <-ctx.Done():
		}
	})
}

func (a *audit) read(ctx context.Context) (listed, error) {
	all := listed{nodes: map[string]*entry{}}
	q := query{metadata: true, limit: auditPage}
	for {
		l, err := a.m.client.list(ctx, a.m.decoder, q, func(n *wire.Node) {
			e := &entry{name: string(n.Name), uid: string(n.UID), order: uint64(n.Created), version: n.Revision, host: string(n.Hostname)}
			e.setNotes(n)
			all.nodes[e.name] = e
		})
		if err != nil {
			return listed{}, err
		}
		if all.revision = max(all.revision, l.Revision); l.Continue == "" {
			return all, nil
		}

		q.more = l.Continue
		if err := wait.For(ctx, a.m.timing.auditPage/2+a.m.client.random(a.m.timing.auditPage)); err != nil {
			return listed{}, err
		}
	}
}

// setList takes the list that was sent on a.got. If the list has failed, setList makes the audit
// begin again later.
func (a *audit) setList(l listed) {
	if l.nodes == nil {
		a.cache.deleted = nil
		a.due.Reset(a.m.timing.audit/20 + a.m.client.random(a.m.timing.audit/10))
		return
	}
	a.list = &l
}

// compare compares the cache with the list when the cache has reached the revision of the list. It
// corrects and publishes what differs. Before that, and if there is no list, it does nothing.
func (a *audit) compare(ctx context.Context, f *fetcher, sink func(subnet.Update)) {
	if a.list == nil || a.cache.revision < a.list.revision {
		return
	}

	l := *a.list
	names := a.cache.differing(l)
	a.list = nil
	a.cache.deleted = nil
	a.cache.restored = 0
	if len(names) == 0 {
		return
	}

	klog.FromContext(ctx).Error(nil, "leases of the last known state differed from the Nodes and were corrected", "leases", len(names), "first", names[0])
	if a.m.cfg.OnRepaired != nil {
		a.m.cfg.OnRepaired(len(names))
	}

	for _, name := range names {
		a.cache.correct(l.nodes[name], name)
		if a.cache.entries[name].needsRequest() {
			f.request(name)
		}
		a.cache.publish(ctx, name, sink)
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
func (c *nodeCache) differing(l listed) []string {
	var names []string
	for name, is := range l.nodes {
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
		if _, there := l.nodes[name]; !there && e.version <= l.revision {
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
