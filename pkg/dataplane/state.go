// Package dataplane holds the kernel to what it should hold: State describes
// links, addresses, neighbours, FDB entries and routes, Plan says what
// separates two states, and a Reconciler makes it so through a Kernel. But
// for that interface the package is pure.
package dataplane

import (
	"encoding/hex"
	"fmt"
	"iter"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"

	"flanneld/pkg/prefix"
)

// MAC is an Ethernet address.
type MAC [6]byte

// ParseMAC reads the form aa:bb:cc:dd:ee:ff, in either case.
func ParseMAC(s string) (MAC, error) {
	hw, err := net.ParseMAC(s)
	if err != nil || len(hw) != 6 {
		return MAC{}, fmt.Errorf("%q is not an Ethernet address (want aa:bb:cc:dd:ee:ff)", s)
	}
	return MAC(hw), nil
}

// String returns the form aa:bb:cc:dd:ee:ff.
func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// IsUnicast reports whether m can be the address of one station: neither a
// group address nor zero.
func (m MAC) IsUnicast() bool { return m != MAC{} && m[0]&1 == 0 }

// Link is a network device of ours.
type Link struct {
	Name   string
	Kind   string // as rtnetlink names it; of those that are not named below only deletes are possible
	MAC    MAC    // zero on devices without Ethernet addresses
	MTU    int    // bytes
	Up     bool
	VXLAN  VXLAN  // zero unless Kind is KindVXLAN
	Tunnel Tunnel // zero unless Kind is KindIPIP or KindIP6Tnl
	// TxChecksum is who computes the checksums of what the device sends. A
	// read leaves it out unless Scope.TxChecksum is set.
	TxChecksum Offload
}

// The kinds of link that can be wanted.
const (
	KindVXLAN  = "vxlan"
	KindIPIP   = "ipip"   // IPv4 in IPv4
	KindIP6Tnl = "ip6tnl" // IPv6 in IPv6
	// KindWireGuard is a device whose keys and peers are its backend's matter.
	KindWireGuard = "wireguard"
	// KindTUN is one whose packets go through a process. It has to be there: it is
	// changed, and not made.
	KindTUN = "tun"
)

// ours reports whether l is of a kind that we make.
func (l Link) ours() bool {
	return slices.Contains([]string{KindVXLAN, KindIPIP, KindIP6Tnl, KindWireGuard, KindTUN}, l.Kind)
}

// Offload says whether a device may leave work to the hardware below it.
type Offload uint8

// The values of Offload.
const (
	OffloadAuto Offload = iota // as the kernel has it
	OffloadOn
	OffloadOff
)

// VXLAN holds the parameters of a vxlan device.
type VXLAN struct {
	VNI      int
	Port     int        // UDP destination port
	Local    netip.Addr // outer source address
	Underlay string     // name of the device below
	Learning bool
	GBP      bool
	// Foreign is set on devices that also do what ours never do: a default
	// remote or group, external (metadata) mode, proxy, miss notifications.
	Foreign bool
}

// Tunnel holds the parameters of an ipip or ip6tnl device without a remote
// address: packets go to the gateways of the routes that lead into it.
type Tunnel struct {
	Local netip.Addr // outer source address
	FOU   FOU
	// Foreign is set on devices that are not as ours are: with a remote address, in
	// external (metadata) mode, in another encapsulation, for other protocols,
	// with an encapsulation limit.
	Foreign bool
}

// FOU is the UDP header that an ipip device puts before the packet that it
// carries ("foo over UDP"). The zero FOU means none.
type FOU struct {
	Source, Destination uint16 // UDP ports
	Checksum            bool   // of the datagrams; without, theirs is zero
}

