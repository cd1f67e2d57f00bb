// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"net/netip"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// TestKernelSocketTakesTheDevice sends echo requests to an address with two routes. The requests
// must leave through the chosen device, also if its route is the worse one, and with any form of
// route that backends use.
func TestKernelSocketTakesTheDevice(t *testing.T) {
	for _, tt := range []struct {
		name          string
		family        prefix.Family
		dst, from     string
		better, worse string // routes to dst: the better one through device one, the worse one through device two
	}{
		{"IPv4 gateways", prefix.IPv4, "10.5.2.0", "10.5.1.0", "10.5.2.0/24 via 192.0.2.2 dev one", "10.5.2.0/24 via 198.51.100.2 dev two metric 1048576"},
		{"IPv4 onlink", prefix.IPv4, "10.5.2.0", "10.5.1.0", "10.5.2.0/24 via 192.0.2.2 dev one", "10.5.2.0/24 via 10.5.2.0 dev two onlink metric 1048576"},
		{"IPv4 device", prefix.IPv4, "10.5.2.0", "10.5.1.0", "10.5.2.0/24 via 192.0.2.2 dev one", "10.5.2.0/24 dev two metric 1048576"},
		{"IPv6 gateways", prefix.IPv6, "fd00:5:2::", "fd00:5:1::", "fd00:5:2::/64 via fd00:a::2 dev one", "fd00:5:2::/64 via fd00:b::2 dev two metric 1048576"},
		{"IPv6 onlink", prefix.IPv6, "fd00:5:2::", "fd00:5:1::", "fd00:5:2::/64 via fd00:a::2 dev one", "fd00:5:2::/64 via fd00:5:2:: dev two onlink metric 1048576"},
		{"IPv6 device", prefix.IPv6, "fd00:5:2::", "fd00:5:1::", "fd00:5:2::/64 via fd00:a::2 dev one", "fd00:5:2::/64 dev two metric 1048576"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				t.Fatalf("make a network namespace: %v (this test needs root)", err)
			}
			sh := func(script string) {
				t.Helper()
				if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
					t.Fatalf("%s: %v: %s", script, err, out)
				}
			}
			family := "-4"
			if tt.family == prefix.IPv6 {
				family = "-6"
			}
			sh(`ip link set lo up
				for d in one two; do
					ip link add $d type veth peer name peer-$d
					sysctl -qw net.ipv6.conf.$d.accept_dad=0 net.ipv6.conf.$d.addr_gen_mode=1
					ip link set $d up; ip link set peer-$d up
				done
				ip addr add 192.0.2.1/24 dev one; ip addr add 198.51.100.1/24 dev two
				ip addr add fd00:a::1/64 dev one nodad; ip addr add fd00:b::1/64 dev two nodad
				ip addr add 10.5.1.0/32 dev one; ip addr add fd00:5:1::/128 dev one nodad
				ip neigh add 192.0.2.2 lladdr 02:00:00:00:00:01 dev one; ip neigh add fd00:a::2 lladdr 02:00:00:00:00:01 dev one
				for n in 198.51.100.2 10.5.2.0 fd00:b::2 fd00:5:2::; do ip neigh add $n lladdr 02:00:00:00:00:02 dev two; done`)
			if tt.family == prefix.IPv6 { // flanneld adds such a route, too, if another device reaches the gateway
				sh("ip -6 route add fd00:5:2:: dev two metric 1")
			}
			sh("ip " + family + " route add " + tt.worse + "; ip " + family + " route add " + tt.better)
			if tt.family == prefix.IPv6 {
				sh("ip -6 route del fd00:5:2:: dev two metric 1")
			}
			s, err := openSocket(t.Context(), tt.family, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer s.close()
			for _, device := range []string{"two", "one"} {
				received := listen(t, "peer-"+device, netip.MustParseAddr(tt.from), netip.MustParseAddr(tt.dst))
				if err := s.send(t.Context(), netip.MustParseAddr(tt.dst), Path{Device: device, From: netip.MustParseAddr(tt.from)}, 0x01020304); err != nil {
					t.Fatal(err)
				}
				select {
				case <-received:
				case <-time.After(5 * time.Second):
					t.Errorf("the request did not leave through %s", device)
				}
			}
		})
	}
}

// listen returns a channel that is closed when a packet with these addresses has arrived at a
// device.
func listen(t *testing.T, device string, from, to netip.Addr) <-chan struct{} {
	t.Helper()
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	ifreq, err := unix.NewIfreq(device)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, ifreq); err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: int(ifreq.Uint32())}); err != nil {
		t.Fatal(err)
	}
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5})
	received := make(chan struct{})
	go func() {
		buf := make([]byte, 2048)
		for {
			n, _, err := unix.Recvfrom(fd, buf, 0)
			if err != nil {
				return
			}
			offset := 12
			if to.Is6() {
				offset = 8
			}
			size := len(to.AsSlice())
			if n < offset+2*size {
				continue
			}
			src, _ := netip.AddrFromSlice(buf[offset : offset+size])
			dst, _ := netip.AddrFromSlice(buf[offset+size : offset+2*size])
			if src == from && dst == to {
				close(received)
				return
			}
		}
	}()
	return received
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }
