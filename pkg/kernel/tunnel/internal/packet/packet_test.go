// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// referenceChecksum computes the Internet checksum literally as in RFC 1071.
func referenceChecksum(parts ...[]byte) uint16 {
	var s uint32
	for _, b := range parts {
		for i := 0; i < len(b); i += 2 {
			w := uint32(b[i]) << 8
			if i+1 < len(b) {
				w |= uint32(b[i+1])
			}
			s += w
			s = s&0xffff + s>>16
		}
	}
	return ^uint16(s)
}

// randomBytes returns n bytes, which are the same in every run.
func randomBytes(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{7})
	_, _ = r.Read(b)
	return b
}

func TestSum(t *testing.T) {
	data := randomBytes(2000)
	for n := range 300 {
		for _, at := range []int{0, 1, 3} {
			b := data[at : at+n]
			if got, want := ^fold(sum(b, 0)), referenceChecksum(b); got != want {
				t.Fatalf("%d bytes at %d: %#x, want %#x", n, at, got, want)
			}
		}
	}
	ones := bytes.Repeat([]byte{0xff}, 1472)
	if got := fold(sum(ones, 0)); got != 0xffff {
		t.Errorf("all ones: %#x", got)
	}
}

// spec describes a packet to be built.
type spec struct {
	ipv6, tcp bool
	payload   []byte
	flags     byte // TCP flags
	seq       uint32
	id        uint16
	fragments bool // fragmentation is allowed
	options   []byte
	ipOptions []byte
	// extension is the first IPv6 extension header, and typ its type. buildPacket
	// replaces the first byte of extension by the protocol that follows.
	extension []byte
	typ       byte
	apart     bool // the packet must not be merged with others
}

// buildPacket returns the packet that s describes, with all checksums.
func buildPacket(s spec) []byte {
	transport := udpHeader
	if s.tcp {
		transport = tcpHeader + len(s.options)
	}
	ip, protocol := header4+len(s.ipOptions), byte(protoUDP)
	if s.ipv6 {
		ip = header6 + len(s.extension)
	}
	if s.tcp {
		protocol = protoTCP
	}
	b := make([]byte, ip+transport+len(s.payload))
	if s.ipv6 {
		b[0], b[6], b[7] = 6<<4, protocol, 64
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-header6))
		copy(b[8:], netip.MustParseAddr("fd00:10:5:1::2").AsSlice())
		copy(b[24:], netip.MustParseAddr("fd00:10:5:2::2").AsSlice())
		if len(s.extension) > 0 {
			copy(b[header6:], s.extension)
			b[6], b[header6] = s.typ, protocol
		}
	} else {
		b[0], b[8], b[9] = 4<<4|byte(ip/4), 64, protocol
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
		binary.BigEndian.PutUint16(b[4:], s.id)
		if !s.fragments {
			b[6] = 0x40
		}
		copy(b[12:], []byte{10, 5, 1, 2})
		copy(b[16:], []byte{10, 5, 2, 2})
		copy(b[header4:], s.ipOptions)
		binary.BigEndian.PutUint16(b[10:], referenceChecksum(b[:ip]))
	}
	t := b[ip:]
	binary.BigEndian.PutUint16(t, 4321)
	binary.BigEndian.PutUint16(t[2:], 80)
	copy(t[transport:], s.payload)
	field := udpChecksum
	if s.tcp {
		field = tcpChecksum
		binary.BigEndian.PutUint32(t[4:], s.seq)
		binary.BigEndian.PutUint32(t[8:], 99)
		t[12], t[13] = byte(transport/4)<<4, s.flags
		binary.BigEndian.PutUint16(t[14:], 500)
		copy(t[tcpHeader:], s.options)
	} else {
		binary.BigEndian.PutUint16(t[4:], uint16(len(t)))
	}
	binary.BigEndian.PutUint16(t[field:], checksumOf(b))
	return b
}

const (
	hopByHop      = 0
	routing       = 43
	routingHeader = 24 // length with one address
)

// transportOf returns the offsets of the transport header and its checksum in packet b,
// and the pseudo-header (RFC 8200, 8.1: with the last destination).
func transportOf(b []byte) (at, field int, pseudo []byte) {
	at, protocol, addresses := int(b[0]&0xf)*4, b[9], bytes.Clone(b[12:20])
	if b[0]>>4 == 6 {
		at, protocol, addresses = header6, b[6], bytes.Clone(b[8:40])
		if protocol == hopByHop || protocol == routing {
			at = header6 + int(b[header6+1]+1)*8
			if protocol == routing {
				copy(addresses[16:], b[header6+8:header6+routingHeader])
			}
			protocol = b[header6]
		}
	}
	field = at + udpChecksum
	if protocol == protoTCP {
		field = at + tcpChecksum
	}
	return at, field, append(addresses, 0, protocol, byte((len(b)-at)>>8), byte(len(b)-at))
}

