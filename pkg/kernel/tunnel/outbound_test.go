// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/kernel/tunnel/internal/packet"
)

// TestSends checks that one send contains packets of several super-packets, as far as their
// sizes permit that.
func TestSends(t *testing.T) {
	const (
		size = 1420
		ack  = 0x10
		most = maxPayload / (tcpHeaders + size)
	)
	data := bytes.Repeat([]byte("the bytes of a stream "), 3000)
	frame := func(n int) []byte { return tcpFrame(1, 0, ack, data[:n], size) }
	expired := frame(size)
	expired[packet.OffloadLen+8] = 1 // hop limit
	loopback := frame(size)
	copy(loopback[packet.OffloadLen+12:], []byte{127, 0, 0, 1})
	for name, tc := range map[string]struct {
		frames [][]byte
		sends  []int // expected number of packets in each send
	}{
		"one":                       {[][]byte{frame(10 * size)}, []int{10}},
		"several":                   {[][]byte{frame(10 * size), frame(3 * size)}, []int{13}},
		"more than a send holds":    {[][]byte{frame(45 * size)}, []int{most, 45 - most}},
		"a rest and the next frame": {[][]byte{frame(45 * size), frame(45 * size)}, []int{most, most, 90 - 2*most}},
		"something dropped":         {[][]byte{frame(10 * size), expired, frame(3 * size)}, []int{10, 3}},
		"from loopback":             {[][]byte{frame(10 * size), loopback, frame(3 * size)}, []int{10, 3}},
		"a short one":               {[][]byte{frame(2*size + 1), frame(3 * size)}, []int{3, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := sendCounts(t, tc.frames); !slices.Equal(got, tc.sends) {
				t.Errorf("sends of %v packets, want %v", got, tc.sends)
			}
		})
	}
}

// sendCounts returns the number of packets in each send that frames cause.
func sendCounts(t *testing.T, frames [][]byte) []int {
	t.Helper()
	o, in := newLoopback(t, netip.MustParsePrefix("10.5.1.0/24"))
	for _, f := range frames {
		o.take(bytes.Clone(f))
	}
	o.flush()
	return receivedCounts(t, in[0], o.Counters.Sent())
}

// newLoopback returns an outbound that sends on the loopback device, and the socket of a
// peer for each subnet.
func newLoopback(t *testing.T, subnets ...netip.Prefix) (o *outbound, peers []*socket) {
	t.Helper()
	open := func(at netip.AddrPort) *socket {
		s, err := openSocket(t.Context(), at)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = s.close(), s.release() })
		return s
	}
	public := netip.MustParseAddr("127.0.0.1")
	out := open(netip.AddrPortFrom(public, 0))
	table, port := NewTable(), uint16(0)
	for _, subnet := range subnets {
		public = public.Next()
		peers = append(peers, open(netip.AddrPortFrom(public, port)))
		port = peers[0].conn.LocalAddr().(*net.UDPAddr).AddrPort().Port() // all peers have the same port
		table.update(nil, []Peer{{Subnet: subnet, Public: public}})
	}
	out.local = netip.AddrPortFrom(out.local.Addr(), port)
	device, _ := devicePair(t)
	return newOutbound(Config{Device: device, Table: table, Counters: &Counters{}}, sockets{out}, klog.Logger{}), peers
}

// receivedCounts receives from in until total packets have arrived, and returns the number
// of packets in each receive. On the loopback device a receive contains one send.
func receivedCounts(t *testing.T, in *socket, total uint64) (counts []int) {
	t.Helper()
	raw, err := in.conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = in.conn.SetReadDeadline(time.Now().Add(patience))
	buf, r := make([]byte, maxPacket), newReceiver()
	for n := uint64(0); n < total; {
		err := raw.Read(func(fd uintptr) bool {
			size, each, _, err := r.receive(fd, buf)
			if err != nil {
				return false
			}
			count := 1
			if each > 0 {
				count = (size + each - 1) / each
			}
			counts = append(counts, count)
			n += uint64(count)
			return true
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return counts
}

// TestOneByOne checks that a peer gets single datagrams for a while after sending it
// several at a time has failed with EIO, and that other peers get several at a time.
func TestOneByOne(t *testing.T) {
	const size, ack = 1420, 0x10
	frame := func(to string) []byte {
		b := tcpFrame(1, 0, ack, make([]byte, 5*size), size)
		copy(b[packet.OffloadLen+16:], netip.MustParseAddr(to).AsSlice())
		return b
	}
	o, peers := newLoopback(t, netip.MustParsePrefix("10.5.1.0/24"), netip.MustParsePrefix("10.5.2.0/24"))
	o.take(frame("10.5.1.7"))
	o.sendEach(unix.EIO)
	o.batch.n = 0
	single, many := []int{1, 1, 1, 1, 1}, []int{5}
	expect := func(when string, peer int, want []int) {
		t.Helper()
		if got := receivedCounts(t, peers[peer], 5); !slices.Equal(got, want) {
			t.Errorf("%s: sends of %v packets, want %v", when, got, want)
		}
	}
	expect("at once", 0, single)
	for peer, want := range [][]int{single, many} {
		o.take(frame([]string{"10.5.1.7", "10.5.2.7"}[peer]))
		o.flush()
		expect("afterwards", peer, want)
	}
	o.single[peers[0].local.Addr()] = time.Now()
	o.take(frame("10.5.1.7"))
	o.flush()
	expect("some time later", 0, many)
}

// TestFlowFollowsItsPeer checks that packets to one address go to the peer that has the
// address now, although outbound remembers the peer of the last packet.
func TestFlowFollowsItsPeer(t *testing.T) {
	table, peer := NewTable(), peerNumber(7)
	device, _ := devicePair(t)
	o := newOutbound(Config{Device: device, Table: table}, sockets{}, klog.Logger{})
	pod := peer.Subnet.Addr().Next()
	expect := func(when string, want netip.Addr) {
		t.Helper()
		if known := o.route(pod); known != want.IsValid() || known && o.public != want {
			t.Errorf("%s: sent to %v (known: %v), want %v", when, o.public, known, want)
		}
	}
	moved := peer
	moved.Public = netip.MustParseAddr("192.0.2.1")
	expect("before the peer exists", netip.Addr{})
	table.update(nil, []Peer{peer})
	expect("after the peer was added", peer.Public)
	table.update([]Peer{peer}, []Peer{moved})
	expect("moved", moved.Public)
	table.update([]Peer{moved}, nil)
	expect("gone", netip.Addr{})
}

// TestScanDoesNotSuppressSizeErrors checks that ICMP errors about sizes are sent even if
// many packets to unused addresses have reached the limit of other errors.
func TestScanDoesNotSuppressSizeErrors(t *testing.T) {
	here, there := devicePair(t)
	own := []netip.Addr{netip.MustParseAddr("10.5.1.0")}
	o := newOutbound(Config{Device: here, Table: NewTable(), Counters: &Counters{}, Own: own}, sockets{}, klog.Logger{})
	o.errorLimit = rate.NewLimiter(0, icmpErrorBurst)
	frame := tcpFrame(1, 0, 0x10, []byte("data"), 4)
	for o.errorLimit.Allow() { // until the limit is reached
		o.take(bytes.Clone(frame))
	}
	b := frame[packet.OffloadLen:]
	h, _ := packet.Parse(b)
	o.sendICMPError(packet.TooBig, b, h, 1400)
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
