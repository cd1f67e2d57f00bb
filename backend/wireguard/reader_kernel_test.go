// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/tun"
)

// TestKernelReaderCompletesChecksums sends a UDP packet over IPv6 into a real TUN device, and
// checks that its checksum is 0xffff when it is read. The kernel leaves the checksum to the
// program that reads the device, and the payload is chosen so that the computed checksum is 0.
func TestKernelReaderCompletesChecksums(t *testing.T) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v (this test needs root)", err)
	}
	device, err := tun.CreateTUN("wg-test", 1420)
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	if out, err := exec.Command("sh", "-ec", "ip addr add fd00:5:1::2/32 dev wg-test nodad; ip link set wg-test up").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	packet := zeroUDP6(2) // has the addresses, ports and payload for the packet to send
	from := netip.AddrPortFrom(netip.MustParseAddr("fd00:5:1::2"), binary.BigEndian.Uint16(packet[ipv6Header:]))
	to := netip.AddrPortFrom(netip.MustParseAddr("fd00:5:2::2"), binary.BigEndian.Uint16(packet[ipv6Header+2:]))
	conn, err := net.DialUDP("udp6", net.UDPAddrFromAddrPort(from), net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(packet[ipv6Header+udpHeader:]); err != nil {
		t.Fatal(err)
	}
	defer time.AfterFunc(10*time.Second, func() { _ = device.Close() }).Stop()
	bufs, sizes := [][]byte{make([]byte, 1<<16)}, make([]int, 1)
	for r := (&reader{Device: device}); ; {
		n, err := r.Read(bufs, sizes, 0)
		if err != nil {
			t.Fatalf("the packet did not arrive: %v", err)
		}
		b := bufs[0][:sizes[0]]
		if n == 0 || len(b) != len(packet) || b[6] != unix.IPPROTO_UDP {
			continue // the kernel's own packets
		}
		if got := binary.BigEndian.Uint16(b[ipv6Header+6:]); got != 0xffff {
			t.Errorf("the checksum is %#04x, want 0xffff", got)
		}
		return
	}
}
