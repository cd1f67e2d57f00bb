// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/tunnel/internal/packet"
)

const tcpHeaders = 20 + 20

// tcpFrame returns a super-packet behind its offload header, as a device returns it. It
// contains data of a TCP stream with the source port port. It has to be split into packets
// with size bytes of data each.
func tcpFrame(port uint16, sequence uint32, flags byte, data []byte, size int) []byte {
	return tcpFrameOf("10.5.2.7", "10.5.1.7", port, sequence, flags, data, size)
}

// tcpFrameOf is tcpFrame for a stream between two addresses.
func tcpFrameOf(from, to string, port uint16, sequence uint32, flags byte, data []byte, size int) []byte {
	addresses := append(netip.MustParseAddr(from).AsSlice(), netip.MustParseAddr(to).AsSlice()...)
	const needsChecksum, gsoTCP4, gsoTCP6 = 1, 1, 4
	ip, gso := make([]byte, 20), byte(gsoTCP4)
	if len(addresses) == 8 {
		ip[0], ip[6], ip[8], ip[9] = 0x45, 0x40, 64, unix.IPPROTO_TCP
		binary.BigEndian.PutUint16(ip[2:], uint16(tcpHeaders+len(data)))
		binary.BigEndian.PutUint16(ip[4:], uint16(int(sequence)/size))
		copy(ip[12:], addresses)
	} else {
		gso = gsoTCP6
		ip = append(ip[:8], addresses...)
		ip[0], ip[6], ip[7] = 0x60, unix.IPPROTO_TCP, 64
		binary.BigEndian.PutUint16(ip[4:], uint16(20+len(data)))
	}
	b := make([]byte, packet.OffloadLen)
	b[0], b[1] = needsChecksum, gso
	for at, v := range map[int]int{2: len(ip) + 20, 4: size, 6: len(ip), 8: 16} {
		binary.NativeEndian.PutUint16(b[at:], uint16(v))
	}
	b = slices.Concat(b, ip, make([]byte, 20), data)
	t := b[packet.OffloadLen+len(ip):]
	binary.BigEndian.PutUint16(t, port)
	binary.BigEndian.PutUint32(t[4:], sequence)
	t[12], t[13] = 5<<4, flags
	pseudo := slices.Concat(addresses, []byte{0, unix.IPPROTO_TCP, byte(len(t) >> 8), byte(len(t))})
	binary.BigEndian.PutUint16(t[16:], ^internetChecksum(pseudo))
	return b
}

// packetsOf returns the packets of a frame, which is what one read from a device returns.
func packetsOf(t *testing.T, frame []byte) [][]byte {
	t.Helper()
	b := frame[packet.OffloadLen:]
	h, ok := packet.Parse(b)
	o := packet.DecodeOffload(frame)
	if !ok || !o.Super() {
		return [][]byte{bytes.Clone(b)}
	}
	segments, ok := o.Split(b, h)
	if !ok {
		t.Fatal("no super-packet")
	}
	var all [][]byte
	for i := range segments.Count() {
		p := make([]byte, segments.Len(i))
		segments.Write(p, i)
		all = append(all, p)
	}
	return all
}

