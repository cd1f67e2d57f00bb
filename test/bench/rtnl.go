// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/must"
)

// Message types, attributes and a group of nexthop objects that x/sys does not define.
const (
	rtmNewNexthop = 104
	rtmDelNexthop = 105
	rtmGetNexthop = 106

	nhaID      = 1
	nhaOIF     = 5
	nhaGateway = 6

	rtnlgrpNexthop = 32

	rtaNHID = 30
)

// rtnl is a raw rtnetlink socket with only what is needed to write to the kernel quickly, and to
// read its objects and announcements. It shares no code with the daemon, because the daemon is
// compared with it.
type rtnl struct {
	fd  int
	seq uint32
	buf []byte
	out []byte
	msg int // offset in out of the message that is being built
}

func openRTNL(groups ...int) *rtnl {
	fd := must.Get(unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE))
	r := &rtnl{fd: fd, buf: make([]byte, 256<<10)}
	must.Do(errors.Join(
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
	))
	for _, g := range groups {
		must.Do(unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g))
	}
	return r
}

// limitWait makes receive return EAGAIN if nothing arrives within d.
func (r *rtnl) limitWait(d time.Duration) {
	tv := unix.NsecToTimeval(int64(d))
	must.Do(unix.SetsockoptTimeval(r.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv))
}

func (r *rtnl) close() { _ = unix.Close(r.fd) }

// attr is an attribute of a message.
type attr struct {
	typ  uint16
	data []byte
}

func attrAddr(typ uint16, a netip.Addr) attr { return attr{typ, a.AsSlice()} }

func attr32(typ uint16, v uint32) attr { return attr{typ, binary.NativeEndian.AppendUint32(nil, v)} }

// add adds a message with this header and these attributes to those that send sends.
func (r *rtnl) add(typ, flags uint16, header []byte, attrs ...attr) {
	r.msg = len(r.out)
	r.seq++
	r.out = binary.NativeEndian.AppendUint32(r.out, 0) // the length
	r.out = binary.NativeEndian.AppendUint16(r.out, typ)
	r.out = binary.NativeEndian.AppendUint16(r.out, flags|unix.NLM_F_REQUEST)
	r.out = binary.NativeEndian.AppendUint32(r.out, r.seq)
	r.out = binary.NativeEndian.AppendUint32(r.out, 0)
	r.out = append(r.out, header...)
	for _, a := range attrs {
		r.out = binary.NativeEndian.AppendUint16(r.out, uint16(4+len(a.data)))
		r.out = binary.NativeEndian.AppendUint16(r.out, a.typ)
		r.out = append(r.out, a.data...)
		for len(r.out)%4 != 0 {
			r.out = append(r.out, 0)
		}
	}
	binary.NativeEndian.PutUint32(r.out[r.msg:], uint32(len(r.out)-r.msg))
}

