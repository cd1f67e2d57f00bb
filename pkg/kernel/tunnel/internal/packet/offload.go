// SPDX-License-Identifier: Apache-2.0

package packet

import "encoding/binary"

// OffloadLen is the length in bytes of the header that a TUN device with IFF_VNET_HDR
// adds in front of every packet: struct virtio_net_hdr of linux/virtio_net.h, in the byte
// order of the host.
const OffloadLen = 10

// The kinds of super-packets (VIRTIO_NET_HDR_GSO_*).
const (
	gsoNone = 0
	gsoTCP4 = 1
	gsoTCP6 = 4
	gsoUDP  = 5
	gsoECN  = 0x80
)

const needsChecksum = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM

// Offload is the parsed header of OffloadLen bytes. It describes the work that is left
// to the receiver of a packet from or to a TUN device.
type Offload struct {
	flags, gso     uint8
	headerLen      uint16
	size           uint16 // payload bytes of each part of a super-packet
	checksumStart  uint16
	checksumOffset uint16
}

// DecodeOffload parses the header at the start of b, which must have at least OffloadLen
// bytes.
func DecodeOffload(b []byte) Offload {
	_ = b[OffloadLen-1]
	return Offload{
		flags: b[0], gso: b[1] &^ gsoECN, headerLen: binary.NativeEndian.Uint16(b[2:]), size: binary.NativeEndian.Uint16(b[4:]),
		checksumStart: binary.NativeEndian.Uint16(b[6:]), checksumOffset: binary.NativeEndian.Uint16(b[8:]),
	}
}

// Encode writes the header to the start of b.
func (o Offload) Encode(b []byte) {
	_ = b[OffloadLen-1]
	b[0] = o.flags
	b[1] = o.gso
	binary.NativeEndian.PutUint16(b[2:], o.headerLen)
	binary.NativeEndian.PutUint16(b[4:], o.size)
	binary.NativeEndian.PutUint16(b[6:], o.checksumStart)
	binary.NativeEndian.PutUint16(b[8:], o.checksumOffset)
}

// Super reports whether the packet is a super-packet.
func (o Offload) Super() bool { return o.gso != gsoNone }

// Complete writes the transport checksum if o says that packet b lacks it. It reports
// false if the checksum would be outside of b, or if the bytes that it protects would
// begin within the first header4 bytes, which belong to the IP header.
func (o Offload) Complete(b []byte) bool {
	if o.flags&needsChecksum == 0 {
		return true
	}

	start := int(o.checksumStart)
	at := int(o.checksumStart) + int(o.checksumOffset)
	if start < header4 || at+2 > len(b) {
		return false
	}

	// The field contains the sum of the pseudo-header already.
	c := ^fold(sum(b[start:], 0))
	if o.checksumOffset == udpChecksum {
		c = nonzero(c)
	}
	binary.BigEndian.PutUint16(b[at:], c)
	return true
}

// Offsets of the checksum in transport headers.
const (
	tcpChecksum = 16
	udpChecksum = 6
)

const (
	tcpHeader = 20 // length of a TCP header without options
	udpHeader = 8
)

// transportLen returns the length of the transport header at the start of b, or 0 if it is not complete.
func transportLen(b []byte, tcp bool) int {
	n := udpHeader
	if tcp {
		if len(b) < tcpHeader {
			return 0
		}
		n = int(b[12]>>4) * 4
		if n < tcpHeader {
			return 0
		}
	}
	if len(b) < n {
		return 0
	}
	return n
}

// Segments are the packets of a super-packet. They refer to its bytes and contain no
// copy.
type Segments struct {
	packet    []byte
	transport int // offset of the transport header
	headers   int // length of all headers
	size      int // payload bytes of each packet except the last
	count     int
	tcp, ipv6 bool
}

// Split returns the packets of the super-packet b, whose parsed header is h. It reports
// false if b contradicts o, or if the kind of super-packet is unknown.
func (o Offload) Split(b []byte, h Header) (Segments, bool) {
	s := Segments{packet: b[:h.Total], transport: int(o.checksumStart), size: int(o.size), ipv6: h.IPv6}
	switch {
	case o.gso == gsoTCP4 && !h.IPv6, o.gso == gsoTCP6 && h.IPv6:
		s.tcp = true
	case o.gso != gsoUDP:
		return s, false
	}
	if o.flags&needsChecksum == 0 || s.size == 0 || s.transport < h.Len || s.transport > len(s.packet) {
		return s, false
	}

	n := transportLen(s.packet[s.transport:], s.tcp)
	s.headers = s.transport + n
	payload := len(s.packet) - s.headers
	if n == 0 || payload <= 0 {
		return s, false
	}

	s.count = (payload + s.size - 1) / s.size
	return s, true
}

// Count returns the number of packets, which is at least 1.
func (s Segments) Count() int { return s.count }

// Len returns the length in bytes of packet i, counted from 0. Only the last one may be
// shorter than the first.
func (s Segments) Len(i int) int { return min(s.headers+s.size, len(s.packet)-i*s.size) }

// Write writes packet i to dst, which must have Len(i) bytes.
func (s Segments) Write(dst []byte, i int) {
	copy(dst, s.packet[:s.headers])
	copy(dst[s.headers:], s.packet[s.headers+i*s.size:])
	if !s.ipv6 {
		binary.BigEndian.PutUint16(dst[4:], binary.BigEndian.Uint16(dst[4:])+uint16(i))
	}
	setTotal(dst, s.ipv6)

	// The checksum field contains the sum of the pseudo-header of the super-packet. Only
	// the length differs for each packet. Recomputing it from the IP header would be
	// wrong if a routing header contains the real destination.
	t := dst[s.transport:]
	lengths := swap(^uint16(len(s.packet)-s.transport)) + swap(uint16(len(t)))
	if !s.tcp {
		binary.BigEndian.PutUint16(t[4:], uint16(len(t)))
		binary.BigEndian.PutUint16(t[udpChecksum:], nonzero(^fold(sum(t, lengths))))
		return
	}

	binary.BigEndian.PutUint32(t[4:], binary.BigEndian.Uint32(t[4:])+uint32(i*s.size))
	const fin, psh, cwr = 0x01, 0x08, 0x80
	if i < s.count-1 {
		t[13] &^= fin | psh
	}
	if i > 0 {
		t[13] &^= cwr
	}
	binary.BigEndian.PutUint16(t[tcpChecksum:], ^fold(sum(t, lengths)))
}
