package packet

import "encoding/binary"

// OffloadLen is the length in bytes of the header that a TUN device with
// IFF_VNET_HDR puts before every packet: struct virtio_net_hdr.
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

// Offload says what is still to be done to a packet from a TUN device, or what
// the device has to do to one.
type Offload struct {
	flags, gso     uint8
	headerLen      uint16
	size           uint16 // payload bytes of each part of a super-packet
	checksumStart  uint16
	checksumOffset uint16
}

// DecodeOffload reads the header at the start of b, which has OffloadLen bytes
// or more.
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
	b[0], b[1] = o.flags, o.gso
	binary.NativeEndian.PutUint16(b[2:], o.headerLen)
	binary.NativeEndian.PutUint16(b[4:], o.size)
	binary.NativeEndian.PutUint16(b[6:], o.checksumStart)
	binary.NativeEndian.PutUint16(b[8:], o.checksumOffset)
}

// Super reports whether the packet stands for several.
func (o Offload) Super() bool { return o.gso != gsoNone }

// Complete writes the transport checksum that packet b still needs. It reports
// false if there is no place for it.
func (o Offload) Complete(b []byte) bool {
	if o.flags&needsChecksum == 0 {
		return true
	}
	start, at := int(o.checksumStart), int(o.checksumStart)+int(o.checksumOffset)
	if start < header4 || at+2 > len(b) {
		return false
	}
	// The field holds the sum of the pseudo-header already.
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
	tcpHeader = 20 // without options
	udpHeader = 8
)

// transportLen returns how long the transport header at the start of b is, or
// 0 if b is too short for it.
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

// Segments are the packets that a super-packet stands for.
type Segments struct {
	packet    []byte
	transport int // where the transport header begins
	headers   int // length of all headers
	size      int // payload bytes of each but the last
	count     int
	tcp, ipv6 bool
	// What the headers add to the checksums of each packet, without the fields in
	// which packets differ.
	ipSum, transportSum uint64
}

// Split returns the packets for which super-packet b stands, of which h was
// parsed. It reports false if b is not what o says.
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
	s.addHeaders(h.Len)
	return s, true
}

// addHeaders adds up the headers, of which the IP header is n bytes long.
func (s *Segments) addHeaders(n int) {
	ip, t := s.packet[:n], s.packet[s.transport:s.headers]
	if !s.ipv6 {
		s.ipSum = swap(fold(headerSum(ip))) + without(ip, 2, 4, 10) // length, number and checksum
	}
	// The field of the checksum holds the sum of the pseudo-header for all. Only the length
	// differs, and where a routing header names the last destination it is there alone.
	s.transportSum = swap(fold(sum(t, swap(^uint16(len(s.packet)-s.transport)))))
	if s.tcp {
		s.transportSum += without(t, 4, 6, 12) // sequence number, flags
	} else {
		s.transportSum += without(t, 4) // length
	}
}

// without is what takes fields out of a sum that has them: their complements.
func without(b []byte, fields ...int) (s uint64) {
	for _, at := range fields {
		s += swap(^binary.BigEndian.Uint16(b[at:]))
	}
	return s
}

// Count returns how many packets there are: one or more.
func (s Segments) Count() int { return s.count }

// Len returns the length in bytes of the i-th packet. All but the last are as
// long as the first.
func (s Segments) Len(i int) int { return min(s.headers+s.size, len(s.packet)-i*s.size) }

// Write writes the i-th packet to dst, which is Len(i) bytes long.
func (s Segments) Write(dst []byte, i int) {
	copy(dst, s.packet[:s.headers])
	payload := s.packet[s.headers+i*s.size:][:len(dst)-s.headers]
	copy(dst[s.headers:], payload)
	if s.ipv6 {
		binary.BigEndian.PutUint16(dst[4:], uint16(len(dst)-header6))
	} else {
		total, number := uint16(len(dst)), binary.BigEndian.Uint16(s.packet[4:])+uint16(i)
		binary.BigEndian.PutUint16(dst[2:], total)
		binary.BigEndian.PutUint16(dst[4:], number)
		binary.BigEndian.PutUint16(dst[10:], ^fold(s.ipSum+swap(total)+swap(number)))
	}
	t := dst[s.transport:]
	c := s.transportSum + swap(uint16(len(t)))
	if !s.tcp {
		binary.BigEndian.PutUint16(t[4:], uint16(len(t)))
		c = sum(payload, c+swap(uint16(len(t))))
		binary.BigEndian.PutUint16(t[udpChecksum:], nonzero(^fold(c)))
		return
	}
	sequence := binary.BigEndian.Uint32(s.packet[s.transport+4:]) + uint32(i*s.size)
	flags := binary.BigEndian.Uint16(s.packet[s.transport+12:]) // and the length of the header
	const fin, psh, cwr = 0x01, 0x08, 0x80
	if i < s.count-1 {
		flags &^= fin | psh
	}
	if i > 0 {
		flags &^= cwr
	}
	binary.BigEndian.PutUint32(t[4:], sequence)
	binary.BigEndian.PutUint16(t[12:], flags)
	c = sum(payload, c+swap(uint16(sequence>>16))+swap(uint16(sequence))+swap(flags))
	binary.BigEndian.PutUint16(t[tcpChecksum:], ^fold(c))
}
