// SPDX-License-Identifier: Apache-2.0

// Package pathmtu finds the size of the largest packet that passes to each peer, with echo requests that
// must not be fragmented. It needs no ICMP error of a router.
//
//   - pathmtu.go creates the Prober, and runs the checks.
//   - check.go checks one path: it finds a smaller size, or a larger one again.
//   - prober.go has the paths to all peers, and reports changes of their sizes.
//   - order.go decides which path is checked next.
//   - path.go is a path, and what is known of it.
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
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/probe/ping"
)

const (
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
		Config: c, added: wait.NewSignal(), reports: loglimit.NewChanges(loglimit.Burst), searches: make(chan struct{}, searchesAtOnce),
		paths: map[netip.Prefix]*state{}, peers: map[string][]Path{}, resized: map[string]struct{}{}, found: map[string]int{},
	}
}

// Run checks paths until ctx ends, and returns when all checks have ended.
func (p *Prober) Run(ctx context.Context) {
	var checks sync.WaitGroup
	defer checks.Wait()
	if p.echo == nil {
		pinger := ping.NewPinger()
		defer pinger.Close()
		p.echo = echoes(pinger)
	}

	slots := make(chan struct{}, atOnce)
	for ctx.Err() == nil {
		s, pause := p.next(time.Now())
		if s == nil {
			_ = wait.ForOr(ctx, pause, p.added)
			continue
		}

		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		if p.Limit.Wait(ctx) != nil {
			return
		}

		checks.Go(func() {
			defer func() { <-slots }()
			p.check(ctx, s)
			p.mu.Lock()
			defer p.mu.Unlock()
			if !s.gone {
				p.order.add(s)
			}
			p.added.Send()
		})
	}
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
