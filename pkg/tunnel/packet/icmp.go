// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"net/netip"
)

// Complaint is a kind of ICMP error that a router sends to the sender of a packet.
type Complaint uint8

// The complaints.
const (
	Unreachable  Complaint = iota // there is no route to the destination's network
	TimeExceeded                  // the hop limit is used up
	TooBig                        // larger than the next link allows, and fragmentation is forbidden
)

// MaxReply is the maximum length in bytes of a message that Complain returns.
const MaxReply = MinMTU6

// MinMTU6 is the minimum MTU in bytes of an IPv6 link.
const MinMTU6 = 1280

const (
	icmpHeader = 8
	maxHeader4 = 60
	// replyTTL is low, because the sender is on this host. The C part of flannel's udp
	// backend uses the same value.
	replyTTL = 8
)

// Complain returns the ICMP error about the packet b, whose parsed header is h. It writes
// the message to the start of dst, which must have MaxReply bytes. src is the source of
// the message. mtu is used with TooBig only. Complain returns nil if no error may be sent
// about b.
func (c Complaint) Complain(dst, b []byte, h Header, src netip.Addr, mtu int) []byte {
	if h.Later || h.Len >= maxHeader4 || h.Dst.IsMulticast() || !Forwardable(h.Src) || src.Is6() != h.IPv6 {
		return nil
	}
	if icmp := h.Protocol == protoICMP || h.Protocol == protoICMPv6; icmp && (c == Unreachable || h.Total <= h.Len || isError(b[h.Len], h.IPv6)) {
		return nil
	}
	f := formOf(h.IPv6)
	quote := b[:min(h.Total, h.Len+f.quoted)]
	dst = dst[:f.header+icmpHeader+len(quote)]
	clear(dst)
	dst[0], dst[f.ttl], dst[f.ttl+f.protocolAt] = f.first, replyTTL, f.protocol
	copy(dst[f.addresses:], src.AsSlice())
	copy(dst[f.addresses+src.BitLen()/8:], h.Src.AsSlice())
	setTotal(dst, h.IPv6)
	m := dst[f.header:]
	m[0], m[1] = f.codes[c][0], f.codes[c][1]
	if c == TooBig {
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

// form contains the differences of ICMP errors between the address families.
type form struct {
	header          int  // length of the IP header in bytes
	first           byte // first byte of the IP header
	ttl, protocolAt int  // offset of the hop limit, and the distance from it to the protocol
	addresses       int  // offset of the addresses
	protocol        byte
	codes           [3][2]byte // type and code of each complaint
	minMTU          int        // minimum MTU that may be reported
	// quoted is the maximum number of bytes of the packet that follow its IP header. IPv6
	// fills the message (RFC 4443), because extension headers may precede the ports.
	quoted int
}

func formOf(ipv6 bool) form {
	if ipv6 {
		return form{
			header: header6, first: 6 << 4, ttl: 7, protocolAt: -1, addresses: 8, protocol: protoICMPv6,
			codes: [3][2]byte{Unreachable: {1, 0}, TimeExceeded: {3, 0}, TooBig: {2, 0}}, minMTU: MinMTU6,
			quoted: MinMTU6 - header6 - icmpHeader - header6,
		}
	}
	return form{
		header: header4, first: 4<<4 | header4/4, ttl: 8, protocolAt: 1, addresses: 12, protocol: protoICMP,
		codes: [3][2]byte{Unreachable: {3, 0}, TimeExceeded: {11, 0}, TooBig: {3, 4}}, minMTU: 68, quoted: 8,
	}
}

// isError reports whether an ICMP type is an error or another message that must not cause
// an error.
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
