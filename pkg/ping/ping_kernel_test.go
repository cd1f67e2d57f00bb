// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"
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

// TestKernelPingReadsLate checks that an answer counts even if the process reads it only after the
// timeout, and that Ping to a host that does not answer still returns an error.
func TestKernelPingReadsLate(t *testing.T) {
	enterLossyNamespace(t)
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
