// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/tunnel"
	"github.com/flanneld/flanneld/pkg/wait"
)

// sh runs a script in the network namespace of this thread.
func sh(t testing.TB, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
}

// newNamespace gives the thread of the test a network namespace of its own, with devices to peers.
func newNamespace(t testing.TB) {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v (this test needs root)", err)
	}
	sh(t, `sysctl -qw net.ipv6.conf.default.accept_dad=0
		ip link set lo up
		ip link add under type veth peer name far; ip link set under up; ip link set far up
		ip addr add 192.0.2.1/24 dev under; ip neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev under
		ip link add flannel.1 type vxlan id 1 dstport 8472 local 192.0.2.1 dev under nolearning
		ip link set flannel.1 up
		ip addr add 10.5.1.0/32 dev flannel.1; ip addr add fd00:5:1::/128 dev flannel.1 nodad
		bridge fdb add 02:00:00:00:00:09 dst 192.0.2.2 dev flannel.1
		for i in 2 3 4 5 9; do
			ip neigh add 10.5.$i.0 lladdr 02:00:00:00:00:09 dev flannel.1
			ip route add 10.5.$i.0/24 via 10.5.$i.0 dev flannel.1 onlink
			ip neigh add fd00:5:$i:: lladdr 02:00:00:00:00:09 dev flannel.1
			ip route add fd00:5:$i::/64 via fd00:5:$i:: dev flannel.1 onlink
		done`)
	tun, err := tunnel.OpenDevice("flannel0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tun.Close() })
	sh(t, `ip link set flannel0 up
		ip addr add 10.6.1.0/32 dev flannel0; ip addr add fd00:6:1::/128 dev flannel0 nodad
		ip route add 10.6.0.0/16 dev flannel0; ip route add fd00:6::/32 dev flannel0`)
}

// TestKernelSample sends packets through devices of two kinds in both families. Only the destinations of large
// packets that this host sends through the device, and that are not ICMP, must be found.
func TestKernelSample(t *testing.T) {
	newNamespace(t)
	send := func(network, to string, size int) {
		t.Helper()
		conn, err := net.Dial(network, to)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		b := make([]byte, size)
		b[0] = 8 // an echo request, if it is ICMP
		if network == "ip6:ipv6-icmp" {
			b[0] = 128
		}
		if _, err := conn.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	const larger = 576
	for _, tc := range []struct {
		device string
		send   func()
		want   []string
	}{
		{"flannel.1", func() {}, nil},
		{"flannel.1", func() {
			send("udp", "10.5.2.7:9", 1000)
			send("udp", "10.5.2.7:9", 1000)
			send("udp", "10.5.3.7:9", larger-27)
			send("udp", "10.5.4.7:9", larger-28)
			send("ip4:icmp", "10.5.5.7", 1000)
			send("udp", "10.6.5.7:9", 1000)
		}, []string{"10.5.2.7", "10.5.3.7"}},
		{"flannel.1", func() {
			send("udp", "[fd00:5:2::7]:9", 1000)
			send("udp", "[fd00:5:3::7]:9", larger-47)
			send("udp", "[fd00:5:4::7]:9", larger-48)
			send("ip6:ipv6-icmp", "fd00:5:5::7", 1000)
		}, []string{"fd00:5:2::7", "fd00:5:3::7"}},
		{"flannel0", func() {
			send("udp", "10.6.2.7:9", 1000)
			send("udp", "[fd00:6:2::7]:9", 1000)
			send("udp", "10.5.2.7:9", 1000)
		}, []string{"10.6.2.7", "fd00:6:2::7"}},
		{"far", func() { send("udp", "192.0.2.2:9", 1000) }, nil}, // the packet arrives at this device, and is not sent through it
	} {
		s, err := listen(tc.device)
		if err != nil {
			t.Fatal(err)
		}
		send("udp", "10.5.9.7:9", 1000) // before the sample: flannel.1 and far count it
		if n, err := s.only(larger); err != nil || (n > 0) != (tc.device != "flannel0") {
			t.Errorf("%s: %d packets are counted, %v", tc.device, n, err)
		}
		tc.send()
		var got []string
		for _, a := range s.destinations(t.Context(), time.Now().Add(10*time.Millisecond)) {
			got = append(got, a.String())
		}
		_ = s.Close()
		slices.Sort(got)
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: packets to %v are found, want %v", tc.device, got, tc.want)
		}
	}
	if _, err := Sample(t.Context(), "missing", larger, time.Second); !errors.Is(err, unix.ENODEV) || errors.Is(err, ErrNoSocket) {
		t.Errorf("a device that is missing: %v", err)
	}
}

// TestKernelSampleDuring sends packets while a sample is taken. The sample must contain their destination, and
// must not be shorter than asked.
func TestKernelSampleDuring(t *testing.T) {
	newNamespace(t)
	conn, err := net.Dial("udp", "10.5.2.7:9")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	done := make(chan struct{})
	defer func() { <-done }()
	go func() {
		defer close(done)
		for wait.For(t.Context(), time.Millisecond) == nil && t.Context().Err() == nil {
			if _, err := conn.Write(make([]byte, 1000)); err != nil {
				return
			}
		}
	}()
	for _, d := range []time.Duration{100 * time.Millisecond, time.Second} {
		begin := time.Now()
		got, err := Sample(t.Context(), "flannel.1", 576, d)
		if err != nil || !slices.Equal(got, []netip.Addr{netip.MustParseAddr("10.5.2.7")}) {
			t.Errorf("packets to %v are found, %v", got, err)
		}
		if took := time.Since(begin); took < d {
			t.Errorf("a sample took %s, want %s", took, d)
		}
	}
	_ = conn.Close()
}

// TestKernelSampleEnds expects a sample to end with its context.
func TestKernelSampleEnds(t *testing.T) {
	newNamespace(t)
	for _, after := range []time.Duration{0, 100 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		defer cancel()
		if _, err := Sample(ctx, "flannel.1", 576, time.Hour); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after %s: %v", after, err)
		}
	}
}

// BenchmarkKernelSample reports the CPU time of a sample as the daemon takes it, while the device sends nothing.
func BenchmarkKernelSample(b *testing.B) {
	newNamespace(b)
	cpu := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := cpu()
	for b.Loop() {
		if _, err := Sample(b.Context(), "flannel.1", 576, 2*time.Second); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64((cpu()-before).Microseconds())/float64(b.N), "cpu-us/op")
}
