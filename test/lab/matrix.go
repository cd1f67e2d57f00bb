// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
)

// Cell is the connectivity from one pod to another in one address family. RTT and BitsPerSecond are
// valid if Err is nil.
type Cell struct {
	From, To      *Pod
	Family        prefix.Family
	RTT           time.Duration
	BitsPerSecond float64
	Err           error // of the first test that failed; nil if all succeeded
}

// Matrix tests, in each of the families, how every pod reaches every other pod of its network. It
// tests a ping, then a TCP connection, which must arrive from the address of the sending pod, and
// then measures round-trip time and throughput. The measurements of the throughput together take
// about budget, but each of them takes at least 2 ms and at most 100 ms. A pod without an address
// of a family reaches no other pod in that family.
func (l *Lab) Matrix(ctx context.Context, families []prefix.Family, budget time.Duration) []Cell {
	const shortest, longest = 2 * time.Millisecond, 100 * time.Millisecond

	var cells, first, second []*Cell
	pods := l.Pods()
	for _, f := range families {
		for i, from := range pods {
			for j, to := range pods {
				if from == to || from.network != to.network {
					continue
				}

				c := &Cell{From: from, To: to, Family: f}
				cells = append(cells, c)
				if i < j {
					first = append(first, c)
				} else {
					second = append(second, c)
				}
			}
		}
	}

	// If both ends of a WireGuard tunnel begin a handshake at the same moment, both handshakes fail.
	// The ends repeat them after five seconds, which is longer than reach waits. So first one pod of
	// each pair reaches the other, and then the other way round.
	reachAll(ctx, first)
	reachAll(ctx, second)

	out := make([]Cell, len(cells))
	for i, c := range cells {
		if c.Err == nil { // measure one cell at a time, because the measurements share the processors
			c.Err = c.measure(ctx, min(max(budget/time.Duration(len(cells)), shortest), longest))
		}
		out[i] = *c
	}
	return out
}

// reachAll sets Err of each cell. It tests 256 at the same time, so that many timeouts take little
// longer than one.
func reachAll(ctx context.Context, cells []*Cell) {
	var group errgroup.Group
	group.SetLimit(256)
	for _, c := range cells {
		group.Go(func() error {
			c.Err = c.reach(ctx)
			return nil
		})
	}
	_ = group.Wait()
}

func (c *Cell) reach(ctx context.Context) error {
	for _, p := range []*Pod{c.From, c.To} {
		if !p.Addr(c.Family).IsValid() {
			return fmt.Errorf("%s has no %v address", p.name, c.Family)
		}
	}

	// The first packets may be lost while the kernel resolves the neighbour's address, and are refused until the host
	// has a route to the other one.
	const patience, pause = 2 * time.Second, 50 * time.Millisecond
	_, err := c.From.Ping(ctx, c.To.Addr(c.Family), Echo{})
	for begin := time.Now(); err != nil && time.Since(begin) < patience && wait.For(ctx, pause) == nil; {
		_, err = c.From.Ping(ctx, c.To.Addr(c.Family), Echo{})
	}
	if err != nil {
		return err
	}

	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Second, errors.New("TCP timeout"))
	defer cancel()

	seen, err := c.From.Connect(ctx, c.To, c.Family)
	if err != nil {
		return err
	}
	if own := c.From.Addr(c.Family); seen != own {
		return fmt.Errorf("connect %s to %s: arrives from %s, not from %s", c.From.name, c.To.name, seen, own)
	}
	return nil
}

func (c *Cell) measure(ctx context.Context, d time.Duration) error {
	const tries = 3
	for range tries {
		rtt, err := c.From.Ping(ctx, c.To.Addr(c.Family), Echo{})
		if err != nil {
			return err
		}
		if c.RTT == 0 || rtt < c.RTT {
			c.RTT = rtt
		}
	}

	var err error
	c.BitsPerSecond, err = c.From.Throughput(ctx, c.To, c.Family, d)
	return err
}
