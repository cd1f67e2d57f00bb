package packet

import (
	"encoding/binary"
	"net/netip"
)

// Complaint is what a router has to say to the sender of a packet.
type Complaint uint8

// The complaints.
const (
	Unreachable  Complaint = iota // no route to the destination's network
	TimeExceeded                  // no hops left
	TooBig                        // for the next link, and not to be fragmented
)

// MaxReply is the length in bytes that no answer of Complain exceeds.
const MaxReply = MinMTU6

// MinMTU6 is the size in bytes of packets that every IPv6 link carries.
const MinMTU6 = 1280

const (
	icmpHeader = 8
	maxHeader4 = 60
	// replyTTL is low: the sender is on this host. The C part of flannel's udp
	// backend has the same.
	replyTTL = 8
)

// Complain writes the ICMP message about packet b, of which h was parsed, to
// the start of dst, which is at least MaxReply bytes long, and returns it. The
// message comes from src; mtu goes with TooBig. It is nil where none may be
// sent.
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

// form is what differs between the families in a message.
type form struct {
	header          int  // bytes of the IP header
	first           byte // of it
	ttl, protocolAt int  // where the hop limit is, and how far behind it the protocol
	addresses       int  // where they begin
	protocol        byte
	codes           [3][2]byte // type and code of each complaint
	minMTU          int        // that may be reported
	// quoted is how many bytes of the packet follow its IP header at most. IPv6 fills
	// the message (RFC 4443): ports may be behind extension headers.
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

// isError reports whether an ICMP type is of a message that none may be sent about.
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