// checksumOf computes the transport checksum of packet b.
func checksumOf(b []byte) uint16 {
	at, field, pseudo := transportOf(b)
	c := bytes.Clone(b)
	c[field], c[field+1] = 0, 0
	sum := referenceChecksum(pseudo, c[at:])
	if sum == 0 && field == at+udpChecksum {
		return 0xffff
	}
	return sum
}

// expectValid fails the test unless the lengths and checksums of packet b are right.
func expectValid(t *testing.T, b []byte) Header {
	t.Helper()
	h, ok := Parse(b)
	if ok {
		ok = CheckHeader(b, h)
	}
	if !ok || h.Total != len(b) {
		t.Fatalf("well-formed: %v, length %d in the header of %d bytes: %x", ok, h.Total, len(b), b[:min(len(b), 60)])
	}
	_, field, _ := transportOf(b)
	if got, want := binary.BigEndian.Uint16(b[field:]), checksumOf(b); got != want {
		t.Fatalf("transport checksum %#x, want %#x", got, want)
	}
	return h
}

// superPacket returns the packet that s describes as a super-packet from a device: without a
// complete transport checksum, and with its offload header o. size is the number of payload
// bytes of each part.
func superPacket(s spec, size int) (b []byte, o Offload) {
	b = buildPacket(s)
	at, field, pseudo := transportOf(b)
	binary.BigEndian.PutUint16(b[field:], ^referenceChecksum(pseudo))
	o = Offload{flags: needsChecksum, gso: gsoUDP, size: uint16(size), checksumStart: uint16(at), checksumOffset: uint16(field - at)}
	if s.tcp {
		o.gso = gsoTCP4
		if s.ipv6 {
			o.gso = gsoTCP6
		}
	}
	return b, o
}

func packetKinds() map[string]spec {
	options := []byte{1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8}
	last := netip.MustParseAddr("fd00:10:5:3::3")
	via := append([]byte{0, routingHeader/8 - 1, 2, 1, 0, 0, 0, 0}, last.AsSlice()...)
	return map[string]spec{
		"TCP on IPv4": {tcp: true, flags: flagACK | flagPSH, options: options, seq: 0xfffffff0, id: 0xfffe},
		"TCP on IPv6": {tcp: true, ipv6: true, flags: flagACK | flagPSH, options: options, seq: 5},
		"UDP on IPv4": {id: 7, fragments: true},
		"UDP on IPv6": {ipv6: true},

		"TCP behind IP options":       {tcp: true, flags: flagACK, ipOptions: []byte{0x94, 4, 0, 0}, apart: true},
		"UDP behind IP options":       {ipOptions: []byte{0x94, 4, 0, 0}, apart: true},
		"TCP behind a routing header": {tcp: true, flags: flagACK, ipv6: true, typ: routing, extension: via, apart: true},
		"UDP behind a routing header": {ipv6: true, typ: routing, extension: via, apart: true},
		"TCP behind hop-by-hop":       {tcp: true, flags: flagACK, ipv6: true, typ: hopByHop, extension: []byte{0, 0, 5, 2, 0, 0, 1, 0}, apart: true},
	}
}

// TestSplitAndMerge splits super-packets, checks every part, and merges the parts again.
func TestSplitAndMerge(t *testing.T) {
	for name, s := range packetKinds() {
		for _, size := range []int{1, 100, 101, 1420} {
			for _, parts := range []int{1, 2, 3, 44, 64} {
				for _, less := range []int{0, size / 2} {
					s.payload = randomBytes(max(size*parts-less, 1))
					if len(s.payload) > 65000 {
						continue
					}
					t.Run(fmt.Sprintf("%s/%d of %d less %d", name, parts, size, less), func(t *testing.T) { splitAndMerge(t, s, size) })
				}
			}
		}
	}
}

