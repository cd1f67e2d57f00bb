// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/annotation"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// nodeCache is the copy of all Nodes that Watch keeps. In comments, "the server's cache" is the API
// server's own cache.
type nodeCache struct {
	keys    *annotation.Keys
	own     string            // name of this host's Node; empty until the cache was current for the first time
	entries map[string]*entry // by name; nil if nothing is known
	// problems limits the log lines about Nodes that cannot be read.
	problems *loglimit.Changes
	standing standing
	// store is the store, with the revision up to which the cache has all events. It has a Mark while the cache
	// is lastKnown.
	store  subnet.StoreID
	server serverCache
	// auditAt is when the last known state with which the cache has begun is compared with the Nodes. It is zero
	// if there was none, or it was compared. Until then entries may have no uid.
	auditAt time.Time
}

// standing says what Watch can do with a cache.
//
//	lastKnown ---- the state is not that of the store ----> outdated <---- the watch cannot be
//	    |                                                      |           continued, or is stale
//	    | the store had this state                             | list          |
//	    +----------------------------------------------------> current ---------+
type standing int

const (
	outdated  standing = iota // the Nodes must be listed; the cache may be empty
	lastKnown                 // the cache has the last known state, which the store may not have
	current                   // a watch can continue from the revision of the cache
)

// serverCache says what is known of the server's cache. An event of the required revision shows that it is up to date.
type serverCache int

const (
	upToDate serverCache = iota
	behind               // when the Nodes were listed, the list had to come from the store
	stale                // the last watch was stale: see follower
)

// entry is what the cache knows of one Node.
type entry struct {
	name string
	uid  string // empty for a Node that is known only from the last known state
	// version is the revision of the store that changed the Node last.
	version       int64
	host          string // value of the label wire.HostnameLabel, while the podCIDRs have to be requested
	order         uint64
	cidrs         []netip.Prefix // the podCIDRs; nil if they are not known, empty and not nil if they cannot be used
	ofLease       bool           // cidrs are the subnets of a lease of the last known state; the Node may have another podCIDR
	cidrsErr      error          // why the podCIDRs cannot be used; nil if they can, or are not known
	notes         annotation.Notes
	err           error         // why the Node has no lease now; with annotation.ErrNotManaged it need not have one
	partialErr    error         // why a family of the Node is missing in the lease, or still has its former endpoint there
	lease         *subnet.Lease // the last lease that could be read, nil if there was none; read-only
	fresh         bool          // lease has changed and has to be published
	loggedProblem string        // the problem that was logged last; empty if there is none
}

// needsRequest reports whether the Node has to be requested, because flannel manages it and its
// podCIDRs are not known. It reports false if e is nil.
func (e *entry) needsRequest() bool {
	return e != nil && e.managed() && (e.cidrs == nil || e.ofLease && e.hasGainedFamily())
}

// hasGainedFamily reports whether the annotations have an address of a family in which no podCIDR
// is known.
func (e *entry) hasGainedFamily() bool {
	return slices.ContainsFunc(families, func(f prefix.Family) bool {
		_, known := prefix.OfFamily(e.cidrs, f)
		return e.notes[annotation.PublicIP.In(f)].Present && !known
	})
}

// managed reports whether flannel manages the Node.
func (e *entry) managed() bool { return e.notes[annotation.Managed].Text == "true" }

// required returns the revision that a list must have reached: the latest one that is known, of the
// cache or of this host's Node s. If neither has one, it returns the store's present revision. Later
// changes come by the watch. A list does not require the present revision if another is known,
// because changes of other objects raise it and do not reach the server's cache of Nodes for
// minutes.
//
// The result 0 means that the list must show the present state of the store, and not the server's
// cache. required returns 0 if the server is known to be behind. It also returns 0 if the store has
// a lower revision than the latest known one, as a restored or another store may have, because the
// server's cache may still have the former state.
func (c *nodeCache) required(s *ownNode) int64 {
	known := max(c.store.Revision, s.version)
	switch {
	case known > s.revision, c.server == stale:
		return 0
	case known == 0:
		return s.revision
	}
	return known
}

// successor returns an empty cache, which replaces c after it was filled from a list.
func (c *nodeCache) successor() *nodeCache {
	return &nodeCache{keys: c.keys, problems: c.problems, entries: make(map[string]*entry, len(c.entries)), server: c.server}
}