// TestGathering checks that packets of one stream that arrive in several receives are
// written to the device together, and that all packets arrive unchanged.
func TestGathering(t *testing.T) {
	const (
		size          = 1420
		ack, psh, fin = 0x10, 0x18, 0x11
	)
	data := bytes.Repeat([]byte("the bytes of a stream "), 3000)
	stream := packetsOf(t, tcpFrame(1, 0, ack, data[:45*size], size))
	next := packetsOf(t, tcpFrame(1, 45*size, ack, data[:45*size], size))
	ended := packetsOf(t, tcpFrame(1, 0, psh, data[:30*size], size))
	after := packetsOf(t, tcpFrame(1, 30*size, ack, data[:10*size], size))
	short := packetsOf(t, tcpFrame(1, 0, ack, data[:30*size+1], size))
	other := packetsOf(t, tcpFrame(2, 0, ack, data[:40*size], size))
	last := packetsOf(t, tcpFrame(1, 0, fin, data[:size], size))
	beyond := packetsOf(t, tcpFrame(1, size, ack, data[:10*size], size))
	for name, tc := range map[string]struct {
		receives [][][]byte // datagrams of each receive
		frames   []int      // expected number of packets in each frame that is written to the device
	}{
		"one receive":             {[][][]byte{stream[:44]}, []int{44}},
		"a packet behind":         {[][][]byte{stream[:44], stream[44:]}, []int{45}},
		"two halves":              {[][][]byte{stream[:23], stream[23:]}, []int{45}},
		"one by one":              {[][][]byte{stream[:1], stream[1:2], stream[2:3]}, []int{3}},
		"more than a frame holds": {[][][]byte{stream[:44], append(stream[44:45:45], next[:43]...), next[43:]}, []int{46, 42, 2}},
		"pushed":                  {[][][]byte{ended, after}, []int{30, 10}},
		"a short one at the end":  {[][][]byte{short, stream[31:]}, []int{31, 14}},
		"another stream":          {[][][]byte{stream[:30], other[:30], stream[30:40]}, []int{30, 30, 10}},
		"another within":          {[][][]byte{append(stream[:10:10], other[:30]...), other[30:]}, []int{10, 40}},
		"far behind":              {[][][]byte{append(stream[:30:30], other[:10]...), other[10:30], other[30:], stream[:1]}, []int{30, 30, 10, 1}},
		"nothing to add to":       {[][][]byte{last, beyond}, []int{1, 10}},
		"something dropped":       {[][][]byte{stream[:10], nil, stream[10:20]}, []int{10, 10}},
	} {
		t.Run(name, func(t *testing.T) { testGathering(t, tc.receives, tc.frames) })
	}
}

// devicePair returns a substitute for a device, and the descriptor of its other end.
// Neither blocks.
func devicePair(t *testing.T) (device *Device, there int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	device = &Device{file: os.NewFile(uintptr(fds[0]), "device"), tcp: true, udp: true}
	t.Cleanup(func() { _, _ = device.Close(), unix.Close(fds[1]) })
	if device.raw, err = device.file.SyscallConn(); err != nil {
		t.Fatal(err)
	}
	return device, fds[1]
}

var (
	// streamPeer is the peer that sends the packets of tcpFrame.
	streamPeer = Peer{Subnet: netip.MustParsePrefix("10.5.2.0/24"), Public: netip.MustParseAddr("192.0.2.2")}
	otherPeer  = Peer{Subnet: netip.MustParsePrefix("10.5.3.0/24"), Public: netip.MustParseAddr("192.0.2.3")}
)

// newTestInbound returns an inbound with the peers streamPeer and otherPeer, and a
// descriptor from which the test reads the frames that it writes.
func newTestInbound(t *testing.T) (i *inbound, there int) {
	here, there := devicePair(t)
	table := NewTable()
	table.update(nil, []Peer{streamPeer, otherPeer})
	return newInbound(
		Config{Device: here, Networks: networks, Table: table, Counters: &Counters{}},
		&socket{local: netip.MustParseAddrPort("192.0.2.1:8285")},
	), there
}

// receive passes the datagrams of one receive to i, with the port of peers as their source
// port. Without datagrams it passes one empty datagram, which i must drop.
func receive(i *inbound, from netip.Addr, datagrams [][]byte) {
	receiveFrom(i, netip.AddrPortFrom(from, port), datagrams)
}

func receiveFrom(i *inbound, from netip.AddrPort, datagrams [][]byte) {
	at, size := i.nextOffset(), 0
	for _, d := range datagrams[:min(len(datagrams), 1)] {
		size = len(d)
	}
	n := copy(i.buf[at:at+maxPacket], bytes.Join(datagrams, nil))
	i.take(at, n, size, from)
}

// expectFrame reads a frame from there, and fails the test unless it contains the packets in
// want, each with its hop limit decremented.
func expectFrame(t *testing.T, there int, want [][]byte) {
	t.Helper()
	frame := make([]byte, packet.OffloadLen+maxPacket)
	n, err := unix.Read(there, frame)
	if err != nil {
		t.Fatalf("read frame: %v", err)
	}
	got := packetsOf(t, frame[:n])
	if len(got) != len(want) {
		t.Fatalf("the frame has %d packets, want %d", len(got), len(want))
	}
	for i := range got {
		w := bytes.Clone(want[i])
		packet.DecrementTTL(w)
		if !bytes.Equal(got[i], w) {
			t.Fatalf("packet %d is\n%x, want\n%x", i, got[i], w)
		}
	}
}