// TestSplitZeroChecksum checks that a datagram whose checksum is computed as zero
// contains 0xffff, because zero means that there is no checksum.
func TestSplitZeroChecksum(t *testing.T) {
	for _, name := range []string{"UDP on IPv4", "UDP on IPv6"} {
		s := packetKinds()[name]
		s.payload = randomBytes(300)
		part := func() []byte {
			b, o := superPacket(s, 100)
			h, _ := Parse(b)
			segments, ok := o.Split(b, h)
			if !ok {
				t.Fatal("not split")
			}
			p := make([]byte, segments.Len(1))
			segments.Write(p, 1)
			expectValid(t, p)
			return p
		}
		p := part()
		at, field, _ := transportOf(p)
		// Adding the checksum to the payload makes the sum all ones, so that the checksum, its
		// complement, becomes zero.
		sum := uint32(binary.BigEndian.Uint16(s.payload[100:])) + uint32(binary.BigEndian.Uint16(p[field:]))
		binary.BigEndian.PutUint16(s.payload[100:], uint16(sum+sum>>16))
		p = part()
		if got := binary.BigEndian.Uint16(p[field:]); got != 0xffff {
			t.Errorf("%s: checksum %#x of the datagram at %d, want 0xffff", name, got, at)
		}
	}
}

func splitAndMerge(t *testing.T, s spec, size int) {
	b, o := superPacket(s, size)
	h, _ := Parse(b)
	segments, ok := o.Split(b, h)
	if !ok {
		t.Fatal("not split")
	}
	buf := make([]byte, OffloadLen)
	var cuts []int
	var payload []byte
	for i := range segments.Count() {
		p := make([]byte, segments.Len(i))
		segments.Write(p, i)
		expectValid(t, p)
		if i < segments.Count()-1 && s.tcp && p[segments.transport+13] != flagACK {
			t.Errorf("part %d has flags %#x", i, p[segments.transport+13])
		}
		payload = append(payload, p[segments.headers:]...)
		cuts = append(cuts, len(buf))
		buf = append(buf, p...)
	}
	if !bytes.Equal(payload, s.payload) {
		t.Fatal("the parts contain other data")
	}
	end := len(buf)
	m := Merger{TCP: true, UDP: true}
	for i, at := range cuts {
		to := end
		if i+1 < len(cuts) {
			to = cuts[i+1]
		}
		h, _ := Parse(buf[at:to])
		if i == 0 || s.apart {
			m.Begin(buf, at, to, h)
		} else if !m.Add(at, to) {
			t.Fatalf("part %d was not added", i)
		}
		if s.apart && i > 0 && m.Add(cuts[i-1], at) {
			t.Fatal("merged")
		}
	}
	if s.apart {
		return
	}
	got, count := m.Finish()
	if count != len(cuts) {
		t.Errorf("%d packets merged, want %d", count, len(cuts))
	}
	back := DecodeOffload(got)
	got = got[OffloadLen:]
	if len(cuts) == 1 {
		if back.Super() || !bytes.Equal(got, buf[OffloadLen:]) {
			t.Error("a single packet was changed")
		}
		return
	}
	if !back.Super() || !back.Complete(got) {
		t.Fatal("no super-packet")
	}
	if diff := cmp.Diff(hex.Dump(buildPacket(s)), hex.Dump(got)); diff != "" {
		t.Error(diff)
	}
}

