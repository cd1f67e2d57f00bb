// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"context"
	"maps"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// The two backends, as indexes, and their number.
const (
	present = iota
	next
	sides
)

// layer merges the wanted states of both backends and passes the result to one Reconciler.
//
// All objects except for routes to peers are simply united. Each backend may want a route to the
// subnet of a peer. The route of the backend that carries the packets has the usual metric, and the
// route of the other backend stands by with a high metric. So one request replaces the best route
// when a peer changes its backend, and each backend always has a route on which the peer can be
// probed.
//
// A backend that has one route to the whole network gets a route to each of its peers as well. The
// kernel gets the route to the whole network only from the present backend: such a route of the
// next backend would receive packets to addresses that the network did not carry before.
type layer struct {
	reconciler *dataplane.Reconciler
	networks   []netip.Prefix
	views      [sides]*view
	carried    map[netip.Prefix]struct{} // subnets of peers to which the next backend carries the packets

	deferred bool               // changes wait for apply
	changed  bool               // the wanted state has changed since the last apply
	gone     []dataplane.Object // no longer wanted, and not swept yet
}

// view is the Reconciler of one backend.
type view struct {
	*layer
	side     int
	want     dataplane.State
	subnets  map[netip.Prefix]struct{} // of the peers that the backend serves
	rerouted bool                      // see dataplane.Report
}

func newLayer(r *dataplane.Reconciler, networks []netip.Prefix) *layer {
	l := &layer{reconciler: r, networks: networks, carried: map[netip.Prefix]struct{}{}}
	for i := range l.views {
		l.views[i] = &view{layer: l, side: i, want: dataplane.NewState(), subnets: map[netip.Prefix]struct{}{}}
	}
	return l
}

// view returns the Reconciler of one backend, which wants nothing any more.
func (l *layer) view(side int) *view {
	v := l.views[side]
	v.want = dataplane.NewState()
	l.changed = true
	return v
}

// Reconcile implements backend.Reconciler. It changes the kernel at once, or if changes are
// deferred, at the next apply.
func (v *view) Reconcile(ctx context.Context, want dataplane.State, sweep bool) (dataplane.Report, error) {
	v.gone = append(v.gone, lacking(v.want, want)...)
	v.want = want
	v.changed = true
	return v.pass(ctx)
}

// Update implements backend.Reconciler. See Reconcile.
func (v *view) Update(ctx context.Context, removed, added []dataplane.Object, _ bool) (dataplane.Report, error) {
	v.gone = append(v.gone, removed...)
	v.want.Remove(removed...)
	v.want.Add(added...)
	v.changed = v.changed || len(removed)+len(added) > 0
	return v.pass(ctx)
}

// pass changes the kernel if changes are not deferred. Objects that no backend wants stay, because
// only the network knows whether both backends have named everything that they want.
func (v *view) pass(ctx context.Context) (dataplane.Report, error) {
	report := dataplane.Report{Rerouted: v.rerouted}
	v.rerouted = false
	if v.deferred {
		return report, nil
	}
	report, err := v.apply(ctx, false)
	report.Refused = slices.DeleteFunc(report.Refused, func(r dataplane.Refusal) bool { return !v.wants(r.Route) })
	return report, err
}

// sweepGone makes the next apply delete what the backends no longer want, even if it does not sweep
// everything.
func (l *layer) sweepGone() {
	l.reconciler.SweepAt(l.gone...)
	l.gone = nil
}

// apply makes the kernel match all changes since its last call. If sweep is set, objects in scope
// that no backend wants are deleted.
func (l *layer) apply(ctx context.Context, sweep bool) (report dataplane.Report, err error) {
	if sweep {
		l.gone = nil
	}
	if l.changed { // not only the differences: a migration ends, so its passes need not be cheap
		report, err = l.reconciler.Reconcile(ctx, l.merged(), sweep)
	} else {
		report, err = l.reconciler.Update(ctx, nil, nil, sweep)
	}

	l.changed = false
	for _, v := range l.views {
		v.rerouted = v.rerouted || report.Rerouted
	}
	return report, err
}

func (l *layer) merged() dataplane.State {
	s := dataplane.NewState()
	for _, v := range l.views {
		maps.Copy(s.Links, v.want.Links)
		maps.Copy(s.Addrs, v.want.Addrs)
		maps.Copy(s.Neighs, v.want.Neighs)
		maps.Copy(s.FDB, v.want.FDB)
		for r := range v.want.AllRoutes() {
			if r, ok := v.effective(r); ok {
				s.Add(r)
			}
		}
		for dst := range v.subnets {
			if r, ok := v.extra(dst); ok {
				s.Add(r)
			}
		}
	}
	return s
}

