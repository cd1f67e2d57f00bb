// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/wire"
)

// view is the state of all Nodes as Watch knows it.
type view struct {
	keys    *keys
	own     string            // name of the own Node
	entries map[string]*entry // by name; nil if nothing is known
	store   subnet.StoreID
	// revision is the one up to which the view has all events. 0: list first.
	revision int64
	listed   bool // by this process
	current  bool // the last watch has ended in good order
	blind    bool // the last watch was, and the one since has said nothing yet
	behind   bool // the server's cache was, and the watch has said nothing yet
	same     bool // while listing: a Node is there that was there before
	last     witness
	// former is the mark of the last known state, until the store was compared with it.
	former *mark
	// restored is the revision of the last known state that the view began with, until an audit
	// has compared it; 0: there was none. Entries from there have no uid.
	restored int64
	auditAt  time.Time
	deleted  map[string]struct{} // names that went while an audit reads a list
}

// entry is one Node.
type entry struct {
	name string
	uid  string // empty for one that is known from a former run only
	// version is the revision of the store that changed it last.
	version int64
	host    string // the label wire.HostnameLabel, while podCIDRs are to be asked for
	order   uint64
	cidrs   []netip.Prefix // of the spec; nil if they are not known
	notes   notes
	err     error         // why it is no lease now; errNotManaged is no trouble
	partly  error         // why a family of the lease is not as the Node has it now
	lease   *subnet.Lease // as it last was one, nil if it never was; read-only
	fresh   bool          // lease has changed and is to be published
	held    bool          // from a former run, in which the store lacked it
	logged  string        // trouble that was
}

// lacks reports whether the Node has to be requested.
func (e *entry) lacks() bool {
	return e != nil && e.cidrs == nil && e.notes[managed].text == "true"
}

// former is the last known state of this node.
type former struct {
	own   subnet.Lease
	known subnet.LedgerState
}

// newView returns a view that starts with the last known state.
func (m *Manager) newView(ctx context.Context) *view {
	v := &view{keys: m.keys}
	f := m.former.Swap(nil)
	cfg, err := m.Config(ctx)
	if f == nil || f.known.Store.ID == "" || err != nil {
		return v
	}
	v.store = f.known.Store
	v.entries = map[string]*entry{}
	add := func(l subnet.Lease) {
		e := &entry{name: l.Key, order: l.Order, lease: &l}
		v.entries[l.Key] = e
		for _, n := range cfg.Networks {
			ep, ok := l.Endpoint(n.Family())
			if !ok { // which the Node may have by now
				e.cidrs = nil
				return
			}
			e.cidrs = append(e.cidrs, ep.Subnet)
		}
	}
	for _, p := range f.known.Peers {
		add(p.Lease)
		v.entries[p.Lease.Key].held = !p.HeldUntil.IsZero()
	}
	v.former = parseMark(f.known.Store.Mark)
	v.store.Mark = ""
	if f.own.Key != "" {
		add(f.own)
	}
	return v
}

// required is the revision that a list must have reached: that of everything known,
// and of the own Node. Anything later comes by the watch. The present revision of the
// store would be too much: changes of anything but Nodes raise it, which the server's
// cache of Nodes may not hear of for minutes. 0 means the present state: the store is
// older than it was, or another one, and the server may still have its former state
// in the cache; or the server is known to be behind.
func (v *view) required(s *self) int64 {
	known := max(v.store.Revision, s.version)
	switch {
	case known > s.revision, v.blind:
		return 0
	case known == 0:
		return s.revision
	}
	return known
}

func (v *view) has(name, uid string) bool {
	e := v.entries[name]
	return e != nil && e.uid == uid
}

// successor returns an empty view, to be filled from a list.
func (v *view) successor() *view {
	return &view{keys: v.keys, entries: make(map[string]*entry, len(v.entries)), listed: true, blind: v.blind}
}

// take puts a Node of a list into the view, along with the state that old has of it.
func (v *view) take(n *wire.Node, full bool, old *view) {
	e := &entry{}
	if known := old.entries[string(n.Name)]; known != nil && known.is(n) {
		*e = *known
		v.same = true
	} else {
		e.name = string(n.Name)
	}
	v.entries[e.name] = e
	v.set(e, n, full)
	e.fresh = false // the whole view will be published
}