// TestMergeRefuses changes one of two packets in ways that must prevent merging.
func TestMergeRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		kind   string
		change func(first, second *spec)
		spoil  func(first, second []byte) // called after the checksums were computed
	}{
		"gap":              {kind: "TCP on IPv4", change: func(_, b *spec) { b.seq++ }},
		"other flags":      {kind: "TCP on IPv4", change: func(_, b *spec) { b.flags |= 1 }},
		"first is pushed":  {kind: "TCP on IPv4", change: func(a, _ *spec) { a.flags |= flagPSH }},
		"first has SYN":    {kind: "TCP on IPv4", change: func(a, _ *spec) { a.flags |= 2 }},
		"other options":    {kind: "TCP on IPv4", change: func(_, b *spec) { b.options = bytes.Clone(b.options); b.options[11]++ }},
		"bigger":           {kind: "TCP on IPv4", change: func(_, b *spec) { b.payload = append(b.payload, 1) }},
		"empty":            {kind: "TCP on IPv4", change: func(_, b *spec) { b.payload = nil }},
		"first is empty":   {kind: "TCP on IPv4", change: func(a, b *spec) { a.payload, b.seq = nil, a.seq }},
		"first is wrong":   {kind: "TCP on IPv4", spoil: func(a, _ []byte) { a[60]++ }},
		"second is wrong":  {kind: "TCP on IPv4", spoil: func(_, b []byte) { b[60]++ }},
		"other port":       {kind: "TCP on IPv4", spoil: func(_, b []byte) { b[20]++; setChecksum(b, 20, tcpChecksum) }},
		"other window":     {kind: "TCP on IPv4", spoil: func(_, b []byte) { b[34]++; setChecksum(b, 20, tcpChecksum) }},
		"other TTL":        {kind: "TCP on IPv4", spoil: func(_, b []byte) { b[8]--; setHeaderChecksum(b) }},
		"other TOS":        {kind: "TCP on IPv4", spoil: func(_, b []byte) { b[1] = 3; setHeaderChecksum(b) }},
		"other source":     {kind: "TCP on IPv4", spoil: func(_, b []byte) { b[15]++; setHeaderChecksum(b); setChecksum(b, 20, tcpChecksum) }},
		"length too small": {kind: "TCP on IPv4", spoil: func(_, b []byte) { b[3]--; setHeaderChecksum(b) }},
		"wrong header":     {kind: "TCP on IPv4", spoil: func(_, b []byte) { b[10]++ }},
		"IPv6 other label": {kind: "TCP on IPv6", spoil: func(_, b []byte) { b[3] = 1 }},
		"IPv6 other hops":  {kind: "TCP on IPv6", spoil: func(_, b []byte) { b[7]-- }},
		"number missing":   {kind: "UDP on IPv4", change: func(_, b *spec) { b.id++ }},
		"no checksum":      {kind: "UDP on IPv4", spoil: func(_, b []byte) { b[26], b[27] = 0, 0 }},
		"wrong length":     {kind: "UDP on IPv4", spoil: func(_, b []byte) { b[25]--; setChecksum(b, 20, udpChecksum) }},
	} {
		t.Run(name, func(t *testing.T) {
			first := packetKinds()[tc.kind]
			first.flags &^= flagPSH
			first.payload = randomBytes(100)
			second := first
			second.payload = randomBytes(100)
			second.seq += 100
			second.id++
			if tc.change != nil {
				tc.change(&first, &second)
			}
			a, b := buildPacket(first), buildPacket(second)
			if tc.spoil != nil {
				tc.spoil(a, b)
			}
			buf := append(append(make([]byte, OffloadLen), a...), b...)
			m := Merger{TCP: true, UDP: true}
			h, _ := Parse(a)
			m.Begin(buf, OffloadLen, OffloadLen+len(a), h)
			if m.Add(OffloadLen+len(a), len(buf)) {
				t.Fatal("merged")
			}
			if got, count := m.Finish(); count != 1 || !bytes.Equal(got[OffloadLen:], a) {
				t.Error("the first was changed")
			}
			if !bytes.Equal(buf[len(buf)-len(b):], b) {
				t.Error("the second was changed")
			}
		})
	}
}

// setChecksum corrects the transport checksum of packet b. ip is the length of the IP header,
// and field the offset of the checksum in the transport header.
func setChecksum(b []byte, ip, field int) { binary.BigEndian.PutUint16(b[ip+field:], checksumOf(b)) }

func TestMergerWithoutOffloads(t *testing.T) {
	for name, s := range packetKinds() {
		s.payload = randomBytes(10)
		b := buildPacket(s)
		buf := append(append(make([]byte, OffloadLen), b...), b...)
		h, _ := Parse(b)
		var m Merger
		m.Begin(buf, OffloadLen, OffloadLen+len(b), h)
		if m.Add(OffloadLen+len(b), len(buf)) {
			t.Errorf("%s merged, although the device does not accept it", name)
		}
	}
}

func TestSplitRefuses(t *testing.T) {
	for name, change := range map[string]func(*Offload){
		"no size":             func(o *Offload) { o.size = 0 },
		"no checksum":         func(o *Offload) { o.flags = 0 },
		"other family":        func(o *Offload) { o.gso = gsoTCP6 },
		"unknown kind":        func(o *Offload) { o.gso = 3 },
		"transport in header": func(o *Offload) { o.checksumStart = 19 },
		"transport behind":    func(o *Offload) { o.checksumStart = 65535 },
		"header cut off":      func(o *Offload) { o.checksumStart = 200 },
	} {
		s := packetKinds()["TCP on IPv4"]
		s.payload = randomBytes(150)
		b, o := superPacket(s, 50)
		change(&o)
		h, _ := Parse(b)
		if _, ok := o.Split(b, h); ok {
			t.Errorf("%s: split", name)
		}
	}
}

