// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// MAC is an Ethernet address.
type MAC [6]byte

// ParseMAC parses an address of the form aa:bb:cc:dd:ee:ff, in upper or lower case. The
// error names s.
func ParseMAC(s string) (MAC, error) {
	hw, err := net.ParseMAC(s)
	if err != nil || len(hw) != 6 {
		return MAC{}, fmt.Errorf("%q is not an Ethernet address (want aa:bb:cc:dd:ee:ff)", s)
	}
	return MAC(hw), nil
}

// String returns the form aa:bb:cc:dd:ee:ff.
func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// IsUnicast reports whether m can be the address of one station: it is neither zero nor a
// group address.
func (m MAC) IsUnicast() bool { return m != MAC{} && m[0]&1 == 0 }

// Link is a network device that flanneld owns, or has found under the name of such a
// device.
type Link struct {
	Name   string
	Kind   string // rtnetlink's name of the kind; a link of a kind without a constant below can only be deleted
	MAC    MAC    // zero if the device has no Ethernet address
	MTU    int    // bytes
	Up     bool
	VXLAN  VXLAN  // zero unless Kind is KindVXLAN
	Tunnel Tunnel // zero unless Kind is KindIPIP or KindIP6Tnl
	// TxChecksum says whether the hardware computes the checksums of the packets that the
	// device sends. Read fills it in only if Scope.TxChecksum is set.
	TxChecksum Offload
}

// The kinds of link that a wanted state may contain.
const (
	KindVXLAN  = "vxlan"
	KindIPIP   = "ipip"   // IPv4 in IPv4
	KindIP6Tnl = "ip6tnl" // IPv6 in IPv6
	// KindWireGuard is a WireGuard device. Its keys and peers are not part of the state.
	KindWireGuard = "wireguard"
	// KindTUN is a device whose packets a process reads and writes. The process creates
	// it: a Kernel changes such a link, but cannot create it.
	KindTUN = "tun"
)

func (l Link) ours() bool {
	return slices.Contains([]string{KindVXLAN, KindIPIP, KindIP6Tnl, KindWireGuard, KindTUN}, l.Kind)
}

// Offload says whether a device may leave a task to the hardware below it.
type Offload uint8

// The values of Offload.
const (
	OffloadAuto Offload = iota // keep the kernel's setting
	OffloadOn
	OffloadOff
)

// VXLAN holds the parameters of a vxlan device.
type VXLAN struct {
	VNI      int
	Port     int        // UDP destination port
	Local    netip.Addr // outer source address, of either family
	Underlay string     // name of the device that carries the outer packets
	Learning bool
	GBP      bool
	// Foreign is set if the device has a setting that flanneld never uses: a default
	// remote or group, external (metadata) mode, proxy, route short circuit (rsc), or
	// notifications about misses.
	Foreign bool
}

// Tunnel holds the parameters of an ipip or ip6tnl device without a remote address. The
// kernel sends a packet to the gateway of the route that leads into the device.
type Tunnel struct {
	Local netip.Addr // outer source address
	// Foreign is set if the device has a setting that flanneld never uses: a remote
	// address, external (metadata) mode, an encapsulation, other protocols, or an
	// encapsulation limit.
	Foreign bool
}

// Compatible reports whether the kernel can change l to want without replacing the
// device. It can change the local address within its family (no address counts as IPv4),
// the underlay device, learning, the MTU, the MAC, the checksum offload, and whether the
// device is up. Any other difference requires a new device.
func (l Link) Compatible(want Link) bool {
	a := l.VXLAN
	b := want.VXLAN
	return l.Kind == want.Kind && a.VNI == b.VNI && a.Port == b.Port && a.GBP == b.GBP && a.Foreign == b.Foreign &&
		a.Local.Is6() == b.Local.Is6() && l.Tunnel.Foreign == want.Tunnel.Foreign
}

// same reports whether l is as want says. If want keeps the kernel's checksum offload, any is right: Read
// fills it in if Scope.TxChecksum is set.
func (l Link) same(want Link) bool {
	if want.TxChecksum == OffloadAuto {
		l.TxChecksum = OffloadAuto
	}
	return l == want
}

// Addr is an IPv4 or IPv6 address on a device, with its prefix length. Prefix contains the
// host bits.
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
	Dst netip.Addr // outer address of the VTEP, of the same family as VXLAN.Local
	// Override is set if the entry has its own port, VNI or interface.
	Override bool
}

// RouteType is the kernel's route type (RTN_*).
type RouteType uint8

// The route types that a wanted state may contain.
const (
	Unicast     RouteType = 1
	Unreachable RouteType = 7
)

// Protocol is the route protocol number (rtm_protocol) of the routes that flanneld
// creates. dist/rt_protos.d gives it a name for ip(8).
const Protocol = 98

// protoKernel is the protocol number of routes that the kernel creates.
const protoKernel = 2

// MainTable is the routing table that contains all routes of this package.
const MainTable = 254

// RouteKey contains the attributes that usually tell the routes of a table apart. It is
// not unique: IPv4 duplicates and the next hops of an IPv6 multipath route share a key.
// The type alone does not tell routes apart: a put also replaces a route of another type
// that has the same destination, metric and TOS.
type RouteKey struct {
	Dst      netip.Prefix
	Priority int // metric; the lowest one wins; the kernel gives IPv6 routes 1024 by default
	TOS      uint8
	Type     RouteType
}

