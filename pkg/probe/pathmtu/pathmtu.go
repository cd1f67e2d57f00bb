// SPDX-License-Identifier: Apache-2.0

// Package pathmtu finds the size of the largest packet that passes to each peer, with echo requests that
// must not be fragmented. It needs no ICMP error of a router.
//
//   - pathmtu.go creates the Prober, and runs the checks.
//   - check.go checks one path: it finds a smaller size, or a larger one again.
//   - prober.go has the paths to all peers, what is known of them, and reports changes of their sizes.
//
// The package changes nothing: its user asks for the sizes and sets them.
package pathmtu

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/pkg/probe/schedule"
)

const (
	// Rate is the maximum number of echo requests per second that a host sends to find path MTUs, in all
	// its networks together.
	Rate = 10
	// interval is the least time between two checks of a path. The time is longer if there are more paths
	// than Rate allows.
	interval = 2 * time.Second
	// atOnce limits the number of paths that are checked at the same time.
	atOnce = 64
	// searchesAtOnce limits the number of searches at the same time, because checks of other paths need
	// some of Rate too.
	searchesAtOnce = 4
)

// NewLimit returns the limit for all probers of a host. It spreads the packets evenly.
func NewLimit() *rate.Limiter { return rate.NewLimiter(Rate, 1) }

// NewProber returns a prober.
func NewProber(c Config) *Prober {
	if c.Before == nil {
		c.Before = map[netip.Prefix]int{}
	}
	return &Prober{
		Config: c, order: schedule.NewQueue[*state](), reports: loglimit.NewChanges(loglimit.Burst), searches: make(chan struct{}, searchesAtOnce),
		paths: map[netip.Prefix]*state{}, peers: map[string][]Path{}, resized: map[string]struct{}{}, found: map[string]int{},
	}
}

// Run checks paths until ctx ends, and returns when all checks have ended.
func (p *Prober) Run(ctx context.Context) {
	if p.echo == nil {
		pinger := ping.NewPinger()
		defer pinger.Close()
		p.echo = echoes(pinger)
	}

	p.order.Run(ctx, schedule.Checks[*state]{AtOnce: atOnce, Permit: p.Limit.Wait, Check: p.check})
}

// echoes returns the function for Prober.echo.
func echoes(pinger *ping.Pinger) func(ctx context.Context, p Path, size int, patience time.Duration) (time.Duration, bool) {
	var logged sync.Once
	return func(ctx context.Context, p Path, size int, patience time.Duration) (time.Duration, bool) {
		rtt, err := pinger.Ping(ctx, p.To, ping.Path{Device: p.Device, From: p.From, Size: size, Whole: true}, patience)
		if errors.Is(err, ping.ErrNoSocket) {
			logged.Do(func() {
				klog.FromContext(ctx).Error(err, "cannot probe the MTU of paths: routes keep the MTU that they have")
			})
		}
		return rtt, err == nil
	}
}
