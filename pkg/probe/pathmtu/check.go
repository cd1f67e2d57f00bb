// SPDX-License-Identifier: Apache-2.0

package pathmtu

import (
	"context"
	"time"

	"github.com/flanneld/flanneld/pkg/probe/ping"
)

const (
	// small is the size in bytes of a packet that every path carries.
	small = 84
	// common is the size in bytes that a search tries first, because nearly every path carries it. If it
	// passes, the path gets this size while the search continues.
	common = 1280
	// firstPatience is the time to wait for an answer if the round trip of the path is not known. A
	// search waits three round trips, but at least leastPatience.
	firstPatience, leastPatience = time.Second, 500 * time.Millisecond
	// retries is how often the present size is tried again before the search for a smaller one, and
	// searchTries how often a search tries each size. If packets get lost by chance, a search may find a
	// size that is too small. A later check raises it.
	retries, searchTries = 2, 2
	// searchBurst is how many searches a path may have in a row, and searchEvery the time after which it
	// may have one more.
	searchBurst, searchEvery = 3, time.Minute
	// raiseEvery is the time between two attempts to find a larger size.
	raiseEvery = 30 * time.Second
)

// check checks a path, and sets and reports its size. The caller has already waited for the limit for
// the first packet.
func (p *Prober) check(ctx context.Context, s *state) {
	due := time.Now().Add(interval)
	p.mu.Lock()
	key := s.key
	p.mu.Unlock()

	path := s.path
	before := s.size
	now := before
	if _, ok := p.echo(ctx, path, before, firstPatience); ok {
		if before < path.Full && time.Since(s.raised) >= raiseEvery {
			s.raised = time.Now()
			now = p.raise(ctx, path, before)
		}
	} else {
		now = p.lower(ctx, s, before)
	}

	if ctx.Err() == nil && p.set(s, now) && now != before {
		p.tell(ctx, Change{Key: key, Path: path, Before: before, Now: now})
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	if p.has(s) {
		p.order.Add(s, due)
	}
}

// tries sends up to n packets of a size, as fast as the limit allows, until one is answered.
func (p *Prober) tries(ctx context.Context, path Path, size int, patience time.Duration, n int) (rtt time.Duration, ok bool) {
	for range n {
		if p.Limit.Wait(ctx) != nil {
			return 0, false
		}
		if rtt, ok = p.echo(ctx, path, size, patience); ok {
			return rtt, true
		}
	}
	return 0, false
}

// lower returns the new size of a path that did not carry a packet of the present size. During the
// search it already sets a smaller size, so that connections continue.
func (p *Prober) lower(ctx context.Context, s *state, present int) int {
	path := s.path
	if s.searches.Tokens() < 1 {
		return present
	}

	rtt, ok := p.tries(ctx, path, small, firstPatience, 1)
	if !ok || present <= path.Least { // no packet passes at all, or the path may have no smaller size
		return present
	}

	patience := max(leastPatience, 3*rtt)
	if _, ok := p.tries(ctx, path, present, patience, retries); ok { // the first packet was lost by chance
		return present
	}

	s.searches.Allow() // there was a token at the start
	select {
	case p.searches <- struct{}{}:
		defer func() { <-p.searches }()
	case <-ctx.Done():
		return present
	}
	if path.Least >= common { // the MTU cannot be smaller, so this size needs no test
		p.set(s, path.Least)
	}

	other, _ := p.found.Load(path.Device)
	last, _ := other.(int) // 0 if there was no search
	size := search(path.Least, present, last, func(size int) (ok, more bool) {
		_, ok = p.tries(ctx, path, size, patience, searchTries)
		if ok && s.size == present { // others wait for the end of the search, which so changes the route at most twice
			p.set(s, size)
		}
		return ok, ctx.Err() == nil
	})
	if size > path.Least || path.Least < common {
		if _, ok := p.tries(ctx, path, size, patience, searchTries); !ok { // packets get lost by chance, or the path carries none now
			return s.size
		}
	}

	if _, ok := p.tries(ctx, path, present, 2*firstPatience, 1); ok { // a host on the way was busy
		return present
	}
	p.found.Store(path.Device, size)
	return size
}

// search is like ping.Largest, but first tries the last size that a search on the device has found. So
// most searches take few packets if a link that many paths share becomes narrow.
func search(passes, tooBig, other int, try func(size int) (ok, more bool)) int {
	if other < common || other <= passes || other+1 >= tooBig {
		return ping.Largest(passes, tooBig, common, try)
	}

	ok, more := try(other)
	if !more {
		return passes
	}
	if !ok {
		return ping.Largest(passes, other, common, try)
	}
	if ok, more = try(other + 1); ok && more {
		return ping.Largest(other+1, tooBig, common, try)
	}
	return other
}

// raise returns the largest size that passes on a path that carries packets of the present size.
func (p *Prober) raise(ctx context.Context, path Path, present int) int {
	// If one byte more does not pass, the path has not changed.
	rtt, ok := p.tries(ctx, path, present+1, firstPatience, 1)
	if !ok {
		return present
	}
	if _, ok := p.tries(ctx, path, path.Full, firstPatience, searchTries); ok {
		return path.Full
	}
	return ping.Largest(present+1, path.Full, common, func(size int) (ok, more bool) {
		_, ok = p.tries(ctx, path, size, max(leastPatience, 3*rtt), searchTries)
		return ok, ctx.Err() == nil
	})
}