func TestComplete(t *testing.T) {
	for name, s := range packetKinds() {
		s.payload = randomBytes(77)
		want := buildPacket(s)
		b, o := superPacket(s, 0)
		o.gso = gsoNone
		at := int(o.checksumStart + o.checksumOffset)
		if !o.Complete(b) || !bytes.Equal(b, want) {
			t.Errorf("%s: checksum %x, want %x", name, b[at:at+2], want[at:at+2])
		}
		o.checksumStart = uint16(len(b) - 1)
		if o.Complete(b) {
			t.Errorf("%s: a checksum outside the packet was written", name)
		}
	}
}

func TestDecrementTTL(t *testing.T) {
	s := packetKinds()["UDP on IPv4"]
	for id := range 1 << 16 { // every possible checksum
		s.id = uint16(id)
		b := buildPacket(s)
		if !DecrementTTL(b) || b[8] != 63 || referenceChecksum(b[:header4]) != 0 {
			t.Fatalf("id %d: TTL %d, checksum over header %#x", id, b[8], referenceChecksum(b[:header4]))
		}
	}
	for _, ttl := range []byte{0, 1} {
		for _, v6 := range []bool{false, true} {
			b := buildPacket(spec{ipv6: v6})
			at := 8
			if v6 {
				at = 7
			}
			b[at] = ttl
			if c := bytes.Clone(b); DecrementTTL(b) || !bytes.Equal(b, c) {
				t.Errorf("TTL %d passes, or the packet was changed", ttl)
			}
		}
	}
}

