// Package dataplane holds the kernel to what it should hold: State describes
// links, addresses, neighbours, FDB entries and routes, Plan says what
// separates two states, and a Reconciler makes it so through a Kernel. But
// for that interface the package is pure.
package dataplane

import (
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"

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
	Name  string
	Kind  string // as rtnetlink names it; "vxlan" is the only one that Plan asks for
	MAC   MAC
	MTU   int // bytes
	Up    bool
	VXLAN VXLAN // zero unless Kind is "vxlan"
}

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

// Compatible reports whether l can become want without being replaced. Local
// address, underlay device, learning, MTU and MAC can change in place; the
// family of the local address, IPv4 if there is none, cannot.
func (l Link) Compatible(want Link) bool {
	a, b := l.VXLAN, want.VXLAN
	return l.Kind == want.Kind && a.VNI == b.VNI && a.Port == b.Port && a.GBP == b.GBP && a.Foreign == b.Foreign &&
		a.Local.Is6() == b.Local.Is6()
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

// State is what a kernel holds, or should hold, of our concern. Devices are
// named, never numbered.
type State struct {
	Links  map[string]Link
	Addrs  map[Addr]struct{}
	Neighs map[NeighKey]Neigh
	FDB    map[FDBKey]FDB
	Routes map[Route]struct{}
}

// NewState returns an empty state.
func NewState() State {
	return State{
		Links:  map[string]Link{},
		Addrs:  map[Addr]struct{}{},
		Neighs: map[NeighKey]Neigh{},
		FDB:    map[FDBKey]FDB{},
		Routes: map[Route]struct{}{},
	}
}

// Add puts objects into the state. Objects with the key of one that is
// already there replace it; routes never do.
func (s State) Add(objects ...Object) {
	for _, o := range objects {
		o.addTo(s)
	}
}

// Object is a Link, Addr, Neigh, FDB or Route.
type Object interface {
	fmt.Stringer
	addTo(State)
}

func (l Link) addTo(s State)  { s.Links[l.Name] = l }
func (a Addr) addTo(s State)  { s.Addrs[a] = struct{}{} }
func (n Neigh) addTo(s State) { s.Neighs[n.NeighKey] = n }
func (f FDB) addTo(s State)   { s.FDB[f.FDBKey] = f }
func (r Route) addTo(s State) { s.Routes[r] = struct{}{} }

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
