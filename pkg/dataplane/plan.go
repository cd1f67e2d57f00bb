package dataplane

import (
	"cmp"
	"fmt"
	"iter"
	"net/netip"
	"slices"

	"flanneld/pkg/prefix"
)

// Scope says what of the kernel is ours to change.
type Scope struct {
	// Devices are the names of devices of our own. What lies on them and
	// belongs to Networks is ours, whoever made it.
	Devices []string
	// Shared are the names of other devices that our routes leave by.
	Shared []string
	// Networks bound everything: an address outside is never ours, nor is a route, but
	// for a detour.
	Networks []netip.Prefix
	// TxChecksum has Link.TxChecksum of the devices read.
	TxChecksum bool
	// Connected has the routing table left alone, which may hold a million routes:
	// instead there is a route for every network that an address of the host is in.
	Connected bool
}

func (s Scope) device(name string) bool { return slices.Contains(s.Devices, name) }

// InNetworks reports whether p lies in a network of s.
func (s Scope) InNetworks(p netip.Prefix) bool {
	return slices.ContainsFunc(s.Networks, func(n netip.Prefix) bool { return prefix.Contains(n, p) })
}

// Shows reports whether a state of s has r: to a destination in the networks, or a detour on a
// device of s, wherever it leads.
func (s Scope) Shows(r Route) bool { return s.InNetworks(r.Dst) || s.isDetour(r) }

// isDetour reports whether r is a detour that was left behind. Nothing but the reconciler of
// s makes routes with our protocol number on these devices.
func (s Scope) isDetour(r Route) bool { return r.IsDetour() && s.device(r.Dev) }

// Op is one change.
type Op struct {
	Delete bool // otherwise the object is created, or replaces what has its key
	// Exclusive has a route fail with EEXIST where there is one with its destination,
	// metric and TOS.
	Exclusive bool
	Object    Object
}

// String describes the change.
func (o Op) String() string {
	switch {
	case o.Delete:
		return "delete " + o.Object.String()
	case o.Exclusive:
		return "add " + o.Object.String()
	}
	return "put " + o.Object.String()
}

// puts iterates over what ops create or replace.
func puts(ops []Op) iter.Seq[Object] {
	return func(yield func(Object) bool) {
		for _, op := range ops {
			if !op.Delete && !yield(op.Object) {
				return
			}
		}
	}
}

// Refusal is a wanted route that must not be made.
type Refusal struct {
	Route  Route
	Reason string
	Dev    string // that is directly connected, if that is the reason
}

// Changes is what separates two states.
type Changes struct {
	Ops     []Op      // in the order in which they must be applied
	Taken   []Route   // routes of others whose destination we want and take over
	Refused []Refusal // wanted routes that would cut off what is directly connected
}

// Plan returns the changes that lead from have to want.
//
// Puts come first, parents before children, and deletes follow, children
// before parents, so that nothing that stays is ever without its parent and
// no wanted destination is ever without a route. Only what would make a put
// fail goes before it. On a link that has to be replaced everything counts as
// absent. Routes outside s that are in recorded (in canonical form) are ours,
// too: we adopted them once. With sweep false nothing is deleted but what
// stands in the way of want.
func Plan(have, want State, s Scope, recorded map[Route]struct{}, sweep bool) Changes {
	p := planner{have: have, want: want, scope: s, recorded: recorded, sweep: sweep}
	p.puts = make([]Op, 0, max(0, want.size()-have.size()))
	p.links()
	p.addrs()
	planMap(&p, p.have.Neighs, p.want.Neighs, func(n Neigh) string { return n.Dev })
	planMap(&p, p.have.FDB, p.want.FDB, func(f FDB) string { return f.Dev })
	p.routes()
	slices.Reverse(p.deletes)
	ops := append(slices.Insert(p.puts, 0, p.first...), p.deletes...) // there may be thousands of puts
	return Changes{Ops: ops, Taken: p.taken, Refused: p.refused}
}

type planner struct {
	have, want State
	scope      Scope
	recorded   map[Route]struct{}
	sweep      bool
	gone       []string // links that are replaced
	first      []Op     // links, and what is in the way of puts
	puts       []Op
	deletes    []Op // parents first; reversed at the end
	taken      []Route
	refused    []Refusal
}

func (p *planner) put(o Object) { p.puts = append(p.puts, Op{Object: o}) }
func (p *planner) del(o Object) { p.deletes = append(p.deletes, Op{Delete: true, Object: o}) }