// Compatible reports whether l can become want without being replaced. Local
// address, underlay device, learning, MTU and MAC can change in place; the
// family of the local address, IPv4 if there is none, and the UDP header of a
// tunnel cannot.
func (l Link) Compatible(want Link) bool {
	a, b := l.VXLAN, want.VXLAN
	return l.Kind == want.Kind && a.VNI == b.VNI && a.Port == b.Port && a.GBP == b.GBP && a.Foreign == b.Foreign &&
		a.Local.Is6() == b.Local.Is6() && l.Tunnel.Foreign == want.Tunnel.Foreign &&
		l.Tunnel.FOU == want.Tunnel.FOU
}

// Addr is an address on a device, with its prefix length; host bits are kept.
type Addr struct {
	Dev    string
	Prefix netip.Prefix
}

// NeighKey identifies a permanent neighbour entry.
type NeighKey struct {
	Dev string
	IP  netip.Addr
}

// Neigh is a permanent neighbour (ARP or NDP) entry.
type Neigh struct {
	NeighKey
	MAC MAC
}

// FDBKey identifies a permanent entry of a vxlan device's forwarding database.
type FDBKey struct {
	Dev string
	MAC MAC
}

// FDB is a permanent entry of a vxlan device's forwarding database.
type FDB struct {
	FDBKey
	Dst netip.Addr // where the VTEP is
	// Override is set on entries with a port, VNI or interface of their own.
	Override bool
}

// RouteType is the kernel's route type (RTN_*).
type RouteType uint8

// The route types that Plan asks for.
const (
	Unicast   RouteType = 1
	Blackhole RouteType = 6
)

// Protocol is the route-protocol number (rtm_protocol) that marks our routes;
// dist/rt_protos.d gives it a name for ip(8).
const Protocol = 98

// Route protocols of others that matter here.
const protoKernel = 2

// MainTable is the routing table that all routes go to.
const MainTable = 254

// RouteKey is what mostly tells routes of one table apart. It does not single
// a route out: IPv4 duplicates and IPv6 ECMP siblings share a key, and a put
// replaces a route of another type, too.
type RouteKey struct {
	Dst      netip.Prefix
	Priority int // metric; IPv6 routes without one have 1024
	TOS      uint8
	Type     RouteType
}

// Route is an entry of the main table.
type Route struct {
	RouteKey
	Gateway  netip.Addr // invalid if there is none
	Dev      string     // empty for types without a device
	OnLink   bool
	Protocol uint8
	// Multipath is set on routes with several next hops, or with parts that
	// Route does not describe; they equal no wanted route.
	Multipath bool
	// NexthopID is the nexthop object that the route goes through, if any.
	NexthopID uint32
}

// NewRoute returns the unicast route to dst through gateway as the kernel
// will show it.
func NewRoute(dst netip.Prefix, gateway netip.Addr, dev string, onLink bool) Route {
	r := Route{RouteKey: RouteKey{Dst: dst, Type: Unicast}, Gateway: gateway, Dev: dev, OnLink: onLink, Protocol: Protocol}
	if prefix.FamilyOf(dst.Addr()) == prefix.IPv6 {
		r.Priority = 1024
	}
	return r
}

// detourMetric is that of detours. Nothing else uses it on our devices.
const detourMetric = 1

// NewDetour returns a route to a gateway alone through dev. A Kernel that needs one to make
// another route removes it in the same step, so one that is found was left behind.
func NewDetour(gateway netip.Addr, dev string) Route {
	r := NewRoute(prefix.Host(gateway), netip.Addr{}, dev, false)
	r.Priority = detourMetric
	return r
}

// IsDetour reports whether r is as NewDetour makes it, for any device.
func (r Route) IsDetour() bool { return r == NewDetour(r.Dst.Addr(), r.Dev) }

// lastResort is the metric of blackhole routes: higher than that of any other
// route, so that a bridge or a pod with addresses of the subnet comes first
// whoever was there first.
const lastResort = 1 << 30

// NewBlackhole returns the route that drops what is sent to dst and that no
// other route leads to.
func NewBlackhole(dst netip.Prefix) Route {
	return Route{RouteKey: RouteKey{Dst: dst, Type: Blackhole, Priority: lastResort}, Protocol: Protocol}
}

