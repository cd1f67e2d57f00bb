// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// change is a call that puts a route.
type change struct {
	Route
	// was is the route that the call replaces; zero if it replaces none. If the call replaces several
	// routes, was is the first of them that serves another host, or the first one if none does.
	was Route
}

// replaces reports whether the change replaces a route in place.
func (c change) replaces() bool { return c.was.Dst.IsValid() }

// want is a route that each table should have.
type want struct {
	Dst    netip.Prefix
	Target string
	// Other is set if the target is another host. A lost route to this target then counts as right, because
	// the host does not run, and a new route would be lost too.
	Other bool
}

// in returns the wanted route of a table.
func (w want) in(table string) Route {
	return Route{Table: table, Dst: w.Dst, Target: w.Target, ByCall: true}
}

// fulfils reports whether r needs no change for w.
func (r Route) fulfils(w want) bool {
	if w.Other {
		r.Lost = false
	}
	return r == w.in(r.Table)
}

// changes returns the calls after which each table has the wanted routes. There is no call for a route
// that is right, or for a route to another destination. A wrong route beside the right one needs a call,
// which removes the wrong route. An interrupted call may have left both.
func changes(tables []Table, wanted []want) []change {
	var calls []change
	for _, t := range tables {
		present := map[netip.Prefix][]Route{}
		for _, r := range t.Routes {
			present[r.Dst] = append(present[r.Dst], r)
		}
		for _, w := range wanted {
			c, have := change{Route: w.in(t.ID)}, present[w.Dst]
			wrong := func(r Route) bool { return r.replaceable() && !r.fulfils(w) }
			i := slices.IndexFunc(have, func(r Route) bool { return wrong(r) && r.serves(w.Target) })
			if i < 0 {
				i = slices.IndexFunc(have, wrong)
			}
			if i >= 0 {
				c.was = have[i]
			}
			if i >= 0 || !slices.ContainsFunc(have, func(r Route) bool { return r.fulfils(w) }) {
				calls = append(calls, c)
			}
		}
	}
	return calls
}

// replaceable reports whether flanneld may replace and remove r, judging by r alone.
func (r Route) replaceable() bool { return r.ByCall && !r.Foreign }

// serves reports whether r carries packets to another target than the wanted one: it does not lead to
// the wanted target, and is not lost.
func (r Route) serves(wanted string) bool { return r.Target != wanted && !r.Lost }

// Overlap returns the first route of the cloud itself that overlaps one of networks, and that network. own
// must report whether the cloud itself has made a route. found is false if no such route overlaps.
func Overlap(tables []Table, networks []netip.Prefix, own func(Route) bool) (network netip.Prefix, r Route, found bool) {
	for _, t := range tables {
		for _, r := range t.Routes {
			for _, n := range networks {
				if own(r) && r.Dst.Overlaps(n) {
					return n, r, true
				}
			}
		}
	}
	return netip.Prefix{}, Route{}, false
}

// unclaimed returns the routes in networks that no lease needs: they are replaceable, and leased
// reports false for their destinations. It does not look where they lead.
func unclaimed(tables []Table, networks []netip.Prefix, leased func(netip.Prefix) bool) []Route {
	var routes []Route
	for _, t := range tables {
		for _, r := range t.Routes {
			inside := slices.ContainsFunc(networks, func(n netip.Prefix) bool { return prefix.Contains(n, r.Dst) })
			if inside && r.replaceable() && !leased(r.Dst) {
				routes = append(routes, r)
			}
		}
	}
	return routes
}

// hostless returns the routes that are lost, or that lead to a host outside of the network.
// present reports whether an address belongs to a host of the network. addresses contains the
// addresses of the known hosts, by target. A route to an unknown target is not returned, unless
// it is lost.
func hostless(routes []Route, addresses map[string][]netip.Addr, present func(netip.Addr) bool) []Route {
	var gone []Route
	for _, r := range routes {
		host, known := addresses[r.Target]
		if r.Lost || known && !slices.ContainsFunc(host, present) {
			gone = append(gone, r)
		}
	}
	return gone
}
