// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// routeReply is a parsed route message. It contains the index of the device, and its route
// does not contain the name. The destination of a default route is invalid.
type routeReply struct {
	route dataplane.Route
	oif   int
	table uint32
	// source is the source address of packets of this host, if the route sets one.
	source netip.Addr
	// fromSource is set on IPv6 routes for packets from certain sources. Such a route
	// exists beside the route for all sources and does not replace it.
	fromSource bool
	// cloned is set on entries that the kernel has learned and shows as routes.
	cloned bool
}

// mayConcern reports whether a state of scope s may contain the route. The device of a detour is not
// known yet.
func (r routeReply) mayConcern(s dataplane.Scope) bool {
	return r.table == unix.RT_TABLE_MAIN && !r.fromSource && !r.cloned && r.route.Dst.IsValid() &&
		(s.InNetworks(r.route.Dst) || r.route.IsDetour())
}

func parseRoute(payload []byte) routeReply {
	if len(payload) < unix.SizeofRtMsg {
		return routeReply{}
	}

	r := routeReply{table: uint32(payload[4]), fromSource: payload[2] != 0}
	r.route.TOS = payload[3]
	r.route.Protocol = payload[5]
	r.route.Type = dataplane.RouteType(payload[7])
	flags := binary.NativeEndian.Uint32(payload[8:])
	r.route.OnLink = flags&unix.RTNH_F_ONLINK != 0
	r.cloned = flags&unix.RTM_F_CLONED != 0
	var dst netip.Addr
	for a := range attributes(payload[unix.SizeofRtMsg:]) {
		switch a.typ {
		case unix.RTA_DST:
			dst = a.addr()
		case unix.RTA_GATEWAY:
			r.route.Gateway = a.addr()
		case unix.RTA_OIF:
			r.oif = int(a.uint32())
		case unix.RTA_PREFSRC:
			r.source = a.addr()
		case unix.RTA_PRIORITY:
			r.route.Priority = int(a.uint32())
		case unix.RTA_METRICS:
			r.route.MTU = parseMTU(a.data, payload[0])
		case unix.RTA_TABLE:
			r.table = a.uint32()
		case rtaNexthopID:
			r.route.NexthopID = a.uint32()
		case unix.RTA_MULTIPATH, unix.RTA_VIA, unix.RTA_ENCAP:
			r.route.Multipath = true
		}
	}
	if dst.IsValid() {
		r.route.Dst = netip.PrefixFrom(dst, int(payload[1]))
	}
	return r
}

// parseMTU returns 0 if the metrics of a route contain no MTU that counts.
func parseMTU(metrics []byte, family uint8) int {
	var mtu, locked uint32
	for a := range attributes(metrics) {
		switch a.typ {
		case unix.RTAX_MTU:
			mtu = a.uint32()
		case unix.RTAX_LOCK:
			locked = a.uint32()
		}
	}
	if family == unix.AF_INET6 && locked&(1<<unix.RTAX_MTU) == 0 {
		return 0 // the kernel ignores it for packets that it forwards
	}
	return int(mtu)
}

// elsewhere reports whether a route of another program leads out of the scope, as nearly all routes of
// a router do. It parses as little as possible.
func elsewhere(payload []byte, s dataplane.Scope) bool {
	if len(payload) < unix.SizeofRtMsg || payload[5] == dataplane.Protocol {
		return false
	}
	for a := range attributes(payload[unix.SizeofRtMsg:]) {
		if a.typ == unix.RTA_DST {
			dst := a.addr()
			return !dst.IsValid() || !s.InNetworks(netip.PrefixFrom(dst, int(payload[1])))
		}
	}
	return true // a default route
}

func parseAddress(payload []byte) netip.Prefix {
	var address, local netip.Addr
	for a := range attributes(payload[unix.SizeofIfAddrmsg:]) {
		switch a.typ {
		case unix.IFA_ADDRESS:
			address = a.addr()
		case unix.IFA_LOCAL:
			local = a.addr()
		}
	}
	if !local.IsValid() {
		local = address // IPv6 has IFA_LOCAL only on point-to-point links
	}
	return netip.PrefixFrom(local, int(payload[1]))
}

// neighbour contains the attributes of a neighbour message or of an FDB message.
type neighbour struct {
	mac      dataplane.MAC
	dst      netip.Addr
	override bool
	aged     bool // the message contains the age of the entry; the second announcement of an FDB write does not
}

// parseNeighbour parses a message with a struct ndmsg.
func parseNeighbour(payload []byte) (n neighbour, permanent bool) {
	for a := range attributes(payload[unix.SizeofNdMsg:]) {
		switch a.typ {
		case unix.NDA_DST:
			n.dst = a.addr()
		case unix.NDA_LLADDR:
			copy(n.mac[:], a.data)
		case unix.NDA_PORT, unix.NDA_VNI, unix.NDA_IFINDEX:
			n.override = true
		case unix.NDA_CACHEINFO:
			n.aged = true
		}
	}
	return n, binary.NativeEndian.Uint16(payload[8:])&unix.NUD_PERMANENT != 0
}

// linkFlags returns the flags in a struct ifinfomsg.
func linkFlags(payload []byte) uint32 { return binary.NativeEndian.Uint32(payload[8:]) }