// same reports whether r forwards as want does. A route that is the same is
// adopted whoever made it: protocol, onlink flag and the form of its next hop
// make no difference to packets, and even a replace can fail a lookup.
func (r Route) same(want Route) bool {
	r.Protocol, r.OnLink, r.NexthopID = want.Protocol, want.OnLink, want.NexthopID
	return r == want
}

// canonical is r without what same ignores.
func (r Route) canonical() Route {
	r.Protocol, r.OnLink, r.NexthopID = 0, false, 0
	return r
}

// leastNetwork is the shortest prefix that a network on a link can have: that of 10.0.0.0/8.
const leastNetwork = 8

// IsNetwork reports whether dst may be a network on a link. Shorter prefixes are those of the
// default route, whole or in parts: VPNs and routed hosts have it without a gateway.
func IsNetwork(dst netip.Prefix) bool { return dst.Bits() >= leastNetwork }

// State is what a kernel holds, or should hold, of our concern. Devices are
// named, never numbered.
type State struct {
	Links  map[string]Link
	Addrs  map[Addr]struct{}
	Neighs map[NeighKey]Neigh
	FDB    map[FDBKey]FDB
	// Routes are kept by destination, duplicates and all.
	Routes map[netip.Prefix][]Route
}

// NewState returns an empty state.
func NewState() State {
	return State{
		Links:  map[string]Link{},
		Addrs:  map[Addr]struct{}{},
		Neighs: map[NeighKey]Neigh{},
		FDB:    map[FDBKey]FDB{},
		Routes: map[netip.Prefix][]Route{},
	}
}

// StateOf returns the state of objects. There may be thousands: routes have a
// goroutine of their own, which makes room for them as well. So objects must bear
// to be gone over by two at once, and more than once.
func StateOf(objects iter.Seq[Object]) State {
	part := func(routes bool) State {
		s := NewState()
		of := func(yield func(Object) bool) {
			for o := range objects {
				if _, is := o.(Route); is == routes && !yield(o) {
					return
				}
			}
		}
		s.reserve(of)
		for o := range of {
			o.addTo(s)
		}
		return s
	}
	var routes State
	var wg sync.WaitGroup
	wg.Go(func() { routes = part(true) })
	s := part(false)
	wg.Wait()
	s.Routes = routes.Routes
	return s
}

// Reserve makes room for as many more objects at once.
func (s *State) Reserve(neighs, fdb, routes int) {
	s.Neighs, s.FDB, s.Routes = roomFor(s.Neighs, neighs), roomFor(s.FDB, fdb), roomFor(s.Routes, routes)
}

// reserve makes room for objects, as if none of them were there.
func (s *State) reserve(objects iter.Seq[Object]) {
	var neighs, fdb, routes int
	for o := range objects {
		switch o.(type) {
		case Neigh:
			neighs++
		case FDB:
			fdb++
		case Route:
			routes++
		}
	}
	s.Reserve(neighs, fdb, routes)
}

// roomFor returns m with room for n more, where that is worth its copy.
func roomFor[K comparable, V any](m map[K]V, n int) map[K]V {
	if m != nil && n <= len(m) {
		return m
	}
	larger := make(map[K]V, len(m)+n)
	maps.Copy(larger, m)
	return larger
}

// Add puts objects into the state. One with the key of another replaces it;
// a route replaces none but its equal.
func (s State) Add(objects ...Object) {
	for _, o := range objects {
		o.addTo(s)
	}
}

// AddState adds all objects of other.
func (s State) AddState(other State) {
	maps.Copy(s.Links, other.Links)
	maps.Copy(s.Addrs, other.Addrs)
	maps.Copy(s.Neighs, other.Neighs)
	maps.Copy(s.FDB, other.FDB)
	for r := range other.AllRoutes() {
		s.AddRoute(r)
	}
}

