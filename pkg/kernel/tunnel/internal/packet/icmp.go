// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"net/netip"
)

// ICMPError is a kind of ICMP error that a router sends to the sender of a packet
// (RFC 792, RFC 4443).
type ICMPError uint8

// The kinds of ICMP errors.
const (
	Unreachable  ICMPError = iota // there is no route to the destination's network
	TimeExceeded                  // the hop limit is used up
	TooBig                        // the packet is larger than the next link allows, and fragmentation is forbidden
)

// MinMTU6 is the minimum MTU in bytes of an IPv6 link.
const MinMTU6 = 1280

const (
	icmpHeader = 8
	maxHeader4 = 60
	// icmpErrorTTL is low, because the sender is on this host. The C part of flannel's udp
	// backend uses the same value.
	icmpErrorTTL = 8
)

// Write returns the ICMP error about the packet b, whose parsed header is h. It writes
// the message, with its IP header, to the start of dst, which must have MinMTU6
// bytes. src is the source of the message. mtu is the MTU that TooBig reports, but at
// least the minimum MTU of the family; other kinds ignore it. Write returns nil if no
// error may be sent about b, if src is of another family, if the IPv4 header has the
// maximum length, or if the error is Unreachable and b is an ICMP packet.
func (e ICMPError) Write(dst, b []byte, h Header, src netip.Addr, mtu int) []byte {
	if h.LaterFragment || h.Len >= maxHeader4 || h.Dst.IsMulticast() || !Forwardable(h.Src) || src.Is6() != h.IPv6 {
		return nil
	}
	if icmp := h.Protocol == protoICMP || h.Protocol == protoICMPv6; icmp && (e == Unreachable || h.Total <= h.Len || isError(b[h.Len], h.IPv6)) {
		return nil
	}

	header := header4
	quoted := 8  // bytes behind the packet's IP header that the message contains
	minMTU := 68 // minimum MTU that may be reported
	if h.IPv6 {
		header = header6
		quoted = MinMTU6 - header6 - icmpHeader - header6 // they fill the message (RFC 4443), because extension headers may precede the ports
		minMTU = MinMTU6
	}

	quote := b[:min(h.Total, h.Len+quoted)]
	dst = dst[:header+icmpHeader+len(quote)]
	clear(dst)
	m := dst[header:]
	copy(m[icmpHeader:], quote)
	if e == TooBig {
		binary.BigEndian.PutUint32(m[4:], uint32(max(mtu, minMTU)))
	}

	partial := uint64(0)
	addresses := append(src.AsSlice(), h.Src.AsSlice()...)
	if h.IPv6 {
		dst[0] = 6 << 4
		dst[6] = protoICMPv6
		dst[7] = icmpErrorTTL
		copy(dst[8:], addresses)
		m[0] = [...]byte{Unreachable: 1, TimeExceeded: 3, TooBig: 2}[e]
		partial = pseudo(dst, true, protoICMPv6, len(m))
	} else {
		dst[0] = 4<<4 | header4/4
		dst[8] = icmpErrorTTL
		dst[9] = protoICMP
		copy(dst[12:], addresses)
		m[0] = [...]byte{Unreachable: 3, TimeExceeded: 11, TooBig: 3}[e]
		m[1] = [...]byte{TooBig: 4}[e]
	}
	setTotal(dst, h.IPv6)
	binary.BigEndian.PutUint16(m[2:], ^fold(sum(m, partial)))
	return dst
}

// isError includes Redirect. No ICMP error may be sent about such messages (RFC 1122, 3.2.2; RFC 4443,
// 2.4).
func isError(typ byte, ipv6 bool) bool {
	if ipv6 {
		return typ < 128 || typ == 137 // 137 is Redirect
	}
	switch typ {
	case 3, 4, 5, 11, 12:
		return true
	}
	return false
}
