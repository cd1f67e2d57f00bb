// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
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
	if f == nil || f.known.Store.ID == "" || err != nil {
		return cache
	}
	cache.store = f.known.Store
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

	for _, p := range f.known.Peers {
		add(p.Lease)
		cache.entries[p.Lease.Key].held = !p.HeldUntil.IsZero()
	}

	cache.lastKnownMark = parseMark(f.known.Store.Mark)
	cache.store.Mark = ""
	if f.own.Key != "" {
		add(f.own)
	}
	return cache
}

// publishMark publishes the revision and the mark of the cache when Watch ends, so that the next
// start needs no list. It publishes nothing if the cache is incomplete. Other updates have no mark,
// because the revision changes with every heartbeat, and each mark would cause a write of the state
// file.
func (c *nodeCache) publishMark(sink func(subnet.Update)) {
	own := c.entries[c.own]
	if c.revision == 0 || c.stale || c.behind || own == nil || own.uid == "" || c.lastChanged.version == 0 || c.lastChanged.version > c.revision {
		return
	}

	for _, e := range c.entries {
		if e.needsRequest() || e.fresh || e.err != nil && e.notes[annotation.Managed].Text == "true" { // the state file would not contain the Node
			return
		}
	}

	c.store.Revision = c.revision
	u := c.update(map[string]*subnet.Lease{})
	u.Store.Mark = mark{own.uid, c.lastChanged}.String()
	sink(u)
}

// restore compares the last known state, which cache contains, with the store. s is this host's Node as
// the store has it now. If ok is true, a watch can continue from the revision of that state. If ok
// is false, the Nodes have to be listed, because the state is incomplete or has no mark, its
// revision was compacted, or the store is another one.
func (m *Manager) restore(ctx context.Context, cache *nodeCache, s *ownNode) (ok bool, err error) {
	last := cache.lastKnownMark
	if last == nil {
		return false, nil
	}

	name := *m.name.Load()
	revision := cache.store.Revision
	own := cache.entries[name]
	is := own != nil && cache.full() && s.exists && s.uid == last.uid && revision > 0 && s.revision >= revision
	if is {
		if is, err = m.hadChange(ctx, last.lastChange, revision); err != nil {
			return false, err
		}
	}

	cache.lastKnownMark = nil
	if !is {
		klog.FromContext(ctx).V(1).Info("the last known state cannot be continued, listing all Nodes", "revision", revision)
		return false, nil
	}

	maps.DeleteFunc(cache.entries, func(_ string, e *entry) bool { return e.held })
	own.uid = s.uid
	if s.version <= revision { // a later change comes as an event
		own.version = s.version
	}

	cache.own = name
	cache.revision = revision
	cache.restored = revision
	cache.lastChanged = last.lastChange
	cache.auditAt = time.Now().Add(m.client.random(m.timing.audit))
	m.nodes.Store(int64(len(cache.entries)))
	return true, nil
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
	return slices.ContainsFunc([]int{
		http.StatusGone, http.StatusBadRequest, http.StatusNotFound, http.StatusUnprocessableEntity,
		http.StatusInternalServerError, http.StatusGatewayTimeout,
	}, func(code int) bool { return hasCode(err, code) })
}
