// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// repaired returns a case that changes the objects of a peer, or adds duplicates, in one way. One pass
// without sweep must repair that.
func repaired(name string, change func(*fixture)) contractCase {
	return contractCase{"repaired: " + name, func(f *fixture) {
		want := state(dataplanetest.Base(), dataplanetest.Peer(3, 0)...)
		f.reconcile(want, true)
		change(f)
		f.repair(want)
		f.expect(want)
	}}
}

func driftCases() (cases []contractCase) {
	add := func(name string, change func(*fixture)) { cases = append(cases, repaired(name, change)) }

	add("FDB entries with their own port", func(f *fixture) {
		for _, e := range peer[dataplane.FDB](3, 0) {
			e.Override = true
			f.must(f.Append(e))
			if f.read().FDB[e.FDBKey] != e {
				f.Errorf("%s: Override is false, want true", e)
			}
		}
	})

	add("FDB entries with another destination", func(f *fixture) {
		for i, e := range peer[dataplane.FDB](3, 0) {
			e.Dst = peer[dataplane.FDB](3, 1)[i].Dst
			f.must(f.Append(e))
		}
	})

	add("neighbours with another MAC", func(f *fixture) {
		f.must(f.Append(objects(peer[dataplane.Neigh](3, 1))...))
	})
	add("deleted neighbours, FDB entries and routes", func(f *fixture) {
		f.must(f.Remove(dataplanetest.Peer(3, 0)...))
	})

	add("addresses with another length", func(f *fixture) {
		for a := range dataplanetest.Base().Addrs {
			f.must(f.Remove(a))
			if a.Prefix.Addr().Is6() { // a device may have an IPv4 address twice, with two prefix lengths
				f.must(f.Append(dataplane.Addr{Dev: a.Dev, Prefix: netip.PrefixFrom(a.Prefix.Addr(), 64)}))
			}
		}
	})

	for name, duplicate := range duplicates() {
		add("routes with a duplicate: "+name, func(f *fixture) {
			for _, r := range directRoutes(3, 9) {
				if duplicate(&r) {
					f.must(f.Append(r))
				}
			}
		})

		add("routes replaced by: "+name, func(f *fixture) {
			f.must(f.Remove(objects(peer[dataplane.Route](3, 0))...))
			for _, r := range directRoutes(3, 9) {
				if duplicate(&r) {
					f.must(f.Append(r))
				}
			}
		})
	}

	add("routes with three duplicates", func(f *fixture) {
		for n := range 3 {
			f.must(f.Append(objects(ofOther(protoStatic, directRoutes(3, 10+n)))...))
		}
	})

	add("the wanted route is the last of its duplicates", func(f *fixture) {
		f.must(f.Remove(objects(peer[dataplane.Route](3, 0))...))
		f.must(f.Append(objects(directRoutes(3, 9))...))
		f.must(f.Append(directRoutes(3, 10)[0]))
		// Not for IPv6: the kernel refuses a route if other routes lead to its gateway.
		f.must(f.Append(peer[dataplane.Route](3, 0)[0]))
	})

	add("an IPv6 route replaced by two of other programs with its metric, one of another type", func(f *fixture) {
		// The put replaces one of the two routes. The kernel chooses which one.
		other := directRoutes(3, 9)[1]
		other.NexthopID = 47
		other.Protocol = protoStatic
		f.must(f.Remove(peer[dataplane.Route](3, 0)[1]))
		f.must(f.Append(unreachableLike(other), other))
	})

	add("two IPv4 duplicates through one device, one of them without a gateway", func(f *fixture) {
		// A delete request without a gateway matches IPv4 routes with any gateway. So
		// deleting the second route deletes the first.
		r := directRoutes(3, 9)[0]
		r.Protocol = protoStatic
		f.must(f.Append(r))
		r.Gateway = netip.Addr{}
		f.must(f.Append(r))
	})

	add("an IPv6 route with two duplicates, one through a nexthop object, one unreachable", func(f *fixture) {
		// A route through a nexthop object matches a delete request with any next hop. So
		// deleting the unreachable route deletes the other route.
		other := directRoutes(3, 9)[1]
		other.NexthopID = 47
		other.Protocol = protoStatic
		f.must(f.Append(other, unreachableLike(other)))
	})
	return cases
}

// kernelDriftCases returns such cases, and others, for a real kernel.
func kernelDriftCases() []contractCase {
	cases := append(exitCases(),
		contractCase{"a route changed in place is replaced without a gap", changedInPlace},
		contractCase{"a gateway that is not another host", noOtherHost})
	add := func(name string, change func(*fixture)) { cases = append(cases, repaired(name, change)) }

	add("neighbours that are not permanent", func(f *fixture) {
		for _, n := range peer[dataplane.Neigh](3, 0) {
			f.must(f.Learn(n))
			if _, ok := f.read().Neighs[n.NeighKey]; ok {
				f.Errorf("%s was read, although it is not permanent", n)
			}
		}
	})

	add("routes changed in place to another MTU", func(f *fixture) {
		for _, r := range peer[dataplane.Route](3, 0) {
			r.MTU = 1300
			f.must(f.Change(r))
		}
	})

	add("an IPv6 multipath route replaced, with another route between its next hops", func(f *fixture) {
		// A dump of the kernel leaves out the route between the next hops.
		first := directRoutes(3, 9)[1]
		hidden := directRoutes(3, 9)[1]
		last := directRoutes(3, 10)[1]
		hidden.Gateway = netip.Addr{}
		f.must(f.Remove(peer[dataplane.Route](3, 0)[1]))
		f.must(f.Append(first, hidden, last))
		if have := f.read().Routes[first.Dst]; len(have) != 1 || !have[0].Multipath {
			f.Errorf("the routes are %v, want only the multipath route", have)
		}
	})
	return cases
}