// AddRoute is Add for one route.
func (s State) AddRoute(r Route) {
	if routes := s.Routes[r.Dst]; !slices.Contains(routes, r) {
		s.Routes[r.Dst] = append(routes, r)
	}
}

// Remove takes out what has the keys of objects; of routes, what is equal.
func (s State) Remove(objects ...Object) {
	for _, o := range objects {
		o.removeFrom(s)
	}
}

// AllRoutes iterates over the routes of all destinations. The state may be
// changed meanwhile.
func (s State) AllRoutes() iter.Seq[Route] {
	return func(yield func(Route) bool) {
		for _, routes := range s.Routes {
			for _, r := range routes {
				if !yield(r) {
					return
				}
			}
		}
	}
}

// leads reports whether packets are sent anywhere by a route in the state.
func (s State) leads() bool {
	for r := range s.AllRoutes() {
		if r.Dev != "" {
			return true
		}
	}
	return false
}

// all iterates over everything in the state.
func (s State) all() iter.Seq[Object] {
	return func(yield func(Object) bool) {
		for _, l := range s.Links {
			if !yield(l) {
				return
			}
		}
		for a := range s.Addrs {
			if !yield(a) {
				return
			}
		}
		for _, n := range s.Neighs {
			if !yield(n) {
				return
			}
		}
		for _, f := range s.FDB {
			if !yield(f) {
				return
			}
		}
		for r := range s.AllRoutes() {
			if !yield(r) {
				return
			}
		}
	}
}

// holds reports whether the state has o; of routes, one that is the same.
func (s State) holds(o Object) (ok bool) {
	switch o := o.(type) {
	case Link:
		_, ok = s.Links[o.Name]
	case Addr:
		_, ok = s.Addrs[o]
	case Neigh:
		ok = s.Neighs[o.NeighKey] == o
	case FDB:
		ok = s.FDB[o.FDBKey] == o
	case Route:
		ok = slices.ContainsFunc(s.Routes[o.Dst], func(have Route) bool { return have.same(o) })
	}
	return ok
}

// kind names what o is.
func kind(o Object) string {
	switch o.(type) {
	case Link:
		return "link"
	case Addr:
		return "address"
	case Neigh:
		return "neighbour"
	case FDB:
		return "fdb"
	default:
		return "route"
	}
}

// size is about how many objects there are.
func (s State) size() int {
	return len(s.Addrs) + len(s.Neighs) + len(s.FDB) + len(s.Routes)
}

// HasRoute reports whether the state holds exactly r.
func (s State) HasRoute(r Route) bool { return slices.Contains(s.Routes[r.Dst], r) }

// Keys names places in a state: what is there, in one state or another. The
// zero Keys names none.
type Keys struct {
	links  map[string]struct{}
	addrs  map[Addr]struct{}
	neighs map[NeighKey]struct{}
	fdb    map[FDBKey]struct{}
	dsts   map[netip.Prefix]struct{}
}

// Add adds the keys of objects; of a route, its destination.
func (k *Keys) Add(objects ...Object) {
	for _, o := range objects {
		switch o := o.(type) {
		case Link:
			addKey(&k.links, o.Name)
		case Addr:
			addKey(&k.addrs, o)
		case Neigh:
			addKey(&k.neighs, o.NeighKey)
		case FDB:
			addKey(&k.fdb, o.FDBKey)
		case Route:
			addKey(&k.dsts, o.Dst)
		}
	}
}

func addKey[K comparable](set *map[K]struct{}, k K) {
	if *set == nil {
		*set = map[K]struct{}{}
	}
	(*set)[k] = struct{}{}
}

func (k *Keys) merge(other Keys) {
	addKeys(&k.links, other.links)
	addKeys(&k.addrs, other.addrs)
	addKeys(&k.neighs, other.neighs)
	addKeys(&k.fdb, other.fdb)
	addKeys(&k.dsts, other.dsts)
}

