// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"bytes"
	"net/netip"
	"testing"
)

func seeds(f *testing.F) {
	for _, s := range packetKinds() {
		s.payload = randomBytes(40)
		b, o := superPacket(s, 10)
		frame := make([]byte, OffloadLen)
		o.Encode(frame)
		f.Add(append(frame, b...))
		f.Add(b)
		f.Add(append(bytes.Clone(b), b...))
	}
	f.Add([]byte{})
}

// FuzzDeviceFrame handles any bytes like a frame from a device. Parse must find no
// fault in the packets that come out.
func FuzzDeviceFrame(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < OffloadLen {
			return
		}
		o := DecodeOffload(b)
		again := make([]byte, OffloadLen)
		o.Encode(again)
		if DecodeOffload(again) != o {
			t.Fatal("the header has changed")
		}
		b = b[OffloadLen:]
		h, ok := Parse(b)
		if !ok {
			return
		}
		b = b[:h.Total]
		DecrementTTL(b)
		for _, c := range []ICMPError{Unreachable, TimeExceeded, TooBig} {
			for _, own := range []netip.Addr{netip.MustParseAddr("10.5.1.0"), netip.MustParseAddr("fd00::1")} {
				if m := c.Write(make([]byte, MinMTU6), b, h, own, 1400); m != nil {
					if _, ok := Parse(m); !ok {
						t.Fatalf("an invalid reply: %x", m)
					}
				}
			}
		}
		Fragment(make([]byte, 65535), b, h, 600, func(p []byte) {
			if _, ok := Parse(p); !ok || len(p) > 600 {
				t.Fatalf("fragment of %d bytes, well-formed: %v", len(p), ok)
			}
		})
		if !o.Super() {
			o.Complete(b)
			return
		}
		segments, ok := o.Split(b, h)
		if !ok {
			return
		}
		for i := range segments.Count() {
			p := make([]byte, segments.Len(i))
			segments.Write(p, i)
			if _, ok := Parse(p); !ok {
				t.Fatalf("part %d of %d is malformed", i, segments.Count())
			}
		}
	})
}

// FuzzDatagrams handles any bytes, split into datagrams of any size, like the result of a
// receive. The packets that come out must be those that went in.
func FuzzDatagrams(f *testing.F) {
	for _, s := range packetKinds() {
		s.payload = randomBytes(30)
		b, o := superPacket(s, 10)
		h, _ := Parse(b)
		segments, _ := o.Split(b, h)
		var all []byte
		for i := range segments.Count() {
			p := make([]byte, segments.Len(i))
			segments.Write(p, i)
			all = append(all, p...)
		}
		f.Add(all, segments.Len(0))
	}
	f.Add([]byte{0x45}, 1)
	f.Fuzz(func(t *testing.T, data []byte, size int) {
		if size <= 0 || len(data) > 65535 {
			return
		}
		buf := append(make([]byte, OffloadLen), data...)
		m := Merger{TCP: true, UDP: true}
		var pending [][]byte // packets that went in
		finish := func() {
			if len(pending) == 0 {
				return
			}
			b, n := m.Finish()
			if n != len(pending) {
				t.Fatalf("%d packets, want %d", n, len(pending))
			}
			o := DecodeOffload(b)
			p := b[OffloadLen:]
			h, ok := Parse(p)
			if !ok || h.Total > len(p) {
				t.Fatalf("%d merged packets are malformed", n)
			}
			if n > 1 {
				segments, ok := o.Split(p, h)
				if !ok || segments.Count() != n {
					t.Fatalf("%d packets went in, %d came out", n, segments.Count())
				}
				for i, want := range pending {
					expectPart(t, segments, i, want)
				}
			} else if !bytes.Equal(p, pending[0]) {
				t.Fatalf("a single packet is\n%x, was\n%x", p, pending[0])
			}
			pending = nil
		}
		for at := OffloadLen; at < len(buf); at += size {
			end := min(at+size, len(buf))
			one := bytes.Clone(buf[at:end])
			h, ok := Parse(one)
			if len(pending) > 0 && m.Add(at, end) { // Add must accept only valid packets, although nothing has checked this one
				if !ok || !CheckHeader(one, h) || h.Total != len(one) {
					t.Fatalf("added although it is malformed:\n%x", one)
				}
				pending = append(pending, one)
				continue
			}
			if !ok || !CheckHeader(one, h) {
				continue
			}
			finish()
			m.Begin(buf, at, at+h.Total, h)
			pending = [][]byte{one[:h.Total]}
		}
		finish()
	})
}

// normal returns packet b, whose transport header is at the given offset, without the
// differences that merging and splitting may cause: the identification of a packet that
// must not be fragmented, the header checksum, and the form of a zero transport
// checksum.
func normal(b []byte, transport int, tcp bool) []byte {
	b = bytes.Clone(b)
	if b[0]>>4 == 4 {
		const dontFragment = 0x40
		if b[6]&dontFragment != 0 {
			clear(b[4:6])
		}
		clear(b[10:12])
	}
	field := b[transport+udpChecksum:]
	if tcp {
		field = b[transport+tcpChecksum:]
	}
	if field[0] == 0xff && field[1] == 0xff {
		clear(field[:2])
	}
	return b
}

// expectPart fails the test unless part i of a super-packet equals the packet want that was
// merged into it, apart from the differences that normal removes.
func expectPart(t *testing.T, segments Segments, i int, want []byte) {
	t.Helper()
	got := make([]byte, segments.Len(i))
	segments.Write(got, i)
	if s := segments; !bytes.Equal(normal(got, s.transport, s.tcp), normal(want, s.transport, s.tcp)) {
		t.Fatalf("part %d is\n%x, was\n%x", i, got, want)
	}
}
