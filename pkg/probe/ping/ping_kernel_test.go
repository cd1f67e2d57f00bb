// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
)

// TestKernelPingIgnoresForgedMTU forges a router's message that the path to a host carries only small
// packets. Ping must still send a large one.
func TestKernelPingIgnoresForgedMTU(t *testing.T) {
	enterLossyNamespace(t)
	src, dst := [4]byte{198, 51, 100, 2}, [4]byte{198, 51, 100, 1}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	forged := make([]byte, 8+20+8)
	forged[0], forged[1] = 3, 4 // fragmentation needed
	binary.BigEndian.PutUint16(forged[6:], 600)
	// The kernel believes it about an echo reply, which needs no socket: see icmp_err of Linux.
	forged[8], forged[11], forged[16], forged[17] = 0x45, 84, 64, unix.IPPROTO_ICMP
	copy(forged[20:], src[:])
	copy(forged[24:], dst[:])
	binary.BigEndian.PutUint16(forged[2:], checksum(forged))
	if err := unix.Sendto(fd, forged, 0, &unix.SockaddrInet4{Addr: src}); err != nil {
		t.Fatal(err)
	}
	waittest.Until(t, 10*time.Second, "the kernel to believe it", func() bool {
		out, err := exec.Command("ip", "route", "get", "198.51.100.1").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return strings.Contains(string(out), "mtu 600")
	})
	p := NewPinger()
	defer p.Close()
	if _, err := p.Ping(t.Context(), netip.AddrFrom4(dst), Path{Size: 1400, Whole: true}, 50*time.Millisecond); !errors.Is(err, errNoAnswer) {
		t.Errorf("ping with 1400 bytes: %v, want that no answer comes", err)
	}
}

func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	return ^uint16(sum>>16 + sum&0xffff)
}