// is reports whether n is the Node of e, not another one with its name.
func (e *entry) is(n *wire.Node) bool {
	if e.uid == "" {
		return e.order == uint64(n.Created)
	}
	return e.uid == string(n.UID)
}

// complete ends the filling from a list. The store is the one it was as long as
// one Node is still there: uids are never used twice, and creation times hardly.
func (v *view) complete(own string, l listing, s *self, old *view) {
	v.own, v.revision, v.behind = own, l.Revision, l.behind || v.blind
	v.last = v.witnessOf(own)
	v.store = subnet.StoreID{ID: s.uid, Revision: l.Revision}
	if v.same && old.store.ID != "" {
		v.store.ID = old.store.ID
	} else if v.store.ID == "" {
		v.store.ID = "without-" + v.own
	}
}

// set updates an entry by n. It does not allocate if nothing has changed.
func (v *view) set(e *entry, n *wire.Node, full bool) {
	changed := false
	e.version = n.Revision
	if e.uid != string(n.UID) {
		e.uid, e.order, changed = string(n.UID), uint64(n.Created), true
	}
	changed = e.setNotes(n) || changed
	if full {
		cidrs, err := podCIDRs(n)
		v.setCIDRs(e, cidrs, err)
		changed = true
	}
	if changed {
		v.decode(e)
	}
	switch lacks := e.lacks(); {
	case lacks && e.host != string(n.Hostname):
		e.host = string(n.Hostname)
	case !lacks:
		e.host = ""
	}
}

// setNotes replaces the annotations by those of n, and reports whether one has changed.
func (e *entry) setNotes(n *wire.Node) (changed bool) {
	for i := range e.notes {
		text := n.Annotations[i]
		if have := &e.notes[i]; have.present != (text != nil) || have.text != string(text) {
			*have = note{string(text), text != nil}
			changed = true
		}
	}
	return changed
}

// setCIDRs takes over the podCIDRs of the spec.
func (v *view) setCIDRs(e *entry, cidrs []netip.Prefix, err error) {
	switch {
	case err == nil:
		e.cidrs = cidrs
	case errors.Is(err, errNoPodCIDR):
		e.cidrs = nil
	default:
		e.cidrs, e.err = []netip.Prefix{}, err // they never change
	}
}

// decode derives the lease of an entry that has changed.
func (v *view) decode(e *entry) {
	e.partly = nil
	if e.cidrs == nil { // it is asked for, if it is flannel's
		e.err = errNotManaged
		return
	}
	if len(e.cidrs) == 0 {
		return
	}
	backendType, es, err := v.keys.decode(e.notes, e.cidrs, e.lease)
	if len(es) == 0 {
		e.err = err
		return
	}
	e.err, e.partly = nil, err
	l := &subnet.Lease{Key: e.name, Order: e.order, BackendType: backendType, Endpoints: es}
	if e.lease == nil || !sameLease(*e.lease, *l) {
		e.lease, e.fresh = l, true
	}
}

// sameLease compares two leases. One of them may come from the state file, which has JSON in
// another form.
func sameLease(x, y subnet.Lease) bool {
	return x.Key == y.Key && x.Order == y.Order && x.BackendType == y.BackendType &&
		slices.EqualFunc(x.Endpoints, y.Endpoints, func(x, y subnet.Endpoint) bool {
			return x.Subnet == y.Subnet && x.PublicIP == y.PublicIP && sameJSON(x.Data, y.Data)
		})
}

func sameJSON(x, y json.RawMessage) bool {
	if bytes.Equal(x, y) {
		return true
	}
	var a, b any
	return json.Unmarshal(x, &a) == nil && json.Unmarshal(y, &b) == nil && reflect.DeepEqual(a, b)
}