// absent reports whether what lies on dev will vanish with it.
func (p *planner) absent(dev string) bool { return slices.Contains(p.gone, dev) }

func (p *planner) links() {
	for _, name := range sortedKeys(p.want.Links) {
		w := p.want.Links[name]
		h, ok := p.have.Links[name]
		switch {
		case ok && h == w:
			continue
		case ok && !h.Compatible(w):
			p.gone = append(p.gone, name)
			p.first = append(p.first, Op{Delete: true, Object: h})
		}
		p.first = append(p.first, Op{Object: w})
	}
}

func (p *planner) addrs() {
	for a := range p.want.Addrs {
		if _, ok := p.have.Addrs[a]; !ok || p.absent(a.Dev) {
			p.put(a)
		}
	}
	for a := range p.have.Addrs {
		_, wanted := p.want.Addrs[a]
		switch {
		case wanted, p.absent(a.Dev), !p.scope.device(a.Dev), !p.scope.InNetworks(prefix.Host(a.Prefix.Addr())):
		case p.inTheWay(a):
			p.first = append(p.first, Op{Delete: true, Object: a})
		case p.sweep:
			p.del(a)
		}
	}
}

// inTheWay reports whether a keeps from its device what is wanted there. An
// IPv6 address is there once, with one prefix length. Nor is there a way
// through a gateway with an address of our own, as when the subnet that was
// ours is a peer's now.
func (p *planner) inTheWay(a Addr) bool {
	ip := a.Prefix.Addr()
	for w := range p.want.Addrs {
		if ip.Is6() && w.Dev == a.Dev && w.Prefix.Addr() == ip {
			return true
		}
	}
	for r := range p.want.AllRoutes() {
		if r.Gateway == ip {
			return true
		}
	}
	return false
}

// object is a value that knows its own key.
type object interface {
	comparable
	Object
}

// planMap plans objects of which a device has at most one with a given key.
func planMap[K comparable, V object](p *planner, have, want map[K]V, dev func(V) string) {
	for k, w := range want {
		if h, ok := have[k]; !ok || h != w || p.absent(dev(w)) {
			p.put(w)
		}
	}
	for k, h := range have {
		if _, ok := want[k]; !ok && p.sweep && p.scope.device(dev(h)) && !p.absent(dev(h)) {
			p.del(h)
		}
	}
}

// routes compares by destination first: a destination that is wanted belongs
// to the wanted route alone, whatever metric or TOS its twins have.
func (p *planner) routes() {
	for w := range p.want.AllRoutes() {
		p.destination(w, p.standing(p.have.Routes[w.Dst]))
	}
	for dst, have := range p.have.Routes {
		if len(p.want.Routes[dst]) == 0 {
			p.sweepRoutes(p.standing(have))
		}
	}
}

// standing leaves out the routes that go with their link.
func (p *planner) standing(routes []Route) []Route {
	if len(p.gone) == 0 {
		return routes
	}
	return slices.DeleteFunc(slices.Clone(routes), func(r Route) bool { return r.Dev != "" && p.absent(r.Dev) })
}

// sweepRoutes deletes those of routes that are ours. A detour goes without a sweep: it leads
// the packets to a host into the tunnel to that host.
func (p *planner) sweepRoutes(routes []Route) {
	for _, r := range routes {
		if p.sweep && p.owns(r) || p.scope.isDetour(r) {
			p.del(r)
		}
	}
}

// destination plans the one route that is wanted to w.Dst, given all that are
// there.
func (p *planner) destination(w Route, have []Route) {
	if w.Type == Blackhole { // it is the last resort: other routes are judged as if it were not wanted
		isHole := func(h Route) bool { return h.Type == Blackhole }
		p.sweepRoutes(slices.DeleteFunc(slices.Clone(have), isHole))
		have = slices.DeleteFunc(slices.Clone(have), func(h Route) bool { return !isHole(h) })
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
		// A put may fail, and may replace one of these, the kernel decides
		// which: they go in the pass that sees the wanted route in place.
		if i >= 0 {
			p.del(h)
		}
	}
}

// owns reports whether r is ours to delete.
func (p *planner) owns(r Route) bool {
	if r.Protocol == protoKernel || !p.scope.Shows(r) {
		return false
	}
	if r.Protocol == Protocol || p.scope.device(r.Dev) {
		return true
	}
	_, ok := p.recorded[r.canonical()]
	return ok
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
