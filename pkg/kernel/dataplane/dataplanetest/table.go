// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"net/netip"
	"slices"
	"syscall"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

const protoKernel = 2

// table is a routing table. Routes to one destination are in the order in which the
// kernel visits them: by metric, then by age.
type table []dataplane.Route

func (t *table) insert(r dataplane.Route) {
	i := slices.IndexFunc(*t, func(have dataplane.Route) bool { return have.Dst == r.Dst && have.Priority > r.Priority })
	if i < 0 {
		i = len(*t)
	}
	*t = slices.Insert(*t, i, r)
}

// append adds r after the routes with the same key. It returns EEXIST if an equal route
// exists, or if routes use the nexthop object of r with another gateway or device.
func (t *table) append(r dataplane.Route) error {
	if slices.ContainsFunc(*t, func(have dataplane.Route) bool {
		return sameKey(have, r) && sameHop(have, r) || r.NexthopID != 0 && have.NexthopID == r.NexthopID && (have.Gateway != r.Gateway || have.Dev != r.Dev)
	}) {
		return syscall.EEXIST // a nexthop object describes one gateway on one device
	}
	t.insert(r)
	return nil
}

// sameKey reports whether a put of b can replace a. The kernel ignores the type. For IPv6 it
// also ignores the TOS, which is 0 in all IPv6 routes of the tests.
func sameKey(a, b dataplane.Route) bool {
	return a.Dst == b.Dst && a.Priority == b.Priority && a.TOS == b.TOS
}

func sameHop(a, b dataplane.Route) bool {
	return a.Gateway == b.Gateway && a.Dev == b.Dev && a.Type == b.Type && a.NexthopID == b.NexthopID &&
		a.Multipath == b.Multipath && (a.Protocol == b.Protocol && a.MTU == b.MTU || a.Dst.Addr().Is6())
}

// ecmp reports whether the kernel makes an IPv6 route a next hop of another such route with
// the same metric, if there is one.
func ecmp(r dataplane.Route) bool {
	return r.Dst.Addr().Is6() && r.Type == dataplane.Unicast && r.Gateway.IsValid() && r.NexthopID == 0
}

// replace replaces the first of the routes with r's key by r, or adds r if there is none.
// For IPv4 it does nothing if an equal route exists. For IPv6 it prefers a route for which
// ecmp returns the same as for r. If ecmp is true for the replaced route, replace also
// deletes the other routes with the key for which it is true: they are the next hops of one
// multipath route.
func (t *table) replace(r dataplane.Route) {
	var found []int
	for i, have := range *t {
		if sameKey(have, r) {
			found = append(found, i)
		}
	}
	if len(found) == 0 {
		t.insert(r)
		return
	}

	first := found[0]
	if r.Dst.Addr().Is4() {
		// If one of the routes with the same key is equal to r, the table does not change. If that route is
		// not the first of them, a real kernel answers the request with EEXIST. Kernel of pkg/kernel/dataplane/linux
		// ignores this error.
		if !slices.ContainsFunc(found, func(i int) bool { return sameHop((*t)[i], r) }) {
			(*t)[first] = r
		}
		return
	}
	if i := slices.IndexFunc(found, func(i int) bool { return ecmp((*t)[i]) == ecmp(r) }); i >= 0 {
		first = found[i]
	}

	siblings := ecmp((*t)[first])
	(*t)[first] = r
	for _, i := range slices.Backward(found) {
		if siblings && i != first && ecmp((*t)[i]) {
			*t = slices.Delete(*t, i, i+1)
		}
	}
}

// remove removes the first route that matches r. For IPv6 the kernel compares metric and
// next hop. It does not compare the next hop of an IPv6 route through a nexthop object. For
// IPv4 it also compares TOS and type. If r is an IPv6 multipath route, remove removes all
// of its next hops.
func (t *table) remove(r dataplane.Route) {
	match := func(have dataplane.Route) bool {
		switch {
		case have.Dst != r.Dst || r.Protocol != 0 && have.Protocol != r.Protocol,
			r.Priority != 0 && have.Priority != r.Priority,
			r.Dst.Addr().Is4() && (have.TOS != r.TOS || have.Type != r.Type):
			return false
		case r.NexthopID != 0:
			return have.NexthopID == r.NexthopID
		case have.NexthopID != 0 && r.Dst.Addr().Is6():
			return true
		case r.Multipath:
			return have.NexthopID == 0
		}
		return have.NexthopID == 0 && !have.Multipath && (r.Dev == "" || have.Dev == r.Dev) &&
			(have.Gateway == r.Gateway || !r.Gateway.IsValid() && r.Dst.Addr().Is4())
	}

	i := slices.IndexFunc(*t, match)
	if i < 0 {
		return
	}
	if gone := (*t)[i]; r.Multipath && ecmp(gone) {
		*t = slices.DeleteFunc(*t, func(have dataplane.Route) bool { return sameKey(have, gone) && ecmp(have) })
		return
	}
	*t = slices.Delete(*t, i, i+1)
}

func (t *table) removeDev(dev string) {
	*t = slices.DeleteFunc(*t, func(r dataplane.Route) bool { return r.Dev == dev })
}

// reaches reports whether the table has a route to ip through dev without a gateway.
func (t table) reaches(dev string, ip netip.Addr) bool {
	return slices.ContainsFunc(t, func(r dataplane.Route) bool {
		return r.Dev == dev && !r.Gateway.IsValid() && r.Type == dataplane.Unicast && r.Dst.Contains(ip)
	})
}

// shown returns the routes in the form of a dump, in which IPv6 routes with the same key
// are one multipath route. The kernel continues after the last of them, so it leaves out
// routes in between.
func (t table) shown() []dataplane.Route {
	var all []dataplane.Route
	last := map[dataplane.RouteKey]int{} // index of the last next hop
	for i, r := range t {
		if ecmp(r) {
			last[r.RouteKey] = i
		}
	}

	until := map[netip.Prefix]int{} // index of the last route to leave out
	for i, r := range t {
		if end, hidden := until[r.Dst]; hidden && i <= end {
			continue
		}
		if end := last[r.RouteKey]; ecmp(r) && end > i {
			until[r.Dst] = end
			r = dataplane.Route{RouteKey: r.RouteKey, Multipath: true, Protocol: r.Protocol}
		}
		all = append(all, r)
	}
	return all
}