// TestGatheringOfTwoPeers checks that packets of another peer start a new super-packet.
func TestGatheringOfTwoPeers(t *testing.T) {
	const size, ack = 1000, 0x10
	data := bytes.Repeat([]byte("0123456789"), 2000)
	one := packetsOf(t, tcpFrame(1, 0, ack, data, size))
	other := packetsOf(t, tcpFrameOf("10.5.3.7", "10.5.1.7", 1, 0, ack, data, size))
	i, there := newTestInbound(t)
	receive(i, streamPeer.Public, one[:10])
	receive(i, otherPeer.Public, other[:5])
	receive(i, otherPeer.Public, other[5:20])
	receive(i, streamPeer.Public, one[10:])
	i.flush()
	for _, want := range [][][]byte{one[:10], other, one[10:]} {
		expectFrame(t, there, want)
	}
}

// TestGatheringIPv6 checks that the hop limit of all gathered packets is decremented.
func TestGatheringIPv6(t *testing.T) {
	const size, ack = 1000, 0x10
	packets := packetsOf(t, tcpFrameOf("fd00:10:5:2::7", "fd00:10:5:1::7", 1, 0, ack, bytes.Repeat([]byte("0123456789"), 2000), size))
	peer := Peer{Subnet: netip.MustParsePrefix("fd00:10:5:2::/64"), Public: netip.MustParseAddr("2001:db8::2")}
	i, there := newTestInbound(t)
	i.socket.local = netip.MustParseAddrPort("[2001:db8::1]:8285")
	i.Table.update(nil, []Peer{peer})
	receive(i, peer.Public, packets)
	i.flush()
	expectFrame(t, there, packets)
}

// TestGatheringLastHop checks that a packet that continues a stream is dropped if its hop
// limit is used up, and that the gathered packets are not.
func TestGatheringLastHop(t *testing.T) {
	const size, ack = 1000, 0x10
	packets := packetsOf(t, tcpFrame(1, 0, ack, bytes.Repeat([]byte("0123456789"), 2000), size))
	for packets[10][8] > 1 {
		packet.DecrementTTL(packets[10])
	}
	i, there := newTestInbound(t)
	receive(i, streamPeer.Public, packets)
	i.flush()
	expectFrame(t, there, packets[:10])
	expectFrame(t, there, packets[11:])
	if got := i.Counters.Dropped()[HopsExceeded.String()]; got != 1 {
		t.Errorf("%d packets dropped as %v, want 1", got, HopsExceeded)
	}
}

// TestGatheringChecks checks that a packet that continues a stream is checked again if
// another host sends it or the peers have changed.
func TestGatheringChecks(t *testing.T) {
	const size = 1000
	packets := packetsOf(t, tcpFrame(1, 0, 0x10, make([]byte, 20*size), size))
	for name, tc := range map[string]struct {
		from   string
		port   uint16 // source port; 0 means the port of peers
		peers  []Peer // peers after the change; nil if they stay the same
		reason Reason
	}{
		"another peer":   {from: "192.0.2.3", reason: WrongSource},
		"another port":   {from: "192.0.2.2", port: port + 1, reason: WrongPort},
		"no peer":        {from: "192.0.2.4", reason: UnknownPeer},
		"peer removed":   {from: "192.0.2.2", peers: []Peer{{Subnet: streamPeer.Subnet, Public: netip.MustParseAddr("192.0.2.9")}}, reason: UnknownPeer},
		"subnet changed": {from: "192.0.2.2", peers: []Peer{{Subnet: netip.MustParsePrefix("10.5.7.0/24"), Public: streamPeer.Public}}, reason: WrongSource},
	} {
		t.Run(name, func(t *testing.T) {
			i, _ := newTestInbound(t)
			receive(i, streamPeer.Public, packets[:10])
			if tc.peers != nil {
				i.Table.update([]Peer{streamPeer}, tc.peers)
			}
			receiveFrom(i, netip.AddrPortFrom(netip.MustParseAddr(tc.from), cmp.Or(tc.port, port)), packets[10:])
			i.flush()
			if got := i.Counters.Received(); got != 10 {
				t.Errorf("%d packets received, want 10", got)
			}
			if got := i.Counters.Dropped()[tc.reason.String()]; got != 10 {
				t.Errorf("%d packets dropped as %v, want 10", got, tc.reason)
			}
		})
	}
}