// duplicateCases returns cases in which the kernel may apply a delete to a duplicate of the
// route.
func duplicateCases() []contractCase {
	return []contractCase{
		{"an IPv6 route without a gateway, and an unreachable one behind it", unreachableBehind},
		{"an adopted IPv6 route through a nexthop object, and a duplicate", adoptedDuplicate},
		{"a duplicate that differs only by its nexthop object", nexthopDuplicate},
	}
}

// changedInPlace checks that the Reconciler deletes nothing when another program has changed the attributes
// of a route: the kernel announces the new route, but not that the old one is gone.
func changedInPlace(f *fixture) {
	want := state(dataplanetest.Base(), dataplanetest.Peer(3, 0)...)
	f.reconcile(want, true)
	for _, r := range peer[dataplane.Route](3, 0) {
		r.MTU = 1300
		f.must(f.Change(r))
	}
	f.spy.Take()
	f.repair(want)
	f.expect(want)
	f.expectPuts()
}

// unreachableLike returns an unreachable route with the key of r.
func unreachableLike(r dataplane.Route) dataplane.Route {
	hole := dataplane.Route{RouteKey: r.RouteKey, Protocol: r.Protocol}
	hole.Type = dataplane.Unreachable
	return hole
}

func unreachableBehind(f *fixture) {
	own := dataplane.NewRoute(subnet6(3), netip.Addr{}, dev6, false)
	want := state(dataplanetest.Base(), own)
	f.reconcile(want, true)
	f.must(f.Append(unreachableLike(own))) // a request to delete the unreachable route deletes own
	f.reconcile(want, true)
	f.expect(want)
}

func adoptedDuplicate(f *fixture) {
	want := state(dataplanetest.Base(), dataplanetest.Peer(3, 0)...)
	f.reconcile(want, true)
	own := peer[dataplane.Route](3, 0)[1]
	duplicate := directRoutes(3, 9)[1]
	f.must(f.Remove(own))
	theirs := own
	theirs.NexthopID = 47
	theirs.Protocol = protoStatic
	duplicate.Protocol = protoStatic
	f.must(f.Append(theirs))
	f.reconcile(want, true)
	f.must(f.Append(duplicate)) // a request to delete the duplicate deletes theirs
	f.reconcile(want, true)
	if have := f.read().Routes[own.Dst]; len(have) != 1 || canonical(have[0]) != canonical(own) {
		f.Errorf("the routes to %s are %v, want one that forwards like %s", own.Dst, have, own)
	}
}

func nexthopDuplicate(f *fixture) {
	want := state(dataplanetest.Base(), dataplanetest.Peer(3, 0)...)
	f.reconcile(want, true)
	for i, r := range peer[dataplane.Route](3, 0) {
		r.NexthopID = uint32(47 + i)
		f.must(f.Append(r))
	}
	f.reconcile(want, true)
	f.reconcile(dataplanetest.Base(), true)
	f.expect(dataplanetest.Base())
}

func peer[T dataplane.Object](i, variant int) []T {
	var found []T
	for _, o := range dataplanetest.Peer(i, variant) {
		if o, ok := o.(T); ok {
			found = append(found, o)
		}
	}
	return found
}

// duplicates returns functions that change a route so that it can be added beside the
// original, by the name of the change. A function returns false if the family of the route
// does not allow that.
func duplicates() map[string]func(*dataplane.Route) bool {
	unreachable := func(r *dataplane.Route) bool {
		r.Type = dataplane.Unreachable
		r.Gateway = netip.Addr{}
		r.Dev = ""
		return true
	}
	return map[string]func(*dataplane.Route) bool{
		"ours":    func(*dataplane.Route) bool { return true },
		"foreign": func(r *dataplane.Route) bool { r.Protocol = protoStatic; return true },
		"MTU":     func(r *dataplane.Route) bool { r.MTU = 1300; return true },
		"metric":  func(r *dataplane.Route) bool { r.Priority = 77; return true },
		"TOS":     func(r *dataplane.Route) bool { r.TOS = 8; return r.Dst.Addr().Is4() },
		"multipath": func(r *dataplane.Route) bool {
			r.Gateway = netip.Addr{}
			r.Dev = ""
			r.Multipath = true
			return true
		},
		"no gateway":     func(r *dataplane.Route) bool { r.Gateway = netip.Addr{}; return true },
		"nexthop object": func(r *dataplane.Route) bool { r.NexthopID = 40 + uint32(r.Dst.Bits()); return true },
		"unreachable":    func(r *dataplane.Route) bool { return r.Dst.Addr().Is6() && unreachable(r) },
		"unreachable with a metric": func(r *dataplane.Route) bool {
			r.Priority = 77
			return unreachable(r)
		},
	}
}