// put puts a Node of a list into the cache, together with what old, the former cache, knows of it.
// full means that n contains the spec. put reports whether the former cache has this Node.
func (c *nodeCache) put(n *wire.Node, full bool, old *nodeCache) (same bool) {
	e := &entry{name: string(n.Name)}
	if known := old.entries[e.name]; known != nil {
		e.loggedProblem = known.loggedProblem
		if same = known.isNode(n); same {
			*e = *known
		}
	}
	c.entries[e.name] = e
	c.set(e, n, full)
	return same
}

// isNode reports whether n is the Node of e, and not a later one with its name. It compares the
// uids, or the times of creation if e has no uid.
func (e *entry) isNode(n *wire.Node) bool {
	if e.uid == "" {
		return e.order == uint64(n.Created)
	}
	return e.uid == string(n.UID)
}

// complete makes a new cache current. l is the rest of the list, and s this host's Node. The caller sets same
// if a Node of the former cache still exists. The store counts as the same as before then, because uids
// are unique and two Nodes rarely have the same name and creation time.
func (c *nodeCache) complete(own string, l listing, s *ownNode, old *nodeCache, same bool) {
	c.own = own
	c.standing = current
	c.store = subnet.StoreID{ID: cmp.Or(s.uid, "without-"+own), Revision: l.Revision}
	if same && old.store.ID != "" {
		c.store.ID = old.store.ID
	}

	switch {
	case c.server == stale:
	case l.behind:
		c.server = behind
	default:
		c.server = upToDate
	}
}

// set updates an entry from n. full means that n contains the spec. set does not allocate if
// nothing has changed.
func (c *nodeCache) set(e *entry, n *wire.Node, full bool) {
	changed := false
	e.version = n.Revision
	if e.uid != string(n.UID) {
		e.uid = string(n.UID)
		e.order = uint64(n.Created)
		changed = true
	}

	changed = e.setNotes(n) || changed
	if full {
		cidrs, err := podCIDRs(n)
		c.setCIDRs(e, cidrs, err)
		changed = true
	}
	if changed {
		c.decode(e)
	}

	switch lacks := e.needsRequest(); {
	case lacks && e.host != string(n.Hostname):
		e.host = string(n.Hostname)
	case !lacks:
		e.host = ""
	}
}

// setNotes replaces the annotations of e by those of n, and reports whether one has changed.
func (e *entry) setNotes(n *wire.Node) (changed bool) {
	for i := range e.notes {
		text := n.Annotations[i]
		if have := &e.notes[i]; have.Present != (text != nil) || have.Text != string(text) {
			*have = annotation.Note{Text: string(text), Present: text != nil}
			changed = true
		}
	}
	return changed
}

// setCIDRs replaces the podCIDRs of e by cidrs. err is the error with which the function podCIDRs
// has returned them.
func (c *nodeCache) setCIDRs(e *entry, cidrs []netip.Prefix, err error) {
	e.ofLease = false

	switch {
	case err == nil:
		e.cidrs = cidrs
		e.cidrsErr = nil
	case errors.Is(err, errNoPodCIDR):
		e.cidrs = nil
		e.cidrsErr = nil
	default:
		e.cidrs = []netip.Prefix{} // not nil: podCIDRs never change, so the Node is not requested again
		e.cidrsErr = err
	}
}

// decode derives the lease of an entry from its annotations and podCIDRs, and the errors. If they
// cannot be read, the entry keeps its last lease.
func (c *nodeCache) decode(e *entry) {
	e.partialErr = nil
	switch {
	case e.cidrs == nil || !e.managed(): // if flannel manages the Node, its podCIDRs are requested
		e.err = annotation.ErrNotManaged
		return
	case e.cidrsErr != nil:
		e.err = e.cidrsErr
		return
	}

	claim, err := c.keys.Decode(e.notes, e.cidrs, e.lease)
	if len(claim.Endpoints) == 0 {
		e.err = err
		return
	}

	e.err = nil
	e.partialErr = err
	l := &subnet.Lease{Key: e.name, Order: e.order, BackendType: claim.BackendType, NextType: claim.NextType, Endpoints: claim.Endpoints}
	if e.lease != nil && e.lease.Same(l) {
		return
	}

	// The first list does not say when a lease was written: the version of a Node also changes when
	// the kubelet reports. A lease that differs from the one known before was written later than that.
	if e.lease != nil || c.standing == current {
		l.Claimed = uint64(e.version)
	}
	e.lease = l
	e.fresh = true
}