// advance applies one event of the watch. It returns the name of the Node if its lease may have
// changed, and errRelist if the store is older than it was.
func (v *view) advance(ev wire.Event) (name string, err error) {
	n, revision := ev.Node, ev.Node.Revision
	if revision < v.revision {
		if ev.Type == wire.Bookmark {
			return "", errRelist
		}
		return "", nil
	}
	v.revision, v.behind = revision, false
	if ev.Type == wire.Bookmark {
		return "", nil
	}
	e := v.entries[string(n.Name)]
	if e != nil && ev.Type != wire.Deleted {
		v.last = witness{e.name, revision}
	}
	switch {
	case ev.Type == wire.Deleted:
		if v.last.name == string(n.Name) {
			v.last = v.witnessOf(v.own)
		}
		if v.deleted != nil {
			v.deleted[string(n.Name)] = struct{}{}
		}
		if e == nil {
			return "", nil
		}
		delete(v.entries, e.name)
		return e.name, nil
	case e == nil || !e.is(n):
		e = &entry{name: string(n.Name), fresh: true}
		v.last = witness{e.name, revision}
		v.entries[e.name] = e
		v.set(e, n, false)
		return e.name, nil
	}
	v.set(e, n, false)
	if e.fresh || e.lacks() || e.trouble() != e.logged {
		return e.name, nil
	}
	return "", nil
}

// supply applies the answer to a request for Nodes.
func (v *view) supply(got fetched) {
	for _, name := range got.names {
		e, s := v.entries[name], got.found[name]
		switch {
		case e == nil:
		case s != nil && s.uid == e.uid:
			v.setCIDRs(e, s.cidrs, s.cidrsErr)
			v.decode(e)
			e.host = ""
		case got.missed(name):
			e.host = ""
		}
	}
}

// missing returns the names of the Nodes that have to be requested.
func (v *view) missing() []string {
	var names []string
	for name, e := range v.entries {
		if e.lacks() {
			names = append(names, name)
		}
	}
	return names
}

// publish publishes the state of one Node, if it has changed.
func (v *view) publish(ctx context.Context, name string, sink func(subnet.Update)) {
	if name == "" {
		return
	}
	changed := map[string]*subnet.Lease{}
	e := v.entries[name]
	switch {
	case e == nil:
		changed[name] = nil
	case logUnreadable(ctx, name, e, e), e.fresh:
		if e.fresh {
			changed[name] = e.lease // if it has none, it may have been another Node's
		}
		e.fresh = false
	default:
		return
	}
	if name == v.own {
		return
	}
	v.store.Revision = v.revision
	u := v.update(changed)
	if e != nil && e.err != nil && e.lease != nil {
		u.Undecodable = []string{name}
	}
	sink(u)
}

// update returns the update that is published.
func (v *view) update(changed map[string]*subnet.Lease) subnet.Update {
	return subnet.Update{Store: v.store, Changed: changed, Snapshot: v.snapshot}
}

func (v *view) snapshot() subnet.Snapshot {
	s := subnet.Snapshot{Leases: make([]*subnet.Lease, 0, len(v.entries)), Store: v.store}
	for name, e := range v.entries {
		switch {
		case name == v.own || e.lease == nil:
		case e.err != nil:
			s.Undecodable = append(s.Undecodable, name)
		default:
			s.Leases = append(s.Leases, e.lease)
		}
	}
	return s
}

// trouble returns the reason why a Node cannot be read; empty if it can, or is not flannel's.
func (e *entry) trouble() string {
	if e == nil || errors.Is(e.err, errNotManaged) && e.lease == nil {
		return ""
	}
	return textOf(cmp.Or(e.err, e.partly))
}

// logUnreadable logs when a Node becomes unreadable, for another reason than
// before, or readable again. It reports whether it did.
func logUnreadable(ctx context.Context, name string, before, now *entry) bool {
	if before != nil {
		now.logged = before.logged
	}
	trouble := now.trouble()
	if trouble == now.logged {
		return false
	}
	now.logged = trouble
	switch {
	case trouble == "":
		klog.FromContext(ctx).Info("node can be read again", "node", name)
	case now.err == nil:
		klog.FromContext(ctx).Error(nil, "node can be read in part only; the rest keeps its last good state, if it has one", "node", name, "reason", trouble)
	default:
		klog.FromContext(ctx).Error(nil, "node cannot be read, and keeps its last good state", "node", name, "reason", trouble)
	}
	return true
}