// TestSenders checks that datagrams of unknown hosts and from other ports of a peer are
// dropped, unless the check is off.
func TestSenders(t *testing.T) {
	packets := packetsOf(t, tcpFrame(1, 0, 0x10, make([]byte, 100), 100))
	for _, check := range []SourceCheck{CheckNetwork, CheckStrict, CheckOff} {
		for from, want := range map[string]string{
			"192.0.2.2:8285": "", "192.0.2.2:8286": "wrong_port", "192.0.2.2:1024": "wrong_port", "192.0.2.9:8285": "unknown_peer",
		} {
			i, _ := newTestInbound(t)
			i.Check = check
			receiveFrom(i, netip.MustParseAddrPort(from), packets)
			i.flush()
			if check == CheckOff {
				want = ""
			}
			expectDropped(t, i, string(check)+" from "+from, want)
		}
	}
}

// TestAddressesOfNoHost checks that packets with addresses that no host can have are
// dropped with every source check.
func TestAddressesOfNoHost(t *testing.T) {
	type family struct {
		from, to string
		none     []string // addresses that no host has
	}
	families := []family{
		{"10.5.2.7", "10.5.1.7", []string{"127.0.0.1", "127.255.255.254", "0.0.0.0", "224.0.0.1", "239.1.2.3", "255.255.255.255"}},
		{"fd00:10:5:2::7", "fd00:10:5:1::7", []string{"::1", "::", "ff02::1", "ff0e::7", "::ffff:127.0.0.1", "::ffff:10.5.1.7"}},
	}
	send := func(t *testing.T, check SourceCheck, from, to string) *inbound {
		i, _ := newTestInbound(t)
		i.Check = check
		if netip.MustParseAddr(from).Is6() {
			i.socket.local = netip.MustParseAddrPort("[2001:db8::1]:8285")
			i.Table.update(nil, []Peer{{Subnet: netip.MustParsePrefix("fd00:10:5:2::/64"), Public: streamPeer.Public}})
		}
		receive(i, streamPeer.Public, packetsOf(t, tcpFrameOf(from, to, 1, 0, 0x10, make([]byte, 100), 100)))
		i.flush()
		return i
	}
	for _, check := range []SourceCheck{CheckNetwork, CheckStrict, CheckOff} {
		for _, f := range families {
			name := string(check) + " from %s to %s"
			expectDropped(t, send(t, check, f.from, f.to), fmt.Sprintf(name, f.from, f.to), "")
			for _, none := range f.none {
				source, destination := WrongSource.String(), WrongDestination.String()
				if netip.MustParseAddr(none).Is4In6() {
					source, destination = Malformed.String(), Malformed.String()
				}
				expectDropped(t, send(t, check, none, f.to), fmt.Sprintf(name, none, f.to), source)
				expectDropped(t, send(t, check, f.from, none), fmt.Sprintf(name, f.from, none), destination)
			}
		}
	}
}

// expectDropped fails the test unless i has handled one packet and dropped it with this
// reason. An empty reason means that the packet must not be dropped.
func expectDropped(t *testing.T, i *inbound, what, reason string) {
	t.Helper()
	want := map[string]uint64{reason: 1}
	if reason == "" {
		want = map[string]uint64{}
	}
	if got := nonzeroDrops(i.Counters); !maps.Equal(got, want) || i.Counters.Received() != uint64(1-len(want)) {
		t.Errorf("%s: %v dropped, %d received, want %v dropped", what, got, i.Counters.Received(), want)
	}
}

func testGathering(t *testing.T, receives [][][]byte, frames []int) {
	i, there := newTestInbound(t)
	var sent [][]byte
	for _, datagrams := range receives {
		receive(i, streamPeer.Public, datagrams)
		sent = append(sent, datagrams...)
	}
	i.flush()
	if got := i.Counters.Received(); got != uint64(len(sent)) {
		t.Errorf("%d packets received, want %d", got, len(sent))
	}

	for _, count := range frames {
		expectFrame(t, there, sent[:count])
		sent = sent[count:]
	}
	if n, err := unix.Read(there, make([]byte, 1)); err == nil || len(sent) > 0 {
		t.Errorf("%d packets were lost, and %d bytes too many arrived", len(sent), max(n, 0))
	}
}