func TestParse(t *testing.T) {
	v4, v6 := buildPacket(spec{payload: randomBytes(8)}), buildPacket(spec{ipv6: true, payload: randomBytes(8)})
	change := func(b []byte, at int, to ...byte) []byte {
		b = bytes.Clone(b)
		copy(b[at:], to)
		return b
	}
	for name, tc := range map[string]struct {
		b    []byte
		want bool
	}{
		"nothing":               {nil, false},
		"19 bytes":              {v4[:19], false},
		"IPv4":                  {v4, true},
		"trailing byte":         {append(bytes.Clone(v4), 0), true},
		"last byte missing":     {v4[:len(v4)-1], false},
		"version 5":             {change(v4, 0, 0x55), false},
		"header of 16 bytes":    {change(v4, 0, 0x44), false},
		"header beyond its end": {change(v4, 2, 0, 19), false},
		"IPv6":                  {v6, true},
		"IPv6, 39 bytes":        {v6[:39], false},
		"IPv6, cut off":         {v6[:len(v6)-1], false},
		"IPv6, mapped source":   {change(v6, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff), false},
	} {
		if _, got := Parse(tc.b); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
	h, _ := Parse(v4)
	if !CheckHeader(v4, h) || CheckHeader(change(v4, 1, 1), h) {
		t.Error("a wrong header checksum was accepted")
	}
}

// TestICMPError compares an IPv4 message, apart from its checksums, with the one of
// flannel's udp backend. It verifies the checksums, checks the IPv6 messages, and
// checks cases in which no message may be sent.
func TestICMPError(t *testing.T) {
	own, own6 := netip.MustParseAddr("10.5.1.0"), netip.MustParseAddr("fd00:10:5:1::")
	p := buildPacket(spec{payload: []byte("12345678")})
	h, _ := Parse(p)
	got := Unreachable.Write(make([]byte, MinMTU6), p, h, own, 0)
	want := "45000038" + "00000000" + "0801 9aba" + "0a050100" + "0a050102" + "0300 79fa" + "00000000" + hex.EncodeToString(p[:28])
	want = strings.ReplaceAll(want, " ", "")
	if referenceChecksum(got[:20]) != 0 || referenceChecksum(got[20:]) != 0 {
		t.Errorf("wrong checksums: %x", got)
	}
	copy(got[10:12], []byte{0x9a, 0xba}) // checked above
	copy(got[22:24], []byte{0x79, 0xfa})
	if hex.EncodeToString(got) != want {
		t.Errorf("%x\nwant %s", got, want)
	}
	big := TooBig.Write(make([]byte, MinMTU6), p, h, own, 1400)
	if big[20] != 3 || big[21] != 4 || binary.BigEndian.Uint16(big[26:]) != 1400 || referenceChecksum(big[20:]) != 0 {
		t.Errorf("too big: %x", big)
	}
	for _, n := range []int{8, 2000} {
		p6 := buildPacket(spec{ipv6: true, payload: randomBytes(n)})
		h6, _ := Parse(p6)
		for c, typ := range map[ICMPError]byte{Unreachable: 1, TimeExceeded: 3, TooBig: 2} {
			m := c.Write(make([]byte, MinMTU6), p6, h6, own6, 1000)
			pseudo := binary.BigEndian.AppendUint16([]byte{0, protoICMPv6}, uint16(len(m)-header6))
			if m[40] != typ || referenceChecksum(m[8:40], pseudo, m[40:]) != 0 || m[6] != protoICMPv6 {
				t.Errorf("IPv6 %d: %x", c, m)
			}
			if want := p6[:min(len(p6), 1280-48)]; !bytes.Equal(m[48:], want) {
				t.Errorf("IPv6 %d: quotes %d bytes of %d, want %d", c, len(m)-48, len(p6), len(want))
			}
			if c == TooBig && binary.BigEndian.Uint32(m[44:]) != 1280 {
				t.Errorf("reports an MTU that no IPv6 link may have: %x", m[44:48])
			}
		}
	}
	for name, tc := range map[string]struct {
		c      ICMPError
		change func(b []byte)
	}{
		"later fragment":      {Unreachable, func(b []byte) { b[7] = 1 }},
		"ICMP, unreachable":   {Unreachable, func(b []byte) { b[9], b[20] = protoICMP, 8 }},
		"ICMP error, too big": {TooBig, func(b []byte) { b[9], b[20] = protoICMP, 3 }},
		"multicast":           {TimeExceeded, func(b []byte) { b[16] = 224 }},
		"no sender":           {TimeExceeded, func(b []byte) { clear(b[12:16]) }},
		"loopback":            {TimeExceeded, func(b []byte) { b[12] = 127 }},
	} {
		b := bytes.Clone(p)
		tc.change(b)
		h, _ := Parse(b)
		if m := tc.c.Write(make([]byte, MinMTU6), b, h, own, 0); m != nil {
			t.Errorf("%s caused an error: %x", name, m)
		}
	}
	echo := bytes.Clone(p)
	echo[9], echo[20] = protoICMP, 8
	he, _ := Parse(echo)
	if TooBig.Write(make([]byte, MinMTU6), echo, he, own, 1400) == nil {
		t.Error("no error about an echo request that is too big: path MTU discovery by ping would fail")
	}
}

func TestFragment(t *testing.T) {
	for _, n := range []int{0, 8, 9, 1000, 5000} {
		for _, mtu := range []int{68, 69, 576, 1400} {
			p := buildPacket(spec{payload: randomBytes(n), fragments: true, id: 5})
			h, _ := Parse(p)
			var data []byte
			var at uint16
			more := true
			ok := Fragment(make([]byte, mtu), p, h, mtu, func(f []byte) {
				fh, ok := Parse(f)
				if !ok || !CheckHeader(f, fh) || len(f) > mtu || fh.Total != len(f) {
					t.Fatalf("fragment: well-formed: %v, %d bytes", ok, len(f))
				}
				field := binary.BigEndian.Uint16(f[6:])
				if field&0x1fff != at/8 {
					t.Fatalf("offset %d, want %d", field&0x1fff, at/8)
				}
				more = field&0x2000 != 0
				data = append(data, f[fh.Len:]...)
				at += uint16(fh.Total - fh.Len)
			})
			if !ok || more || !bytes.Equal(data, p[h.Len:]) {
				t.Errorf("%d bytes by %d: %v, more %v, %d bytes", n, mtu, ok, more, len(data))
			}
		}
	}
	p := buildPacket(spec{payload: randomBytes(2000)})
	h, _ := Parse(p)
	if Fragment(nil, p, h, 1400, nil) {
		t.Error("a packet that must not be fragmented was fragmented")
	}
}

func TestDropOptions(t *testing.T) {
	for _, tc := range [][2]string{
		{"0783040102030194", "0783040102030194"},
		{"070301940404ff0000", "010101940404ff0000"},
		{"01820201", "01820201"},
		{"0001", "0001"},
		{"44", "44"},
	} {
		b, _ := hex.DecodeString(tc[0])
		dropOptions(b)
		if got := hex.EncodeToString(b); got != tc[1] {
			t.Errorf("%s: %s, want %s", tc[0], got, tc[1])
		}
	}
}
