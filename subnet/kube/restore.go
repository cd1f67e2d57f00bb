// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
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

// newNodeCache returns a cache that contains the last known state in cfg, or nothing.
func newNodeCache(cfg Config, keys *annotation.Keys) *nodeCache {
	cache := &nodeCache{keys: keys, problems: loglimit.NewChanges(loglimit.Many)}
	if cfg.Known.Store.ID == "" {
		return cache
	}
	cache.store = cfg.Known.Store
	cache.entries = map[string]*entry{}
	add := func(l subnet.Lease) {
		cache.entries[l.Key] = &entry{name: l.Key, order: l.Order, lease: &l, cidrs: l.Subnets(), ofLease: true}
	}

	for _, p := range cfg.Known.Peers {
		if p.HeldUntil.IsZero() { // the store has lost the Node of a held peer
			add(p.Lease)
		}
	}

	if cfg.Own.Key != "" {
		add(cfg.Own)
	}
	if cache.store.Mark != "" {
		cache.standing = lastKnown
	}
	return cache
}

// publishMark publishes the revision and the mark of the cache when Watch ends, so that the next
// start needs no list. It publishes nothing if the cache is incomplete. Other updates have no mark,
// because the revision changes with every heartbeat, and each mark would cause a write of the state
// file.
func (c *nodeCache) publishMark(sink func(subnet.Update)) {
	own := c.entries[c.own]
	if c.standing != current || c.server != upToDate {
		return
	}
	if own == nil || own.uid == "" || own.version == 0 || own.version > c.store.Revision {
		return
	}

	for _, e := range c.entries {
		if e.needsRequest() || e.fresh || e.err != nil && e.managed() { // the state file would not contain the Node
			return
		}
	}

	u := c.update(map[string]*subnet.Lease{})
	u.Store.Mark = mark(own.uid, own.version)
	sink(u)
}

// restore compares the last known state, which cache contains, with the store. s is this host's Node as
// the store has it now. The cache is current after that, or outdated if its revision was compacted, or the store is
// another one.
func (m *Manager) restore(ctx context.Context, cache *nodeCache, s *ownNode) error {
	name := *m.name.Load()
	revision := cache.store.Revision
	own := cache.entries[name]
	is := own != nil && s.exists && revision > 0 && s.revision >= revision
	if is {
		version, err := m.versionAt(ctx, name, revision)
		if err != nil {
			return err
		}
		is = cache.store.Mark == mark(s.uid, version)
		own.version = version // a later change comes as an event
	}

	cache.store.Mark = ""
	if !is {
		cache.standing = outdated
		klog.FromContext(ctx).V(1).Info("the last known state cannot be continued, listing all Nodes", "revision", revision)
		return nil
	}

	own.uid = s.uid
	cache.own = name
	cache.standing = current
	cache.auditAt = time.Now().Add(m.client.random(m.timing.audit))
	return nil
}

// versionAt returns the version that the Node with that name had when the store was at revision, and 0 if there
// was none, or if the server cannot show that revision any more.
func (m *Manager) versionAt(ctx context.Context, name string, revision int64) (version int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, m.timing.request)
	defer cancel()
	q := query{name: name, metadata: true, revision: revision, exact: true}
	_, err = m.client.list(ctx, m.decoder, q, func(n *wire.Node) { version = n.Revision })
	if refused(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read node %s as it was: %w", name, err)
	}
	return version, nil
}

// refused reports whether err is the answer of a server that cannot show the state at a revision:
// 410 if it was compacted, and other codes from servers that do not know such requests.
func refused(err error) bool {
	return hasCode(err, http.StatusGone, http.StatusBadRequest, http.StatusNotFound, http.StatusUnprocessableEntity,
		http.StatusInternalServerError, http.StatusGatewayTimeout)
}

// mark returns what restore needs to recognize the store at the revision of the last known state: the uid of
// this host's Node, and the revision at which that Node changed last. kubelet writes the Node all the time,
// so it is unlikely that another history of the store has it at that version.
func mark(uid string, version int64) string { return fmt.Sprintf("%s %d", uid, version) }

// auditPage is the number of Nodes on a page of the list of metadata. The metadata of a Node has
// some 4 kB.
const auditPage = 250

// errDue ends a watch because it is time for the audit.
var errDue = errors.New("the audit is due")

// audit compares a cache that was restored from the last known state with a list of all Nodes, once, at a
// random time, and while no watch changes the cache. The list is of exactly the revision of the cache. So a
// difference is an error of the last known state, and not a change whose event has not come yet. audit
// corrects and publishes the cache. If the list fails, it sets another time.
func (m *Manager) audit(ctx context.Context, cache *nodeCache, sink func(subnet.Update)) {
	listed, err := m.listExactly(ctx, cache)
	if err != nil {
		klog.FromContext(ctx).V(1).Info("the last known state cannot be compared with the Nodes yet", "reason", err.Error())
		cache.auditAt = time.Now().Add(m.timing.audit/20 + m.client.random(m.timing.audit/10))
		return
	}

	cache.auditAt = time.Time{}
	names := cache.differing(listed)
	if len(names) == 0 {
		return
	}
	klog.FromContext(ctx).Error(nil, "leases of the last known state differed from the Nodes and were corrected", "leases", len(names), "first", names[0])
	if m.cfg.OnRepaired != nil {
		m.cfg.OnRepaired(len(names))
	}
	cache.entries = listed.entries
	cache.publishAll(ctx, sink)
}

// listExactly returns a cache with the Nodes as they were at the revision of cache. It lists only their
// metadata, in pages, because a server may have to read the Nodes of a past revision from its store.
func (m *Manager) listExactly(ctx context.Context, cache *nodeCache) (*nodeCache, error) {
	listed := cache.successor()
	for q := (query{metadata: true, limit: auditPage, revision: cache.store.Revision, exact: true}); ; {
		l, err := m.client.list(ctx, m.decoder, q, func(n *wire.Node) { listed.put(n, false, cache) })
		switch {
		case err != nil:
			return nil, err
		case l.Revision != cache.store.Revision:
			return nil, fmt.Errorf("the server has listed revision %d instead of %d", l.Revision, cache.store.Revision)
		case l.Continue == "":
			return listed, nil
		}
		q = query{metadata: true, limit: auditPage, more: l.Continue}
	}
}

// differing returns the names of the peers that have another lease or error in listed, which has the Nodes at
// the revision of the cache. Nodes that flannel does not manage have no lease, and no state file has them.
func (c *nodeCache) differing(listed *nodeCache) []string {
	both := maps.Clone(c.entries)
	maps.Copy(both, listed.entries)
	maps.DeleteFunc(both, func(name string, _ *entry) bool {
		was := c.entries[name]
		is := listed.entries[name]
		switch {
		case name == c.own, was == nil && !is.managed():
			return true
		case was == nil, is == nil:
			return false
		}
		return was.order == is.order && !is.fresh && (was.lease == nil || textOf(was.err) == textOf(is.err))
	})
	return slices.Sorted(maps.Keys(both))
}
