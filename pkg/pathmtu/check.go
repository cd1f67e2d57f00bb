// SPDX-License-Identifier: Apache-2.0

package pathmtu

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"github.com/flanneld/flanneld/pkg/ping"
)

const (
	// small is the size in bytes of a packet that every path carries.
	small = 84
	// common is the size in bytes that a search tries first: nearly every path carries it, and packets
	// of this size pass while the search goes on.
	common = 1280
	// firstPatience is the time to wait for an answer, and leastPatience the one in a search if answers
	// take less than a third of it.
	firstPatience, leastPatience = time.Second, 500 * time.Millisecond
	// retries is how often a size is tried again before a path counts as smaller, and searchTries how
	// often a search tries each size. A search that errs because of lost packets finds a size that is too
	// small, which is raised later.
	retries, searchTries = 2, 2
	// searchBurst is how many searches a path may have at once, and searchEvery the time after which it
	// may have one more.
	searchBurst, searchEvery = 3, time.Minute
	// raiseEvery is the time between two attempts to find a larger size.
	raiseEvery = 30 * time.Second
)

// check checks a path, and sets its size if that has changed. The first packet is already accounted for
// in the limit.
func (p *Prober) check(ctx context.Context, s *state) {
	p.mu.Lock()
	key, before, raised := s.key, s.size, s.raised
	p.mu.Unlock()
	path, now := s.path, before
	if _, ok := p.echo(ctx, path, before, firstPatience); ok {
		if before < path.Full && time.Since(raised) >= raiseEvery {
			p.mu.Lock()
			s.raised = time.Now()
			p.mu.Unlock()
			now = p.raise(ctx, path, before)
		}
	} else {
		now = p.lower(ctx, s, before)
	}
	if ctx.Err() == nil && p.set(s, now) && now != before {
		p.tell(ctx, Change{Key: key, Path: path, Before: before, Now: now})
	}
}

// tries reports whether one of n packets of a size passes. They count for the limit.
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

// lower returns the size of a path that did not carry a packet of the present one. It is the present one
// if packets were lost by chance, if the path carries no packets at all, or none of the least size: then
// no size helps. During the search the path has a size that passes, so that connections go on.
func (p *Prober) lower(ctx context.Context, s *state, present int) int {
	path := s.path
	if !p.maySearch(s) {
		return present
	}
	rtt, ok := p.tries(ctx, path, small, firstPatience, 1)
	if !ok || present <= path.Least {
		return present
	}
	patience := max(leastPatience, 3*rtt)
	if _, ok := p.tries(ctx, path, present, patience, retries); ok {
		return present
	}
	s.searches.Allow()
	select {
	case p.searches <- struct{}{}:
		defer func() { <-p.searches }()
	case <-ctx.Done():
		return present
	}
	if path.Least >= common { // smaller packets would not help, because the family does not allow such an MTU
		p.set(s, path.Least)
	}
	size := search(path.Least, present, p.lastFound(path.Device), func(size int) (ok, more bool) {
		_, ok = p.tries(ctx, path, size, patience, searchTries)
		if ok {
			p.publish(s, size, present)
		}
		return ok, ctx.Err() == nil
	})
	if size > path.Least || path.Least < common {
		if _, ok := p.tries(ctx, path, size, patience, searchTries); !ok { // packets get lost, or the path carries none now
			return p.current(s)
		}
	}
	if _, ok := p.tries(ctx, path, present, 2*firstPatience, 1); ok { // a host on the way was busy
		return present
	}
	p.noteFound(path.Device, size)
	return size
}

// current returns the size that a path has now.
func (p *Prober) current(s *state) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return s.size
}

// maySearch reports whether a search on a path is not one too many: a path that changes all the time
// would use up what all paths may send.
func (p *Prober) maySearch(s *state) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.searches == nil {
		s.searches = rate.NewLimiter(rate.Every(searchEvery), searchBurst)
	}
	return s.searches.Tokens() >= 1
}

// search is like ping.Largest. It first tries the size that another path of the device had, or the common
// one: if a link that many paths have in common becomes narrow, most searches then take few packets.
func search(passes, tooBig, other int, try func(size int) (ok, more bool)) int {
	if other < common || other <= passes || other+1 >= tooBig {
		return ping.Largest(passes, tooBig, common, try)
	}
	ok, more := try(other)
	switch {
	case !more:
		return passes
	case !ok:
		return ping.Largest(passes, other, common, try)
	}
	if ok, more = try(other + 1); ok && more {
		return ping.Largest(other+1, tooBig, common, try)
	}
	return other
}

// lastFound returns the last size that a search on a device has found, or 0.
func (p *Prober) lastFound(device string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.found[device]
}

func (p *Prober) noteFound(device string, size int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.found[device] = size
}

// publish sets a size that passes, if the path still has a size that does not. Further ones wait for the
// end of the search, so that a search does not change the route more than twice.
func (p *Prober) publish(s *state, size, tooBig int) {
	p.mu.Lock()
	still := s.size == tooBig
	p.mu.Unlock()
	if still {
		p.set(s, size)
	}
}

// raise returns the size of a path that carries at least packets of the present one. A path that does
// not carry one byte more has not changed.
func (p *Prober) raise(ctx context.Context, path Path, present int) int {
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
