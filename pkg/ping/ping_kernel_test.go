// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"context"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// stalledConn is the connection of a process that gets no CPU time until the answer should have
// arrived.
type stalledConn struct {
	net.PacketConn
	stall func()
}

func (c stalledConn) ReadFrom(b []byte) (int, net.Addr, error) {
	c.stall()
	return c.PacketConn.ReadFrom(b)
}

// TestKernelPingReadsLate checks that an answer counts if the process reads it only after the timeout,
// and that a host without an answer still has none.
func TestKernelPingReadsLate(t *testing.T) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v (this test needs root)", err)
	}
	// Packets to the peer of the veth device get lost.
	if out, err := exec.Command("sh", "-ec", `ip link set lo up
		ip link add one type veth peer name two; ip link set one up; ip link set two up
		ip addr add 198.51.100.2/24 dev one; ip addr add fd00:5::2/64 dev one nodad
		ip neigh add 198.51.100.1 lladdr 02:00:00:00:00:01 dev one; ip neigh add fd00:5::1 lladdr 02:00:00:00:00:01 dev one`).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	const timeout = 50 * time.Millisecond
	for to, answers := range map[string]bool{"127.0.0.1": true, "::1": true, "198.51.100.1": false, "fd00:5::1": false} {
		var once sync.Once
		listen := func(ctx context.Context, lc *net.ListenConfig, network, address string) (net.PacketConn, error) {
			conn, err := lc.ListenPacket(ctx, network, address)
			return stalledConn{conn, func() { once.Do(func() { <-time.After(2 * timeout) }) }}, err
		}
		_, err := Ping(t.Context(), netip.MustParseAddr(to), Options{Timeout: timeout, Listen: listen})
		if (err == nil) != answers {
			t.Errorf("ping %s: error %v, want an answer: %v", to, err, answers)
		}
	}
}
