// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"maps"
	"slices"
)

// Changes are the differences between two states.
type Changes struct {
	Ops     []Op      // in the order in which they must be applied
	Taken   []Route   // routes of other programs that the wanted routes replace
	Refused []Refusal // wanted routes that would make a directly connected network unreachable
}

// Plan returns the changes that lead from have to want.
//
// The order guarantees that no remaining object is ever without its parent, which is an
// object that it needs, such as the link of an address. Unless a link must be replaced, a
// wanted destination that has a route is never without one. Puts come first, parents before
// children. Deletes follow, children before parents. A delete comes earlier only if a put
// would fail without it.
//
// If a link must be replaced, Plan deletes it first, and treats all objects on it as
// absent. dropped contains routes in canonical form, and may be nil. They belong to
// flanneld even if another program created them, because an earlier Reconcile adopted them.
// If sweep is false, Plan deletes only objects that conflict with want, and detours that
// were left behind. It never deletes a link that is not wanted.
func Plan(have, want State, s Scope, dropped map[Route]struct{}, sweep bool) Changes {
	p := planner{have: have, want: want, scope: s, dropped: dropped, sweep: sweep}
	p.puts = make([]Op, 0, max(0, want.len()-have.len()))
	p.links()
	p.addrs()
	planMap(&p, p.have.Neighs, p.want.Neighs)
	planMap(&p, p.have.FDB, p.want.FDB)
	p.routes()
	slices.Reverse(p.deletes)
	return Changes{Ops: append(slices.Insert(p.puts, 0, p.first...), p.deletes...), Taken: p.taken, Refused: p.refused}
}

type planner struct {
	have, want State
	scope      Scope
	dropped    map[Route]struct{}
	sweep      bool
	replaced   []string // links that must be replaced
	first      []Op     // links, and deletes without which a put would fail
	puts       []Op
	deletes    []Op // parents first; Plan reverses them
	taken      []Route
	refused    []Refusal
}

func (p *planner) put(o Object) { p.puts = append(p.puts, Op{Object: o}) }
func (p *planner) del(o Object) { p.deletes = append(p.deletes, Op{Delete: true, Object: o}) }

func (p *planner) isReplaced(dev string) bool { return slices.Contains(p.replaced, dev) }

func (p *planner) links() {
	for _, name := range slices.Sorted(maps.Keys(p.want.Links)) {
		w := p.want.Links[name]
		h, ok := p.have.Links[name]
		if h.same(w) {
			continue
		}
		if ok && !h.Compatible(w) {
			p.replaced = append(p.replaced, name)
			p.first = append(p.first, Op{Delete: true, Object: h})
		}
		p.first = append(p.first, Op{Object: w})
	}
}

func (p *planner) addrs() {
	for a := range p.want.Addrs {
		if _, ok := p.have.Addrs[a]; !ok || p.isReplaced(a.Dev) {
			p.put(a)
		}
	}

	for a := range p.have.Addrs {
		if _, wanted := p.want.Addrs[a]; wanted || p.isReplaced(a.Dev) || !a.belongsTo(p.scope) {
			continue
		}
		if p.inTheWay(a) {
			p.first = append(p.first, Op{Delete: true, Object: a})
		} else if p.sweep {
			p.del(a)
		}
	}
}

// inTheWay reports whether a must be deleted before the wanted objects can be created.
func (p *planner) inTheWay(a Addr) bool {
	// The kernel stores an IPv6 address of a device once, with one prefix length.
	ip := a.Prefix.Addr()
	for w := range p.want.Addrs {
		if ip.Is6() && w.Dev == a.Dev && w.Prefix.Addr() == ip {
			return true
		}
	}

	// It refuses a gateway that is an address of this host. The host's previous subnet may belong to a
	// peer now.
	for r := range p.want.AllRoutes() {
		if r.Gateway == ip {
			return true
		}
	}
	return false
}

type object interface {
	comparable
	Object
}

