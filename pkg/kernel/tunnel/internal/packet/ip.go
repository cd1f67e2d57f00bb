// SPDX-License-Identifier: Apache-2.0

// Package packet parses IP packets, changes them in place, splits super-packets into
// single packets, and merges single packets into super-packets. It is pure. Parse
// accepts any bytes.
//
//   - ip.go parses IPv4 and IPv6 headers.
//   - offload.go splits super-packets, and merge.go merges packets into them.
//   - icmp.go writes ICMP errors, fragment.go fragments packets, and checksum.go
//     computes checksums.
package packet

import (
	"encoding/binary"
	"net/netip"
)

// Numbers of the transport protocols that are split and merged, and of ICMP.
const (
	protoICMP   = 1
	protoTCP    = 6
	protoUDP    = 17
	protoICMPv6 = 58
)

const (
	header4 = 20 // length of an IPv4 header without options
	header6 = 40 // length of an IPv6 header
)

// Header contains the fields of an IP header that this package and its callers need:
// addresses, lengths, protocol, hop limit and fragmentation.
type Header struct {
	Src, Dst netip.Addr
	Len      int   // length of the IP header in bytes, without IPv6 extension headers
	Total    int   // length of the packet in bytes, including the header; at most the available bytes
	Protocol uint8 // protocol of the IP header itself; for IPv6, the next header
	TTL      uint8
	IPv6     bool
	// DontFragment is set if routers must not fragment the packet. It is always set for
	// IPv6.
	DontFragment bool
	// Fragment is set if the packet is a fragment, and LaterFragment also if it is not the
	// first fragment. Both are always false for IPv6.
	Fragment, LaterFragment bool
}

// Forwardable reports whether a packet between two hosts can have a as its source or
// destination. It cannot if a is an unspecified, loopback, multicast or broadcast address.
func Forwardable(a netip.Addr) bool {
	return !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// Parse parses the header of the packet at the start of b, and ignores bytes behind the
// packet. It reports false if the packet is malformed: shorter than its header or the length in
// it, of another version, with impossible lengths, or IPv6 with an IPv4-mapped address, which
// must not be used on a network. It does not verify the checksum of an IPv4 header; CheckHeader
// does.
func Parse(b []byte) (h Header, ok bool) {
	if len(b) < header4 {
		return Header{}, false
	}
	switch b[0] >> 4 {
	case 4:
		h = parse4(b)
		return h, h.Len >= header4 && h.Total >= h.Len && h.Total <= len(b)
	case 6:
		if len(b) >= header6 {
			h = parse6(b)
			ok = !h.Src.Is4In6() && !h.Dst.Is4In6() && h.Total <= len(b)
		}
	}
	return h, ok
}

func parse4(b []byte) Header {
	const moreFragments, dontFragment, offset = 0x2000, 0x4000, 0x1fff
	frag := binary.BigEndian.Uint16(b[6:])
	return Header{
		Src: netip.AddrFrom4([4]byte(b[12:16])), Dst: netip.AddrFrom4([4]byte(b[16:20])),
		Len: int(b[0]&0xf) * 4, Total: int(binary.BigEndian.Uint16(b[2:])), Protocol: b[9], TTL: b[8],
		DontFragment: frag&dontFragment != 0, Fragment: frag&(moreFragments|offset) != 0, LaterFragment: frag&offset != 0,
	}
}

func parse6(b []byte) Header {
	return Header{
		Src: netip.AddrFrom16([16]byte(b[8:24])), Dst: netip.AddrFrom16([16]byte(b[24:40])),
		Len: header6, Total: header6 + int(binary.BigEndian.Uint16(b[4:])), Protocol: b[6], TTL: b[7],
		IPv6: true, DontFragment: true,
	}
}

// CheckHeader reports whether the header checksum of the packet b, whose parsed header is h, is
// right. IPv6 has none.
func CheckHeader(b []byte, h Header) bool { return h.IPv6 || fold(headerSum(b[:h.Len])) == 0xffff }

// DecrementTTL decrements the hop limit of a packet that Parse accepts, and
// updates the header checksum. If the hop limit would become zero, it reports false and
// changes nothing.
func DecrementTTL(b []byte) bool {
	if b[0]>>4 == 6 {
		if b[7] <= 1 {
			return false
		}
		b[7]--
		return true
	}
	if b[8] <= 1 {
		return false
	}

	b[8]--
	// A header word that decreases by 0x100 increases the checksum by the same amount.
	c := uint32(binary.BigEndian.Uint16(b[10:])) + 0x100
	if c >= 0xffff {
		c++
	}
	binary.BigEndian.PutUint16(b[10:], uint16(c))
	return true
}

// setTotal writes the length of the packet b, and the header's checksum.
func setTotal(b []byte, ipv6 bool) {
	if ipv6 {
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-header6))
		return
	}
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	setHeaderChecksum(b)
}

func setHeaderChecksum(b []byte) {
	b[10] = 0
	b[11] = 0
	binary.BigEndian.PutUint16(b[10:], ^fold(headerSum(b[:int(b[0]&0xf)*4])))
}

// headerSum is fast for an IPv4 header without options.
func headerSum(b []byte) uint64 {
	w := (*[header4]byte)(b)
	s := uint64(binary.LittleEndian.Uint32(w[0:])) + uint64(binary.LittleEndian.Uint32(w[4:])) +
		uint64(binary.LittleEndian.Uint32(w[8:])) + uint64(binary.LittleEndian.Uint32(w[12:])) +
		uint64(binary.LittleEndian.Uint32(w[16:]))
	if len(b) == header4 {
		return s
	}
	return sum(b[header4:], s)
}

// pseudo returns the sum of the pseudo-header of a transport header.
func pseudo(ip []byte, ipv6 bool, protocol uint8, length int) uint64 {
	rest := swap(uint16(protocol)) + swap(uint16(length))
	if ipv6 {
		return sum(ip[8:40], rest)
	}
	return uint64(binary.LittleEndian.Uint32(ip[12:])) + uint64(binary.LittleEndian.Uint32(ip[16:])) + rest
}