// send sends the messages that have been built, the last one with further flags.
func (r *rtnl) send(flags uint16) {
	last := r.out[r.msg+6:]
	binary.NativeEndian.PutUint16(last, binary.NativeEndian.Uint16(last)|flags)
	must.Do(unix.Sendto(r.fd, r.out, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
	r.out = r.out[:0]
}

// flush sends the messages that have been built, and waits until the kernel has handled them. Only
// the last message requests an acknowledgement. The first error that the kernel reports ends the measure.
func (r *rtnl) flush() {
	if len(r.out) > 0 {
		r.send(unix.NLM_F_ACK)
		r.answers(func(uint16, []byte) {})
	}
}

func (r *rtnl) dump(typ uint16, header []byte, each func(payload []byte), attrs ...attr) {
	r.add(typ, 0, header, attrs...)
	r.send(unix.NLM_F_DUMP)
	r.answers(func(_ uint16, payload []byte) { each(payload) })
}

// answers receives the answers to the messages that were sent, until the last one is answered: by an
// acknowledgement, or by all parts of a dump. It calls the function each for every part.
func (r *rtnl) answers(each func(typ uint16, payload []byte)) {
	for done := false; !done; {
		must.Do(r.receive(func(typ uint16, seq uint32, payload []byte) {
			switch {
			case typ == unix.NLMSG_ERROR:
				if code := int32(binary.NativeEndian.Uint32(payload)); code != 0 {
					must.Do(syscall.Errno(-code))
				}
				done = done || seq == r.seq
			case seq != r.seq:
			case typ == unix.NLMSG_DONE:
				done = true
			default:
				each(typ, payload)
			}
		}))
	}
}

func (r *rtnl) receive(each func(typ uint16, seq uint32, payload []byte)) error {
	n, _, err := unix.Recvfrom(r.fd, r.buf, 0)
	for errors.Is(err, unix.EINTR) {
		n, _, err = unix.Recvfrom(r.fd, r.buf, 0)
	}
	if err != nil {
		return err
	}

	for b := r.buf[:n]; len(b) >= unix.NLMSG_HDRLEN; {
		size := int(binary.NativeEndian.Uint32(b))
		if size < unix.NLMSG_HDRLEN || size > len(b) {
			return fmt.Errorf("rtnetlink message of %d bytes in %d", size, len(b))
		}
		typ := binary.NativeEndian.Uint16(b[4:])
		seq := binary.NativeEndian.Uint32(b[8:])
		each(typ, seq, b[unix.NLMSG_HDRLEN:size])
		b = b[min((size+3)&^3, len(b)):]
	}
	return nil
}

func attrs(b []byte, each func(typ uint16, data []byte)) {
	for len(b) >= 4 {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return
		}
		each(binary.NativeEndian.Uint16(b[2:])&^uint16(unix.NLA_F_NESTED), b[4:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

// ndmsg returns the header of a message about a neighbour, struct ndmsg.
func ndmsg(family uint8, ifindex int, flags uint8) []byte {
	b := binary.NativeEndian.AppendUint32([]byte{family, 0, 0, 0}, uint32(ifindex))
	b = binary.NativeEndian.AppendUint16(b, unix.NUD_PERMANENT)
	return append(b, flags, 0)
}

// rtmsg returns the header of a message about an IPv4 unicast route in the main table, struct
// rtmsg. bits is the length of the destination's prefix.
func rtmsg(bits int, scope uint8, flags uint32) []byte {
	b := []byte{unix.AF_INET, uint8(bits), 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, scope, unix.RTN_UNICAST}
	return binary.NativeEndian.AppendUint32(b, flags)
}

// nhmsg returns the header of a message about a nexthop object, struct nhmsg.
func nhmsg(family, protocol uint8, flags uint32) []byte {
	return binary.NativeEndian.AppendUint32([]byte{family, 0, protocol, 0}, flags)
}

const put = unix.NLM_F_CREATE | unix.NLM_F_REPLACE

func (r *rtnl) putNeigh(ifindex int, ip netip.Addr, mac [6]byte) {
	r.add(unix.RTM_NEWNEIGH, put, ndmsg(unix.AF_INET, ifindex, 0), attrAddr(unix.NDA_DST, ip), attr{unix.NDA_LLADDR, mac[:]})
}

func (r *rtnl) delNeigh(ifindex int, ip netip.Addr) {
	r.add(unix.RTM_DELNEIGH, 0, ndmsg(unix.AF_INET, ifindex, 0), attrAddr(unix.NDA_DST, ip))
}

func (r *rtnl) putFDB(ifindex int, mac [6]byte, dst netip.Addr) {
	r.add(unix.RTM_NEWNEIGH, put, ndmsg(unix.AF_BRIDGE, ifindex, unix.NTF_SELF), attr{unix.NDA_LLADDR, mac[:]}, attrAddr(unix.NDA_DST, dst))
}

func (r *rtnl) addNexthop(id uint32, ifindex int, gateway netip.Addr, flags uint32) {
	r.add(rtmNewNexthop, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nhmsg(unix.AF_INET, unix.RTPROT_BOOT, flags),
		attr32(nhaID, id), attr32(nhaOIF, uint32(ifindex)), attrAddr(nhaGateway, gateway))
}

func (r *rtnl) delNexthop(id uint32) {
	r.add(rtmDelNexthop, 0, nhmsg(unix.AF_UNSPEC, 0, 0), attr32(nhaID, id))
}

func (r *rtnl) putRouteByID(dst netip.Prefix, id uint32) {
	r.add(unix.RTM_NEWROUTE, put, rtmsg(dst.Bits(), unix.RT_SCOPE_UNIVERSE, 0), attrAddr(unix.RTA_DST, dst.Addr()), attr32(rtaNHID, id))
}

func (r *rtnl) putRoute(dst netip.Prefix, ifindex int, gateway netip.Addr, flags uint32) {
	r.add(unix.RTM_NEWROUTE, put, rtmsg(dst.Bits(), unix.RT_SCOPE_UNIVERSE, flags),
		attrAddr(unix.RTA_DST, dst.Addr()), attrAddr(unix.RTA_GATEWAY, gateway), attr32(unix.RTA_OIF, uint32(ifindex)))
}

// putLinkRoute adds a message that adds or replaces a route without a gateway: dst is directly
// reachable on the device.
func (r *rtnl) putLinkRoute(dst netip.Prefix, ifindex int) {
	r.add(unix.RTM_NEWROUTE, put, rtmsg(dst.Bits(), unix.RT_SCOPE_LINK, 0), attrAddr(unix.RTA_DST, dst.Addr()), attr32(unix.RTA_OIF, uint32(ifindex)))
}

func (r *rtnl) delRoute(dst netip.Prefix) {
	header := rtmsg(dst.Bits(), unix.RT_SCOPE_NOWHERE, 0)
	header[5] = unix.RTPROT_UNSPEC // the route may have any protocol
	r.add(unix.RTM_DELROUTE, 0, header, attrAddr(unix.RTA_DST, dst.Addr()))
}

// dumpNeighs reads the permanent neighbours of a device or, if family is AF_BRIDGE, its permanent
// FDB entries. It calls the function each for every one of them.
func (r *rtnl) dumpNeighs(family uint8, ifindex int, each func(dst netip.Addr, mac [6]byte)) {
	header := ndmsg(family, 0, 0)
	clear(header[4:])
	r.dump(unix.RTM_GETNEIGH, header, func(payload []byte) {
		if n := parseNeigh(payload); n.family == family && n.permanent {
			each(n.dst, n.mac)
		}
	}, attr32(unix.NDA_IFINDEX, uint32(ifindex)))
}

// kernelNeigh is a neighbour or, if its family is AF_BRIDGE, an FDB entry.
type kernelNeigh struct {
	family    uint8
	ifindex   int
	permanent bool
	dst       netip.Addr
	mac       [6]byte
}

// parseNeigh returns the entry that a message describes; zero if the message is too short.
func parseNeigh(payload []byte) (n kernelNeigh) {
	if len(payload) < unix.SizeofNdMsg {
		return n
	}

	n.family = payload[0]
	n.ifindex = int(binary.NativeEndian.Uint32(payload[4:]))
	n.permanent = binary.NativeEndian.Uint16(payload[8:])&unix.NUD_PERMANENT != 0
	attrs(payload[unix.SizeofNdMsg:], func(typ uint16, data []byte) {
		switch typ {
		case unix.NDA_DST:
			n.dst, _ = netip.AddrFromSlice(data)
		case unix.NDA_LLADDR:
			copy(n.mac[:], data)
		}
	})
	return n
}

// dumpRoutes reads the IPv4 unicast routes of the main table, and calls the function each for every one of
// them. With an ifindex it reads only those whose output device has it.
func (r *rtnl) dumpRoutes(ifindex int, each func(dst netip.Prefix, one kernelRoute)) {
	header := rtmsg(0, 0, 0)
	clear(header[5:])
	var only []attr
	if ifindex > 0 {
		only = []attr{attr32(unix.RTA_OIF, uint32(ifindex))}
	}
	r.dump(unix.RTM_GETROUTE, header, func(payload []byte) {
		if dst, one, ok := parseRoute(payload); ok {
			each(dst, one)
		}
	}, only...)
}

// kernelRoute is a route to a peer, without its destination.
type kernelRoute struct {
	metric  uint32
	gateway netip.Addr
}

// parseRoute returns the route that a message describes. ok is false if it is not a unicast route in the
// main table.
func parseRoute(payload []byte) (dst netip.Prefix, one kernelRoute, ok bool) {
	if len(payload) < unix.SizeofRtMsg || payload[4] != unix.RT_TABLE_MAIN || payload[7] != unix.RTN_UNICAST {
		return dst, one, false
	}

	dst = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	attrs(payload[unix.SizeofRtMsg:], func(typ uint16, data []byte) {
		switch typ {
		case unix.RTA_DST:
			a, _ := netip.AddrFromSlice(data)
			dst = netip.PrefixFrom(a, int(payload[1]))
		case unix.RTA_GATEWAY:
			one.gateway, _ = netip.AddrFromSlice(data)
		case unix.RTA_PRIORITY:
			one.metric = binary.NativeEndian.Uint32(data)
		}
	})
	return dst, one, true
}

func (r *rtnl) dumpNexthops(each func(id uint32)) {
	r.dump(rtmGetNexthop, nhmsg(unix.AF_UNSPEC, 0, 0), func(payload []byte) {
		attrs(payload[min(8, len(payload)):], func(typ uint16, data []byte) {
			if typ == nhaID {
				each(binary.NativeEndian.Uint32(data))
			}
		})
	})
}

// hasRoute reports whether the kernel has a route to exactly the prefix dst. It looks up the
// address of dst. So it does not find the route if there is one with a longer prefix for that
// address.
func (r *rtnl) hasRoute(dst netip.Prefix) bool {
	const lookupFIBMatch = 0x2000 // RTM_F_FIB_MATCH
	body := rtmsg(dst.Addr().BitLen(), 0, lookupFIBMatch)
	body[4] = 0
	body[5] = 0
	body[7] = 0
	if dst.Addr().Is6() {
		body[0] = unix.AF_INET6
	}

	r.add(unix.RTM_GETROUTE, 0, body, attrAddr(unix.RTA_DST, dst.Addr()))
	r.send(0)
	found := false
	must.Do(r.receive(func(typ uint16, _ uint32, payload []byte) {
		found = typ == unix.RTM_NEWROUTE && len(payload) >= unix.SizeofRtMsg && int(payload[1]) == dst.Bits()
	}))
	return found
}