func addKeys[K comparable](set *map[K]struct{}, other map[K]struct{}) {
	for k := range other {
		addKey(set, k)
	}
}

// has reports whether o's key is one of k.
func (k Keys) has(o Object) (ok bool) {
	switch o := o.(type) {
	case Link:
		_, ok = k.links[o.Name]
	case Addr:
		_, ok = k.addrs[o]
	case Neigh:
		_, ok = k.neighs[o.NeighKey]
	case FDB:
		_, ok = k.fdb[o.FDBKey]
	case Route:
		_, ok = k.dsts[o.Dst]
	}
	return ok
}

// Only returns the part of the state that k names, and all links and
// addresses: they are few, and much depends on them.
func (s State) Only(k Keys) State {
	return State{
		Links: s.Links, Addrs: s.Addrs,
		Neighs: only(s.Neighs, k.neighs), FDB: only(s.FDB, k.fdb), Routes: only(s.Routes, k.dsts),
	}
}

func only[K comparable, V any](m map[K]V, keys map[K]struct{}) map[K]V {
	if len(keys) == 0 {
		return nil
	}
	part := make(map[K]V, len(keys))
	for k := range keys {
		if v, ok := m[k]; ok {
			part[k] = v
		}
	}
	return part
}

// Object is a Link, Addr, Neigh, FDB or Route.
type Object interface {
	fmt.Stringer
	addTo(State)
	removeFrom(State)
}

func (l Link) addTo(s State)  { s.Links[l.Name] = l }
func (a Addr) addTo(s State)  { s.Addrs[a] = struct{}{} }
func (n Neigh) addTo(s State) { s.Neighs[n.NeighKey] = n }
func (f FDB) addTo(s State)   { s.FDB[f.FDBKey] = f }
func (r Route) addTo(s State) { s.AddRoute(r) }

func (l Link) removeFrom(s State)  { delete(s.Links, l.Name) }
func (a Addr) removeFrom(s State)  { delete(s.Addrs, a) }
func (n Neigh) removeFrom(s State) { delete(s.Neighs, n.NeighKey) }
func (f FDB) removeFrom(s State)   { delete(s.FDB, f.FDBKey) }
func (r Route) removeFrom(s State) {
	routes := s.Routes[r.Dst]
	i := slices.Index(routes, r)
	switch {
	case i < 0:
	case len(routes) == 1:
		delete(s.Routes, r.Dst)
	default: // in a new slice: somebody may be ranging over the old one
		s.Routes[r.Dst] = slices.Concat(routes[:i], routes[i+1:])
	}
}

// String describes l as ip(8) would.
func (l Link) String() string { return fmt.Sprintf("link %s type %s", l.Name, l.Kind) }

// String describes a as ip(8) would.
func (a Addr) String() string { return fmt.Sprintf("address %s dev %s", a.Prefix, a.Dev) }

// String describes n as ip(8) would.
func (n Neigh) String() string {
	return fmt.Sprintf("neighbour %s lladdr %s dev %s", n.IP, n.MAC, n.Dev)
}

// String describes f as bridge(8) would.
func (f FDB) String() string { return fmt.Sprintf("FDB entry %s dst %s dev %s", f.MAC, f.Dst, f.Dev) }

// String describes r as ip(8) would.
func (r Route) String() string {
	s := "route " + r.Dst.String()
	if r.Type == Blackhole {
		s = "route blackhole " + r.Dst.String()
	}
	if r.Gateway.IsValid() {
		s += " via " + r.Gateway.String()
	}
	if r.Dev != "" {
		s += " dev " + r.Dev
	}
	if r.Priority != 0 && r.Priority != 1024 {
		s += fmt.Sprintf(" metric %d", r.Priority)
	}
	if r.TOS != 0 {
		s += " tos 0x" + hex.EncodeToString([]byte{r.TOS})
	}
	return s
}
