package tunnel

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"flanneld/pkg/tunnel/packet"
)

// TestSends: sends are filled, whatever super-packets their packets came from.
func TestSends(t *testing.T) {
	const (
		size = 1420
		ack  = 0x10
		most = maxPayload / (tcpHeaders + size)
	)
	data := bytes.Repeat([]byte("what a stream carries "), 3000)
	frame := func(n int) []byte { return tcpFrame(1, 0, ack, data[:n], size) }
	expired := frame(size)
	expired[packet.OffloadLen+8] = 1 // hops
	for name, tc := range map[string]struct {
		frames [][]byte
		sends  []int // packets in each
	}{
		"one":                     {[][]byte{frame(10 * size)}, []int{10}},
		"several":                 {[][]byte{frame(10 * size), frame(3 * size)}, []int{13}},
		"more than a send holds":  {[][]byte{frame(45 * size)}, []int{most, 45 - most}},
		"the rest and what comes": {[][]byte{frame(45 * size), frame(45 * size)}, []int{most, most, 90 - 2*most}},
		"something dropped":       {[][]byte{frame(10 * size), expired, frame(3 * size)}, []int{10, 3}},
		"a short one":             {[][]byte{frame(2*size + 1), frame(3 * size)}, []int{3, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := sends(t, tc.frames); !slices.Equal(got, tc.sends) {
				t.Errorf("sends of %v packets, want %v", got, tc.sends)
			}
		})
	}
}

// sends returns how many packets each send has that frames bring about.
func sends(t *testing.T, frames [][]byte) (counts []int) {
	t.Helper()
	here := netip.MustParseAddr("127.0.0.1")
	var sockets []*socket
	for range 2 {
		s, err := openSocket(t.Context(), netip.AddrPortFrom(here, 0), false)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = s.close(), s.release() })
		sockets = append(sockets, s)
	}
	out, in := sockets[0], sockets[1]
	out.local = in.conn.LocalAddr().(*net.UDPAddr).AddrPort() // peers have the same port
	table := NewTable()
	table.Update(nil, []Peer{{Subnet: netip.MustParsePrefix("10.5.1.0/24"), Public: here}})
	o := newOutbound(&Tunnel{Config: Config{Table: table, Counters: &Counters{}}, sockets: [2]*socket{out}})
	for _, f := range frames {
		o.take(bytes.Clone(f))
	}
	o.flush()
	raw, err := in.conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = in.conn.SetReadDeadline(time.Now().Add(patience))
	buf, r := make([]byte, maxPacket), newReceiver()
	for total := uint64(0); total < o.Counters.Sent(); {
		err := raw.Read(func(fd uintptr) bool {
			n, size, _, err := r.receive(fd, buf)
			if err != nil {
				return false
			}
			count := 1
			if size > 0 {
				count = (n + size - 1) / size
			}
			counts = append(counts, count)
			total += uint64(count)
			return true
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return counts
}

// TestFlowFollowsItsPeer: what goes to one address all the time follows the peer
// that has it, wherever that moves.
func TestFlowFollowsItsPeer(t *testing.T) {
	table, peer := NewTable(), peerNumber(7)
	o := newOutbound(&Tunnel{Config: Config{Table: table}})
	pod := peer.Subnet.Addr().Next()
	expect := func(when string, want netip.Addr) {
		t.Helper()
		if known := o.route(pod); known != want.IsValid() || known && o.public != want {
			t.Errorf("%s: sent to %v (known: %v), want %v", when, o.public, known, want)
		}
	}
	moved := peer
	moved.Public = netip.MustParseAddr("192.0.2.1")
	expect("before it comes", netip.Addr{})
	table.Update(nil, []Peer{peer})
	expect("once it is there", peer.Public)
	table.Update([]Peer{peer}, []Peer{moved})
	expect("moved", moved.Public)
	table.Update([]Peer{moved}, nil)
	expect("gone", netip.Addr{})
}

// TestScannerSilencesNobody: however much goes to nobody, who sends what is too big is
// told.
func TestScannerSilencesNobody(t *testing.T) {
	here, there := pair(t)
	o := newOutbound(&Tunnel{
		Config:  Config{Device: &Device{file: here}, Table: NewTable(), Counters: &Counters{}, Own: []netip.Addr{netip.MustParseAddr("10.5.1.0")}},
		replies: newLimiter(), sizes: newLimiter(),
	})
	frame := tcpFrame(1, 0, 0x10, []byte("data"), 4)
	for o.replies.Allow() { // until no more is told
		o.take(bytes.Clone(frame))
	}
	b := frame[packet.OffloadLen:]
	h, _ := packet.Parse(b)
	o.complain(packet.TooBig, b, h, 1400)
	var last []byte
	for {
		reply := make([]byte, 100)
		n, err := unix.Read(there, reply)
		if err != nil {
			break
		}
		last = reply[packet.OffloadLen:n]
	}
	if len(last) < 22 || last[20] != 3 || last[21] != 4 {
		t.Errorf("the last message is %x, want fragmentation needed", last)
	}
}