// advance applies one event of the watch to the cache. It returns the name of the Node if its lease
// or the problem with it may have changed, or if the Node has to be requested. Otherwise it returns
// "". It returns errRelist if the store is older than it was.
func (c *nodeCache) advance(ev wire.Event) (name string, err error) {
	n := ev.Node
	revision := n.Revision
	if revision < c.store.Revision {
		if ev.Type == wire.Bookmark {
			return "", errRelist
		}
		return "", nil
	}

	c.store.Revision = revision
	if c.server == behind {
		c.server = upToDate
	}
	if ev.Type == wire.Bookmark {
		return "", nil
	}

	e := c.entries[string(n.Name)]
	switch {
	case ev.Type == wire.Deleted:
		if e == nil {
			return "", nil
		}
		delete(c.entries, e.name)
		return e.name, nil

	case e == nil || !e.isNode(n):
		e = &entry{name: string(n.Name), fresh: true}
		c.entries[e.name] = e
		c.set(e, n, false)
		return e.name, nil
	}

	c.set(e, n, false)
	if e.fresh || e.needsRequest() || e.problem() != e.loggedProblem {
		return e.name, nil
	}
	return "", nil
}

// missing returns the names of the Nodes that have to be requested.
func (c *nodeCache) missing() []string {
	names := slices.Collect(maps.Keys(c.entries))
	return slices.DeleteFunc(names, func(name string) bool { return !c.entries[name].needsRequest() })
}

// publish publishes the state of the Node with that name, if it has changed since it was published
// last. It logs a problem with the Node. It does not publish this host's Node.
func (c *nodeCache) publish(ctx context.Context, name string, sink func(subnet.Update)) {
	if name == "" {
		return
	}

	changed := map[string]*subnet.Lease{}
	e := c.entries[name]
	switch {
	case e == nil:
		changed[name] = nil
	case c.logUnreadable(ctx, e), e.fresh:
		if e.fresh {
			changed[name] = e.lease // if it has none, another Node of that name may have had one
		}
		e.fresh = false
	default:
		return
	}
	if name == c.own {
		return
	}

	u := c.update(changed)
	if e != nil && e.err != nil && e.lease != nil {
		u.Undecodable = []string{name}
	}
	sink(u)
}

// publishAll publishes the whole cache, and logs problems with Nodes.
func (c *nodeCache) publishAll(ctx context.Context, sink func(subnet.Update)) {
	for _, e := range c.entries {
		c.logUnreadable(ctx, e)
		e.fresh = false
	}
	sink(c.update(nil))
}

// update returns the update to publish. changed has the leases that have changed, by the name of
// the Node, nil for one that is gone; a nil map means that any lease may have changed.
func (c *nodeCache) update(changed map[string]*subnet.Lease) subnet.Update {
	return subnet.Update{Store: c.store, Changed: changed, Snapshot: c.snapshot}
}

func (c *nodeCache) snapshot() subnet.Snapshot {
	s := subnet.Snapshot{Leases: make([]*subnet.Lease, 0, len(c.entries)), Store: c.store}
	for name, e := range c.entries {
		switch {
		case name == c.own || e.lease == nil:
		case e.err != nil:
			s.Undecodable = append(s.Undecodable, name)
		default:
			s.Leases = append(s.Leases, e.lease)
		}
	}
	return s
}

// problem returns the reason why a Node cannot be read, or not all of it. It is empty if the Node
// can be read, or is not managed by flannel.
func (e *entry) problem() string {
	if e == nil || errors.Is(e.err, annotation.ErrNotManaged) && e.lease == nil {
		return ""
	}
	return textOf(cmp.Or(e.err, e.partialErr))
}

// logUnreadable logs when a Node becomes unreadable, when the reason changes, and when the Node can
// be read again. It reports whether one of these happened.
func (c *nodeCache) logUnreadable(ctx context.Context, e *entry) bool {
	problem := e.problem()
	if problem == e.loggedProblem {
		return false
	}

	e.loggedProblem = problem
	log, ok := c.problems.Next(klog.FromContext(ctx))
	switch {
	case !ok:
	case problem == "":
		log.Info("node can be read again", "node", e.name)
	case e.err == nil:
		log.Error(nil, "node can be read in part only; the rest keeps its last good state, if it has one", "node", e.name, "reason", problem)
	default:
		log.Error(nil, "node cannot be read, and keeps its last good state", "node", e.name, "reason", problem)
	}
	return true
}

func textOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