// effective returns the route that the kernel should have for one that the backend wants. ok is false
// if it should have none.
func (v *view) effective(r dataplane.Route) (_ dataplane.Route, ok bool) {
	if v.side == next && slices.Contains(v.networks, r.Dst) {
		return dataplane.Route{}, false
	}
	if r.Type != dataplane.Unicast {
		return r, true
	}
	if v.carries(r.Dst) {
		return r.AsPlain(), true // so that a probe through the other device finds the route that stands by
	}
	return r.Standby(), true
}

func (v *view) carries(dst netip.Prefix) bool {
	_, byNext := v.carried[dst]
	return byNext == (v.side == next)
}

// route returns the backend's route to the subnet of a peer, as if it carried the packets.
func (v *view) route(dst netip.Prefix) (_ dataplane.Route, ok bool) {
	for _, r := range v.want.Routes[dst] {
		if r.Type == dataplane.Unicast {
			return r, true
		}
	}
	if _, served := v.subnets[dst]; !served {
		return dataplane.Route{}, false
	}

	for _, n := range v.networks {
		if prefix.FamilyOf(n.Addr()) != prefix.FamilyOf(dst.Addr()) {
			continue
		}
		for _, wide := range v.want.Routes[n] {
			if wide.Type == dataplane.Unicast {
				return dataplane.NewRoute(dst, netip.Addr{}, wide.Dev, false), true
			}
		}
	}
	return dataplane.Route{}, false
}

// extra returns the route to dst that the layer adds for a backend with one route to the whole
// network, if it does.
func (v *view) extra(dst netip.Prefix) (_ dataplane.Route, ok bool) {
	if len(v.want.Routes[dst]) > 0 {
		return dataplane.Route{}, false
	}
	r, ok := v.route(dst)
	if ok && !v.carries(dst) {
		r = r.Standby()
	}
	return r, ok
}

// serve makes the backend serve the subnet of a peer, or stop that.
func (v *view) serve(dst netip.Prefix, serves bool) { v.put(v.subnets, dst, serves) }

// choose makes one backend carry the packets to the subnet of a peer.
func (l *layer) choose(dst netip.Prefix, side int) { l.put(l.carried, dst, side == next) }

// put makes a set contain dst, or not.
func (l *layer) put(set map[netip.Prefix]struct{}, dst netip.Prefix, contains bool) {
	if _, before := set[dst]; contains == before {
		return
	}
	l.changed = true
	if contains {
		set[dst] = struct{}{}
	} else {
		delete(set, dst)
	}
}

// wants reports whether the kernel should have r for the backend.
func (v *view) wants(r dataplane.Route) bool {
	if extra, ok := v.extra(r.Dst); ok {
		return extra == r
	}
	return slices.ContainsFunc(v.want.Routes[r.Dst], func(one dataplane.Route) bool {
		one, ok := v.effective(one)
		return ok && one == r
	})
}

// Has implements backend.Reconciler.
func (v *view) Has(o dataplane.Object) bool {
	if r, isRoute := o.(dataplane.Route); isRoute {
		r, ok := v.effective(r)
		return ok && v.reconciler.Has(r)
	}
	return v.reconciler.Has(o)
}

// Counts implements backend.Reconciler. The numbers are those of both backends.
func (v *view) Counts() map[string]dataplane.Count { return v.reconciler.Counts() }

// Changed implements backend.Reconciler. It returns nil, because the network itself receives the
// signal Changed of the common Reconciler.
func (*view) Changed() <-chan struct{} { return nil }

// Close implements backend.Reconciler. The network closes the common Reconciler.
func (*view) Close() error { return nil }

// lacking returns the neighbours, FDB entries and routes of have for which want has no successor:
// one with the same key, or a route to the same destination.
func lacking(have, want dataplane.State) (objects []dataplane.Object) {
	for key, n := range have.Neighs {
		if _, ok := want.Neighs[key]; !ok {
			objects = append(objects, n)
		}
	}

	for key, f := range have.FDB {
		if _, ok := want.FDB[key]; !ok {
			objects = append(objects, f)
		}
	}

	for r := range have.AllRoutes() {
		if len(want.Routes[r.Dst]) == 0 {
			objects = append(objects, r)
		}
	}
	return objects
}

func bestRoutes(s dataplane.State) map[netip.Prefix]dataplane.Route {
	best := map[netip.Prefix]dataplane.Route{}
	for r := range s.AllRoutes() {
		if b, ok := best[r.Dst]; r.Type == dataplane.Unicast && (!ok || r.Priority < b.Priority) {
			best[r.Dst] = r // a low metric wins
		}
	}
	return best
}
