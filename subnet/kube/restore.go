// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/wire"
)

// lastChange names the Node that changed last, of those that still exist. version is the revision
// of the store at which it changed.
type lastChange struct {
	name    string
	version int64
}

// lastChangeOf returns the last change of the Node with that name. It is zero if the cache does not
// have the Node or its version.
func (c *nodeCache) lastChangeOf(name string) lastChange {
	if e := c.entries[name]; e != nil && e.version > 0 {
		return lastChange{name, e.version}
	}
	return lastChange{}
}

// mark is what restore needs to recognize the store at the revision of the last known state:
// the uid of the own Node, and the Node that had changed last. Nodes change all the time, so
// it is unlikely that another history of the store has that Node at that version.
type mark struct {
	uid string
	lastChange
}

func (m mark) String() string { return fmt.Sprintf("%s %d %s", m.uid, m.version, m.name) }

// parseMark parses the text of a mark. It returns nil if the text is not one.
func parseMark(text string) *mark {
	var m mark
	parts := strings.Fields(text)
	if len(parts) != 3 {
		return nil
	}
	var err error
	if m.version, err = strconv.ParseInt(parts[1], 10, 64); err != nil || m.version < 1 {
		return nil
	}
	m.uid, m.name = parts[0], parts[2]
	return &m
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

// restore compares the last known state, which cache contains, with the store. s is the own Node as
// the store has it now. If ok is true, a watch can continue from the revision of that state.
// Otherwise the Nodes have to be listed, because the state is incomplete, its revision was
// compacted, or the store is another one.
func (m *Manager) restore(ctx context.Context, cache *nodeCache, s *ownNode) (ok bool, err error) {
	last := cache.lastKnownMark
	if last == nil {
		return false, nil
	}
	name, revision := *m.name.Load(), cache.store.Revision
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
	cache.own, cache.revision, cache.restored, cache.lastChanged = name, revision, revision, last.lastChange
	cache.auditAt = time.Now().Add(rand.N(m.timing.audit) + 1)
	m.nodes.Store(int64(len(cache.entries)))
	return true, nil
}

// full reports whether the podCIDRs of all entries are known. The cache takes the podCIDRs from the
// last known leases. If a lease has no subnet of a family that the configuration enables, the
// podCIDRs of its Node are not known.
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

// differing returns the names of the Nodes whose entries differ from the list l. The cache must
// have reached the revision of l. Changes after that revision do not count. To recognize them,
// deleted contains the names of Nodes that were deleted since the list began, and an entry without
// a uid has had no event since the restart.
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
	now.notes, now.fresh = is.notes, false
	c.decode(&now)
	return now.fresh || textOf(now.err) != textOf(e.err) && e.lease != nil
}
