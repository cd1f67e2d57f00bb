// Package packet reads IP packets, changes them in place, splits super-packets
// into what goes over a wire and merges what came from one. It is pure and
// takes any bytes: whatever is wrong with a packet is a Fault.
package packet

import (
	"encoding/binary"
	"net/netip"
)

// The transport protocols that are split and merged, and ICMP.
const (
	protoICMP   = 1
	protoTCP    = 6
	protoUDP    = 17
	protoICMPv6 = 58
)

const (
	header4 = 20 // bytes of an IPv4 header without options
	header6 = 40 // bytes of an IPv6 header
)

// Fault is what is wrong with a packet; zero means nothing.
type Fault uint8

// The faults of a packet.
const (
	Sound       Fault = iota
	Truncated         // shorter than its header, or than its header says
	BadVersion        // neither IPv4 nor IPv6
	BadHeader         // a header length that cannot be
	BadChecksum       // of the IPv4 header
)

// Header is what of an IP header decides where a packet goes.
type Header struct {
	Src, Dst netip.Addr
	Len      int   // bytes of the IP header, without IPv6 extension headers
	Total    int   // bytes of the packet, header included: at most what there is
	Protocol uint8 // of the IP header itself: of IPv6, the next header
	TTL      uint8
	IPv6     bool
	// DontFragment is set if routers may not fragment the packet: always on IPv6.
	DontFragment bool
	// Fragment is set on parts of a packet, Later on those but the first.
	Fragment, Later bool
}

// Forwardable reports whether a can be the source or the destination of a packet that
// goes from one host to another. Unspecified, loopback, multicast and broadcast addresses
// cannot.
func Forwardable(a netip.Addr) bool {
	return !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// Parse reads the header of packet b, which may be followed by other bytes.
// The checksum of an IPv4 header is left to CheckHeader.
func Parse(b []byte) (Header, Fault) {
	if len(b) < header4 {
		return Header{}, Truncated
	}
	switch b[0] >> 4 {
	case 4:
		return parse4(b)
	case 6:
		return parse6(b)
	}
	return Header{}, BadVersion
}

func parse4(b []byte) (Header, Fault) {
	const moreFragments, dontFragment, offset = 0x2000, 0x4000, 0x1fff
	frag := binary.BigEndian.Uint16(b[6:])
	h := Header{
		Src: netip.AddrFrom4([4]byte(b[12:16])), Dst: netip.AddrFrom4([4]byte(b[16:20])),
		Len: int(b[0]&0xf) * 4, Total: int(binary.BigEndian.Uint16(b[2:])), Protocol: b[9], TTL: b[8],
		DontFragment: frag&dontFragment != 0, Fragment: frag&(moreFragments|offset) != 0, Later: frag&offset != 0,
	}
	switch {
	case h.Len < header4 || h.Total < h.Len:
		return h, BadHeader
	case h.Total > len(b):
		return h, Truncated
	}
	return h, Sound
}

func parse6(b []byte) (Header, Fault) {
	if len(b) < header6 {
		return Header{}, Truncated
	}
	h := Header{
		Src: netip.AddrFrom16([16]byte(b[8:24])), Dst: netip.AddrFrom16([16]byte(b[24:40])),
		Len: header6, Total: header6 + int(binary.BigEndian.Uint16(b[4:])), Protocol: b[6], TTL: b[7],
		IPv6: true, DontFragment: true,
	}
	switch {
	case h.Src.Is4In6() || h.Dst.Is4In6(): // such addresses are not for the wire
		return h, BadHeader
	case h.Total > len(b):
		return h, Truncated
	}
	return h, Sound
}

// CheckHeader verifies the header checksum of packet b, of which h was parsed.
// IPv6 has none.
func CheckHeader(b []byte, h Header) Fault {
	if !h.IPv6 && fold(headerSum(b[:h.Len])) != 0xffff {
		return BadChecksum
	}
	return Sound
}

// DecrementTTL takes one hop off a packet that Parse has found sound. It
// reports false, and changes nothing, if none is left then.
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
	// A word of the header that is less by 0x100 makes the checksum more by as much.
	c := uint32(binary.BigEndian.Uint16(b[10:])) + 0x100
	if c >= 0xffff {
		c++
	}
	binary.BigEndian.PutUint16(b[10:], uint16(c))
	return true
}

// setTotal writes the length of the whole packet b into its IP header, and the
// header's checksum.
func setTotal(b []byte, ipv6 bool) {
	if ipv6 {
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-header6))
		return
	}
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	setHeaderChecksum(b)
}

func setHeaderChecksum(b []byte) {
	b[10], b[11] = 0, 0
	binary.BigEndian.PutUint16(b[10:], ^fold(headerSum(b[:int(b[0]&0xf)*4])))
}

// pseudo starts the checksum of a transport header: addresses, protocol and
// length, in bytes.
func pseudo(ip []byte, ipv6 bool, protocol uint8, length int) uint64 {
	rest := swap(uint16(protocol)) + swap(uint16(length))
	if ipv6 {
		return sum(ip[8:40], rest)
	}
	return uint64(binary.LittleEndian.Uint32(ip[12:])) + uint64(binary.LittleEndian.Uint32(ip[16:])) + rest
}
