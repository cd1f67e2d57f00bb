// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"
)

const rtaNexthopID = 30 // RTA_NH_ID, an attribute of routes, for which x/sys has no constant

func align(n int) int { return (n + 3) &^ 3 }

// message builds one or more rtnetlink messages in one buffer.
type message struct {
	buf   []byte
	start int // offset of the message under construction
}

// begin starts the next message. body is its fixed part (struct rtmsg, ndmsg and others).
func (m *message) begin(typ, flags uint16, body ...byte) {
	m.start = len(m.buf)
	m.buf = append(m.buf, make([]byte, unix.NLMSG_HDRLEN)...)
	binary.NativeEndian.PutUint16(m.buf[m.start+4:], typ)
	binary.NativeEndian.PutUint16(m.buf[m.start+6:], flags|unix.NLM_F_REQUEST)
	m.buf = append(m.buf, body...)
	m.pad()
}

func (m *message) setFlags(flags uint16) {
	b := m.buf[m.start+6:]
	binary.NativeEndian.PutUint16(b, binary.NativeEndian.Uint16(b)|flags)
}

// finish sets the length and the sequence number of the message that begin has started.
func (m *message) finish(seq uint32) {
	binary.NativeEndian.PutUint32(m.buf[m.start:], uint32(len(m.buf)-m.start))
	binary.NativeEndian.PutUint32(m.buf[m.start+8:], seq)
}

func (m *message) pad() {
	for len(m.buf)%4 != 0 {
		m.buf = append(m.buf, 0)
	}
}

func (m *message) attr(typ uint16, data []byte) {
	m.buf = binary.NativeEndian.AppendUint16(m.buf, uint16(4+len(data)))
	m.buf = binary.NativeEndian.AppendUint16(m.buf, typ)
	m.buf = append(m.buf, data...)
	m.pad()
}

func (m *message) attr32(typ uint16, v uint32) {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], v)
	m.attr(typ, b[:])
}

func (m *message) addr(typ uint16, a netip.Addr) {
	b := a.As16()
	if a.Is4() {
		m.attr(typ, b[12:])
		return
	}
	m.attr(typ, b[:])
}

// nest adds an attribute that contains the attributes that fill adds.
func (m *message) nest(typ uint16, fill func()) {
	at := len(m.buf)
	m.attr(typ, nil)
	fill()
	binary.NativeEndian.PutUint16(m.buf[at:], uint16(len(m.buf)-at))
}

// attribute is one struct rtattr.
type attribute struct {
	typ  uint16
	data []byte
}

// attributes iterates over the attributes in b. It ends at the first malformed one.
func attributes(b []byte) iter.Seq[attribute] {
	return func(yield func(attribute) bool) {
		for len(b) >= 4 {
			n := int(binary.NativeEndian.Uint16(b))
			if n < 4 || n > len(b) {
				return
			}
			typ := binary.NativeEndian.Uint16(b[2:]) &^ uint16(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER)
			if !yield(attribute{typ, b[4:n]}) {
				return
			}
			b = b[min(align(n), len(b)):]
		}
	}
}

func (a attribute) uint32() uint32 {
	if len(a.data) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(a.data)
}

func (a attribute) addr() netip.Addr {
	ip, _ := netip.AddrFromSlice(a.data)
	return ip
}

func familyOf(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// The functions below encode the structs of rtnetlink(7) after which they are named.

func rtmsg(dst netip.Prefix, tos, table, protocol, scope, typ uint8, flags uint32) []byte {
	b := []byte{familyOf(dst.Addr()), uint8(dst.Bits()), 0, tos, table, protocol, scope, typ, 0, 0, 0, 0}
	binary.NativeEndian.PutUint32(b[8:], flags)
	return b
}

func ndmsg(family uint8, ifindex int, state uint16, flags uint8) []byte {
	b := []byte{family, 0, 0, 0, 0, 0, 0, 0, 0, 0, flags, 0}
	binary.NativeEndian.PutUint32(b[4:], uint32(ifindex))
	binary.NativeEndian.PutUint16(b[8:], state)
	return b
}

func ifinfomsg(index int) []byte {
	b := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(b[4:], uint32(index))
	return b
}

func ifaddrmsg(p netip.Prefix, flags uint8, index int) []byte {
	b := []byte{familyOf(p.Addr()), uint8(p.Bits()), flags, unix.RT_SCOPE_UNIVERSE}
	return binary.NativeEndian.AppendUint32(b, uint32(index))
}

func nhmsg(family, protocol uint8, flags uint32) []byte {
	b := []byte{family, 0, protocol, 0, 0, 0, 0, 0}
	binary.NativeEndian.PutUint32(b[4:], flags)
	return b
}
