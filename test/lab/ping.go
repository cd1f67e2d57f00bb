// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/flanneld/flanneld/pkg/probe/ping"
)

// Echo says how to send an echo request.
type Echo struct {
	Size         int           // size of the IP packet with its headers, in bytes; 0 means 84
	DontFragment bool          // forbid fragmentation by this host and by routers
	Timeout      time.Duration // maximum time until the reply; 0 means 1 s
}

// Ping sends one echo request from the namespace and returns the round-trip time.
func (n *Namespace) Ping(ctx context.Context, dst netip.Addr, e Echo) (time.Duration, error) {
	p := ping.NewPinger()
	defer func() { _ = p.Close() }()
	path := ping.Path{Size: cmp.Or(e.Size, 84), Whole: e.DontFragment, Split: !e.DontFragment}
	rtt, err := inside(ctx, n, func() (time.Duration, error) { return p.Ping(ctx, dst, path, cmp.Or(e.Timeout, time.Second)) })
	if err != nil {
		return 0, fmt.Errorf("ping %s from %s: %w", dst, n.name, err)
	}
	return rtt, nil
}
