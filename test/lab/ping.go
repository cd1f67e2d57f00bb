// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/flanneld/flanneld/pkg/probe/ping"
)

// Ping sends one echo request from the namespace and returns the round-trip time.
func (n *Namespace) Ping(ctx context.Context, dst netip.Addr, o ping.Options) (time.Duration, error) {
	o.Listen = func(ctx context.Context, lc *net.ListenConfig, network, address string) (net.PacketConn, error) {
		return inside(ctx, n, func() (net.PacketConn, error) { return lc.ListenPacket(ctx, network, address) })
	}
	rtt, err := ping.Ping(ctx, dst, o)
	if err != nil {
		return 0, fmt.Errorf("ping %s from %s: %w", dst, n.name, err)
	}
	return rtt, nil
}
