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
	o.Listen = func(ctx context.Context, lc *net.ListenConfig, network, address string) (conn net.PacketConn, err error) {
		err = n.Do(ctx, func() (err error) {
			conn, err = lc.ListenPacket(ctx, network, address)
			return err
		})
		return conn, err
	}
	rtt, err := ping.Ping(ctx, dst, o)
	if err != nil {
		return 0, fmt.Errorf("ping %s from %s: %w", dst, n.name, err)
	}
	return rtt, nil
}
