// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"bytes"
	"encoding/binary"
)

const (
	maxSuper    = 65535 // maximum bytes of a super-packet
	maxSegments = 64    // maximum packets of a UDP super-packet (UDP_MAX_SEGMENTS)
)

// Merger combines consecutive packets in a buffer into super-packets, in place. The
// zero Merger combines nothing.
type Merger struct {
	// TCP and UDP report which super-packets the receiver accepts.
	TCP, UDP bool

	buf        []byte
	start, end int // range of the gathered packets in buf
	count      int // number of gathered packets
	headers    int // length of all headers; 0 if no packet can be added
	transport  int // offset of the transport header in a packet
	size       int // payload bytes of each packet except the last
	tcp, ipv6  bool
	full       bool // no packet may follow
}

// Begin starts a super-packet with the packet buf[start:end], whose parsed header is h. It
// discards the gathered packets. The merger owns buf from start to the end of the gathered
// packets, and the OffloadLen bytes before start, until the next Begin.
func (m *Merger) Begin(buf []byte, start, end int, h Header) {
	*m = Merger{
		TCP: m.TCP, UDP: m.UDP, buf: buf, start: start, end: end, count: 1,
		tcp: h.Protocol == protoTCP, ipv6: h.IPv6, transport: h.Len,
	}
	plain := h.IPv6 || h.Len == header4
	wanted := m.tcp && m.TCP || h.Protocol == protoUDP && m.UDP
	if !plain || h.Fragment || !wanted {
		return
	}

	b := buf[start:end]
	t := b[h.Len:]
	if n := transportLen(t, m.tcp); n != 0 && n < len(t) && m.mergeable(t) {
		m.headers = h.Len + n
		m.size = len(b) - m.headers
		m.full = m.tcp && t[13]&flagPSH != 0 // PSH ends a super-packet
	}
}

const (
	flagPSH = 0x08
	flagACK = 0x10
)

// mergeable reports whether a packet whose transport header and payload are t can be part of a super-packet.
func (m *Merger) mergeable(t []byte) bool {
	if m.tcp {
		return t[13]&^flagPSH == flagACK
	}
	return int(binary.BigEndian.Uint16(t[4:])) == len(t) && binary.BigEndian.Uint16(t[udpChecksum:]) != 0
}

// Add adds the packet buf[start:end], which must be behind the gathered ones in buf. It
// does so if the packet fits, is the next one of the same stream, and has correct
// checksums. Otherwise Add reports false and changes nothing. The caller need not have
// checked the packet, because all parts of the header that decide whether and where it may
// go equal those of the earlier packets.
func (m *Merger) Add(start, end int) bool {
	a := m.buf[m.start:m.end]
	b := m.buf[start:end]
	size := len(b) - m.headers
	switch {
	case m.headers == 0 || m.full || size <= 0 || size > m.size || len(a)+size > maxSuper,
		!m.tcp && m.count == maxSegments,
		!m.continues(a, b),
		!m.ipv6 && fold(headerSum(b[:header4])) != 0xffff,
		m.count == 1 && !m.verify(a),
		!m.verify(b):
		return false
	}

	push := m.tcp && b[m.transport+13]&flagPSH != 0
	if push {
		a[m.transport+13] |= flagPSH
	}

	m.end += copy(m.buf[m.end:], b[m.headers:])
	m.count++
	m.full = push || size < m.size
	return true
}

// End returns the offset in the buffer where the gathered packets end, and whether
// packets can be added.
func (m *Merger) End() (end int, grows bool) { return m.end, m.headers != 0 && !m.full }

// continues reports whether b continues the data of a, with equal headers.
func (m *Merger) continues(a, b []byte) bool {
	if m.ipv6 {
		if [4]byte(a) != [4]byte(b) || a[6] != b[6] || a[7] != b[7] || [32]byte(a[8:]) != [32]byte(b[8:]) ||
			int(binary.BigEndian.Uint16(b[4:])) != len(b)-header6 {
			return false
		}
	} else {
		const dontFragment = 0x40
		if a[0] != b[0] || a[1] != b[1] || [4]byte(a[6:]) != [4]byte(b[6:]) || [8]byte(a[12:]) != [8]byte(b[12:]) ||
			int(binary.BigEndian.Uint16(b[2:])) != len(b) {
			return false
		}
		if a[6]&dontFragment == 0 && binary.BigEndian.Uint16(b[4:]) != binary.BigEndian.Uint16(a[4:])+uint16(m.count) {
			return false // splitting would change the identification, which receivers of fragments need
		}
	}

	x := a[m.transport:]
	y := b[m.transport:]
	if [4]byte(x) != [4]byte(y) || !m.mergeable(y) {
		return false
	}
	if !m.tcp {
		return true
	}

	n := m.headers - m.transport
	return binary.BigEndian.Uint32(y[4:]) == binary.BigEndian.Uint32(x[4:])+uint32(m.count*m.size) &&
		[4]byte(x[8:]) == [4]byte(y[8:]) && x[12] == y[12] &&
		[2]byte(x[14:]) == [2]byte(y[14:]) && bytes.Equal(x[18:n], y[18:n])
}

// verify checks the transport checksum of one packet. Finish computes a new one for the super-packet,
// which would hide an error.
func (m *Merger) verify(b []byte) bool {
	protocol := uint8(protoUDP)
	if m.tcp {
		protocol = protoTCP
	}
	t := b[m.transport:]
	return fold(sum(t, pseudo(b, m.ipv6, protocol, len(t)))) == 0xffff
}

// Finish returns the gathered packets, as one packet behind its Offload header, and
// their number. Begin must have been called. b is a part of the buffer, and is valid
// until the next Begin.
func (m *Merger) Finish() (b []byte, count int) {
	b = m.buf[m.start-OffloadLen : m.end]
	if m.count == 1 {
		Offload{}.Encode(b)
		return b, 1
	}

	o := Offload{
		flags: needsChecksum, gso: gsoUDP, headerLen: uint16(m.headers), size: uint16(m.size),
		checksumStart: uint16(m.transport), checksumOffset: udpChecksum,
	}

	protocol := uint8(protoUDP)
	p := b[OffloadLen:]
	setTotal(p, m.ipv6)
	t := p[m.transport:]
	if m.tcp {
		o.gso = gsoTCP4
		o.checksumOffset = tcpChecksum
		protocol = protoTCP
		if m.ipv6 {
			o.gso = gsoTCP6
		}
	} else {
		binary.BigEndian.PutUint16(t[4:], uint16(len(t)))
	}

	o.Encode(b)
	binary.BigEndian.PutUint16(t[o.checksumOffset:], fold(pseudo(p, m.ipv6, protocol, len(t))))
	return b, m.count
}
