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

// MaxICMPError is the maximum length in bytes of a message that Write returns.
const MaxICMPError = MinMTU6

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
// the message, with its IP header, to the start of dst, which must have MaxICMPError
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

	f := icmpFormatOf(h.IPv6)
	quote := b[:min(h.Total, h.Len+f.quoted)]
	dst = dst[:f.header+icmpHeader+len(quote)]
	clear(dst)
	dst[0] = f.first
	dst[f.ttl] = icmpErrorTTL
	dst[f.ttl+f.protocolAt] = f.protocol
	copy(dst[f.addresses:], src.AsSlice())
	copy(dst[f.addresses+src.BitLen()/8:], h.Src.AsSlice())
	setTotal(dst, h.IPv6)
	m := dst[f.header:]
	m[0] = f.codes[e][0]
	m[1] = f.codes[e][1]
	if e == TooBig {
		binary.BigEndian.PutUint32(m[4:], uint32(max(mtu, f.minMTU)))
	}

	copy(m[icmpHeader:], quote)
	partial := uint64(0)
	if h.IPv6 {
		partial = pseudo(dst, true, f.protocol, len(m))
	}
	binary.BigEndian.PutUint16(m[2:], ^fold(sum(m, partial)))
	return dst
}

type icmpFormat struct {
	header          int  // length of the IP header in bytes
	first           byte // first byte of the IP header
	ttl, protocolAt int  // offset of the hop limit, and of the protocol relative to it
	addresses       int  // offset of the addresses
	protocol        byte
	codes           [3][2]byte // type and code of each kind of error
	minMTU          int        // minimum MTU that may be reported
	// quoted is the maximum number of bytes behind the packet's IP header that the message
	// contains. For IPv6 they fill the message (RFC 4443), because extension headers may
	// precede the ports.
	quoted int
}

func icmpFormatOf(ipv6 bool) icmpFormat {
	if ipv6 {
		return icmpFormat{
			header: header6, first: 6 << 4, ttl: 7, protocolAt: -1, addresses: 8, protocol: protoICMPv6,
			codes: [3][2]byte{Unreachable: {1, 0}, TimeExceeded: {3, 0}, TooBig: {2, 0}}, minMTU: MinMTU6,
			quoted: MinMTU6 - header6 - icmpHeader - header6,
		}
	}
	return icmpFormat{
		header: header4, first: 4<<4 | header4/4, ttl: 8, protocolAt: 1, addresses: 12, protocol: protoICMP,
		codes: [3][2]byte{Unreachable: {3, 0}, TimeExceeded: {11, 0}, TooBig: {3, 4}}, minMTU: 68, quoted: 8,
	}
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
