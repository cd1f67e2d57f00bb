package packet

import (
	"bytes"
	"net/netip"
	"testing"
)

func seeds(f *testing.F) {
	for _, s := range kinds() {
		s.payload = random(40)
		b, o := super(s, 10)
		frame := make([]byte, OffloadLen)
		o.Encode(frame)
		f.Add(append(frame, b...))
		f.Add(b)
		f.Add(append(bytes.Clone(b), b...))
	}
	f.Add([]byte{})
}

// FuzzDeviceFrame does with any bytes what is done with a frame from a device.
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
			t.Fatal("the header comes back as another")
		}
		b = b[OffloadLen:]
		h, fault := Parse(b)
		if fault != Sound {
			return
		}
		b = b[:h.Total]
		DecrementTTL(b)
		for _, c := range []Complaint{Unreachable, TimeExceeded, TooBig} {
			for _, own := range []netip.Addr{netip.MustParseAddr("10.5.1.0"), netip.MustParseAddr("fd00::1")} {
				if m := c.Complain(make([]byte, MaxReply), b, h, own, 1400); m != nil {
					if _, fault := Parse(m); fault != Sound {
						t.Fatalf("a reply that is none: fault %d", fault)
					}
				}
			}
		}
		Fragment(make([]byte, 65535), b, h, 600, func(p []byte) {
			if _, fault := Parse(p); fault != Sound || len(p) > 600 {
				t.Fatalf("fragment of %d bytes, fault %d", len(p), fault)
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
			if _, fault := Parse(p); fault != Sound {
				t.Fatalf("part %d of %d: fault %d", i, segments.Count(), fault)
			}
		}
	})
}

// FuzzDatagrams does with any bytes, cut into datagrams of any size, what is
// done with what a socket has received. What comes out must be what went in.
func FuzzDatagrams(f *testing.F) {
	for _, s := range kinds() {
		s.payload = random(30)
		b, o := super(s, 10)
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
		pending := 0
		finish := func() {
			if pending == 0 {
				return
			}
			b, n := m.Finish()
			if n != pending {
				t.Fatalf("%d packets, want %d", n, pending)
			}
			o := DecodeOffload(b)
			p := b[OffloadLen:]
			h, fault := Parse(p)
			if fault != Sound || h.Total > len(p) {
				t.Fatalf("fault %d in what was merged of %d", fault, n)
			}
			if n > 1 {
				segments, ok := o.Split(p, h)
				if !ok || segments.Count() != n {
					t.Fatalf("%d packets come back as %d", n, segments.Count())
				}
			}
			pending = 0
		}
		for at := OffloadLen; at < len(buf); at += size {
			end := min(at+size, len(buf))
			h, fault := Parse(buf[at:end])
			if fault != Sound {
				continue
			}
			end = at + h.Total
			if pending > 0 && m.Add(at, end) {
				pending++
				continue
			}
			finish()
			m.Begin(buf, at, end, h)
			pending = 1
		}
		finish()
	})
}