// planMap plans neighbours or FDB entries.
func planMap[K comparable, V object](p *planner, have, want map[K]V) {
	for k, w := range want {
		if have[k] != w || p.isReplaced(w.Device()) {
			p.put(w)
		}
	}
	for k, h := range have {
		if _, ok := want[k]; !ok && p.sweep && p.scope.device(h.Device()) && !p.isReplaced(h.Device()) {
			p.del(h)
		}
	}
}

// routes plans the routes of each destination. The wanted routes replace all others to the
// same destination, for any metric and TOS. During a migration a destination has more than
// one wanted route, each with its own metric.
func (p *planner) routes() {
	for dst, wanted := range p.want.Routes {
		have := p.remaining(p.have.Routes[dst])
		for i, w := range wanted {
			p.destination(w, candidates(have, wanted, i))
		}
	}
	for dst, have := range p.have.Routes {
		if len(p.want.Routes[dst]) == 0 {
			p.sweepRoutes(p.remaining(have))
		}
	}
}

// candidates returns those of have that the plan for the route wanted[i] handles: those with its
// metric, the kernel's own, because of which it is refused, and, for the first wanted route, those that
// belong to none. All are routes to one destination.
func candidates(have, wanted []Route, i int) []Route {
	if len(wanted) == 1 {
		return have // the usual case, without a copy
	}
	return slices.DeleteFunc(slices.Clone(have), func(h Route) bool {
		belongsTo := slices.IndexFunc(wanted, func(w Route) bool { return w.Priority == h.Priority })
		return h.Protocol != protoKernel && max(belongsTo, 0) != i
	})
}

// remaining returns the routes that do not disappear with a replaced link.
func (p *planner) remaining(routes []Route) []Route {
	if len(p.replaced) == 0 {
		return routes
	}
	return slices.DeleteFunc(slices.Clone(routes), func(r Route) bool { return p.isReplaced(r.Dev) })
}

func (p *planner) sweepRoutes(routes []Route) {
	for _, r := range routes {
		// A detour goes in any case: it sends the packets to a host into the tunnel to that host.
		if p.sweep && p.owns(r) || p.scope.isDetour(r) {
			p.del(r)
		}
	}
}

// destination plans the wanted route w. have are the candidates for it.
func (p *planner) destination(w Route, have []Route) {
	if w.Type == Unreachable { // it is the last resort, so other routes are handled as if it were not wanted
		isUnreachable := func(h Route) bool { return h.Type == Unreachable }
		p.sweepRoutes(slices.DeleteFunc(slices.Clone(have), isUnreachable))
		have = slices.DeleteFunc(slices.Clone(have), func(h Route) bool { return !isUnreachable(h) })
	}

	for _, h := range have {
		if h.Protocol == protoKernel {
			p.refused = append(p.refused, Refusal{Route: w, Reason: fmt.Sprintf("%s is directly connected to %s", w.Dst, h.Dev), Dev: h.Dev})
			p.sweepRoutes(have)
			return
		}
	}

	i := slices.IndexFunc(have, func(h Route) bool { return h.same(w) })
	if i < 0 {
		p.put(w)
	}

	for j, h := range have {
		if j == i {
			continue
		}
		if !p.owns(h) {
			p.taken = append(p.taken, h)
		}

		// Delete the other routes only in a pass that finds the wanted route in place. The
		// put may fail, and it may replace one of these routes: the kernel chooses which.
		if i >= 0 {
			p.del(h)
		}
	}
}

func (p *planner) owns(r Route) bool {
	if r.Protocol == protoKernel || !p.scope.Shows(r) {
		return false
	}
	if r.Protocol == Protocol || p.scope.device(r.Dev) {
		return true
	}
	_, dropped := p.dropped[r.canonical()]
	return dropped || slices.ContainsFunc(p.want.Routes[r.Dst], func(w Route) bool { return w.canonical() == r.canonical() })
}