// Route is an IPv4 or IPv6 entry of the main table.
type Route struct {
	RouteKey
	Gateway  netip.Addr // invalid if there is none
	Dev      string     // empty if the route has no device or several, like an unreachable or multipath route
	OnLink   bool
	Protocol uint8
	// Multipath is set if the route has several next hops, or attributes that Route does
	// not describe. Such a route never equals a wanted one.
	Multipath bool
	// NexthopID is the id of the nexthop object that the route uses; 0 if it uses none.
	NexthopID uint32
	// Plain is set on a wanted route that must not use a nexthop object. See AsPlain.
	Plain bool
	// MTU is the size in bytes of the largest packet that may take the route; 0 means the MTU of
	// the device.
	MTU int
}

// NewRoute returns the unicast route to dst through gateway, in the form in which the
// kernel returns it.
func NewRoute(dst netip.Prefix, gateway netip.Addr, dev string, onLink bool) Route {
	r := Route{RouteKey: RouteKey{Dst: dst, Type: Unicast}, Gateway: gateway, Dev: dev, OnLink: onLink, Protocol: Protocol}
	if prefix.FamilyOf(dst.Addr()) == prefix.IPv6 {
		r.Priority = 1024
	}
	return r
}

// detourMetric is the metric of detours. No other route on flanneld's devices has it.
const detourMetric = 1

// NewDetour returns a detour: a route through dev to the single address gateway. The kernel
// refuses an IPv6 route through dev if the route to the gateway of that route leads through
// another device. So a Kernel creates a detour before it creates such a route, and deletes
// the detour in the same step. If a later read finds a detour, it was left behind.
func NewDetour(gateway netip.Addr, dev string) Route {
	r := NewRoute(prefix.Host(gateway), netip.Addr{}, dev, false)
	r.Priority = detourMetric
	return r
}

// IsDetour reports whether r equals the result of NewDetour for its destination and device.
func (r Route) IsDetour() bool { return r == NewDetour(r.Dst.Addr(), r.Dev) }

// standbyMetric is the metric of standby routes. It is higher than the metric of any other
// route of flanneld, except for unreachable routes.
const standbyMetric = 1 << 20

// Standby returns r with a high metric. Such a route carries packets only if there is no
// better route to the destination, or if the sender has chosen the device of the route.
// During a migration, the backend that does not carry the packets to a peer has a standby
// route to the peer's subnet.
func (r Route) Standby() Route {
	r.Priority = standbyMetric
	return r
}

// AsPlain returns r with Plain set, so that a Kernel creates it without a nexthop object. If r has no IPv4
// gateway, AsPlain returns r unchanged, because a Kernel never uses a nexthop object for such a route.
// During a migration the route that carries the packets is plain, so that a probe through the other device
// finds the standby route. If the sender of a packet has chosen a device that the best IPv4 route does not
// use, the kernel looks at the other routes to the destination only if the best route has no nexthop
// object.
func (r Route) AsPlain() Route {
	r.Plain = r.Gateway.Is4()
	return r
}

// lastResort is the metric of unreachable routes. It is higher than the metric of any other
// route. So the route to a bridge or a pod with addresses of the subnet takes precedence,
// even if it is newer.
const lastResort = 1 << 30

// NewUnreachable returns the route that refuses a packet to dst, unless there is another route to
// dst or to a part of dst that contains the destination of the packet.
func NewUnreachable(dst netip.Prefix) Route {
	return Route{RouteKey: RouteKey{Dst: dst, Type: Unreachable, Priority: lastResort}, Protocol: Protocol}
}

// same reports whether r forwards packets as want does. The Reconciler adopts such a route, even if
// another program created it, because a replacement could make a lookup fail.
func (r Route) same(want Route) bool {
	if want.Plain && r.NexthopID != 0 {
		return false
	}
	if want.MTU == 0 && r.Protocol != Protocol {
		r.MTU = 0 // the MTU of another program stays
	}

	// These make no difference to packets.
	r.Protocol = want.Protocol
	r.OnLink = want.OnLink
	r.NexthopID = want.NexthopID
	r.Plain = want.Plain
	return r == want
}

// canonical drops the attributes that same ignores in some cases. Routes that are equal then may
// still treat packets differently.
func (r Route) canonical() Route {
	r.Protocol = 0
	r.OnLink = false
	r.NexthopID = 0
	r.Plain = false
	r.MTU = 0
	return r
}

// leastNetwork is the shortest prefix length that a directly connected network can have,
// as in 10.0.0.0/8.
const leastNetwork = 8

// IsNetwork reports whether dst can be a directly connected network. A prefix shorter than
// /8 belongs to a default route or to a part of a default route, such as 0.0.0.0/1. VPNs
// and routed hosts configure such routes without a gateway.
func IsNetwork(dst netip.Prefix) bool { return dst.Bits() >= leastNetwork }

// String describes l in the form of ip(8).
func (l Link) String() string { return fmt.Sprintf("link %s type %s", l.Name, l.Kind) }

// String describes a in the form of ip(8).
func (a Addr) String() string { return fmt.Sprintf("address %s dev %s", a.Prefix, a.Dev) }

// String describes n in the form of ip(8).
func (n Neigh) String() string {
	return fmt.Sprintf("neighbour %s lladdr %s dev %s", n.IP, n.MAC, n.Dev)
}

// String describes f in the form of bridge(8).
func (f FDB) String() string { return fmt.Sprintf("FDB entry %s dst %s dev %s", f.MAC, f.Dst, f.Dev) }

// String describes r in the form of ip(8).
func (r Route) String() string {
	s := "route " + r.Dst.String()
	if r.Type == Unreachable {
		s = "route unreachable " + r.Dst.String()
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
	if r.MTU != 0 {
		s += fmt.Sprintf(" mtu %d", r.MTU)
	}
	if r.TOS != 0 {
		s += " tos 0x" + hex.EncodeToString([]byte{r.TOS})
	}
	return s
}
