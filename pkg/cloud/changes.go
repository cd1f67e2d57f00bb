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
	// was is the route that is replaced; zero if there is none. The call replaces all of several
	// routes. Then was is the first one that serves another host, or else the first one.
	was Route
}

// replaces reports whether the change replaces a route in place.
func (c change) replaces() bool { return c.was.Dst.IsValid() }

// changes returns the calls after which each table has a route to each subnet by target. It
// leaves a route that is right as it is, and never names a route to another destination. An
// interrupted call may have left a wrong route beside the right one.
func changes(tables []Table, subnets []netip.Prefix, target string) []change {
	var calls []change
	for _, t := range tables {
		for _, dst := range subnets {
			c := change{Route: Route{Table: t.ID, Dst: dst, Target: target, ByCall: true}}
			wrong := func(r Route) bool { return r.Dst == dst && r.replaceable() && r != c.Route }
			i := slices.IndexFunc(t.Routes, func(r Route) bool { return wrong(r) && r.serves(target) })
			if i < 0 {
				i = slices.IndexFunc(t.Routes, wrong)
			}
			if i >= 0 {
				c.was = t.Routes[i]
			}
			if i >= 0 || !slices.Contains(t.Routes, c.Route) {
				calls = append(calls, c)
			}
		}
	}
	return calls
}

// replaceable reports whether flanneld may replace and remove r, judging by r alone.
func (r Route) replaceable() bool { return r.ByCall && !r.Foreign }

// serves reports whether r leads to another host than that with the own target, as far as the cloud
// knows.
func (r Route) serves(own string) bool { return r.Target != own && !r.Lost }

// Overlap returns the first of networks that overlaps a route of the cloud itself, and that route. own
// reports whether a route is one of the cloud itself.
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

// unclaimed returns the routes in networks that no host needs: they are replaceable, and
// overlap no subnet of a lease. It does not look where they lead.
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

// hostless returns those of routes that lead to nowhere, or to a host that is not in the
// network: none of its addresses is one of present. addresses contains the hosts that are
// known, by target. A route to a target that is missing there stays.
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
