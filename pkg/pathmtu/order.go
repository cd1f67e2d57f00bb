// SPDX-License-Identifier: Apache-2.0

package pathmtu

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/traffic"
	"github.com/flanneld/flanneld/pkg/wait"
)

const (
	// uncrowded is the largest number of paths that are all checked once in each interval.
	uncrowded = Rate * int(interval/time.Second)
	// watchFor is the time in which a device is watched until the result counts. It is watched all the time,
	// unless it is fast.
	watchFor = 2 * time.Second
	// large is the size in bytes from which on a packet shows that the MTU of its path matters: the least
	// MTU that a path may get over IPv4. Acknowledgements are smaller.
	large = 576
	// busyFor is the time after the last large packet until a path counts as idle. A connection that hangs
	// repeats its packet more and more seldom, and a sample of a fast device misses most of the packets.
	busyFor = 30 * time.Second
	// busyInARow is how many busy paths may be checked before it is the turn of another one. If more than
	// manyBusy are busy, they and the others take turns.
	busyInARow, manyBusy = 3, 150
)

// order is the order in which paths are checked. A path is in one queue, or it is being checked.
type order struct {
	busy  queue // carry large packets
	fresh queue // were never checked
	due   queue // all others
	inRow int   // busy paths since the last other one
}

// turn is the part of a path's state that belongs to the order.
type turn struct {
	large    time.Time // the last time when the path carried a large packet
	place    int       // changes with each place in a queue
	busy     bool      // the path is in the queue of the busy ones
	checking bool
}

// queue contains paths in the order in which they came to it.
type queue []entry

// entry is a place in a queue. It is void if the path has got another one, or is gone.
type entry struct {
	*state
	place int
}

// add gives a path its place at the end of the queue, in place of one in another queue.
func (q *queue) add(s *state) {
	s.turn.place++
	*q = append(*q, entry{s, s.turn.place})
}

func (e entry) void() bool { return e.gone || e.place != e.turn.place }

// carries records that a path carries large packets.
func (o *order) carries(s *state, now time.Time) {
	s.turn.large = now
	if !s.turn.checking && !s.turn.busy {
		o.wait(s, now)
	}
}

// checked records the end of a check.
func (o *order) checked(s *state, now time.Time) {
	s.turn.checking = false
	o.wait(s, now)
}

// wait adds a path to its queue.
func (o *order) wait(s *state, now time.Time) {
	if s.turn.busy = now.Sub(s.turn.large) < busyFor; s.turn.busy {
		o.busy.add(s)
	} else {
		o.due.add(s)
	}
}

// next returns the path that must be checked now, or nil and the time until there may be one.
func (o *order) next(now time.Time) (s *state, pause time.Duration) {
	queues := []*queue{&o.busy, &o.fresh, &o.due}
	inARow := busyInARow
	if len(o.busy) > manyBusy {
		inARow = 1
	}
	if o.inRow >= inARow {
		queues = []*queue{&o.fresh, &o.due, &o.busy}
	}
	pause = interval
	for _, q := range queues {
		s, left := o.first(q, now)
		if s == nil {
			pause = min(pause, left)
			continue
		}
		o.inRow++
		if q != &o.busy {
			o.inRow = 0
		}
		s.begun, s.turn.busy, s.turn.checking = now, false, true
		return s, 0
	}
	return nil, pause
}

// first takes the first path out of a queue, or returns nil and the time until its turn.
func (o *order) first(q *queue, now time.Time) (*state, time.Duration) {
	for len(*q) > 0 {
		e := (*q)[0]
		idle := e.turn.busy && now.Sub(e.turn.large) >= busyFor
		left := e.begun.Add(interval).Sub(now)
		if left > 0 && !idle && !e.void() {
			return nil, left
		}
		(*q)[0] = entry{}
		*q = (*q)[1:]
		switch {
		case e.void():
		case idle:
			o.wait(e.state, now)
		default:
			return e.state, 0
		}
	}
	return nil, interval
}

// sample is the function of a Prober with that name.
func sample(ctx context.Context, device string) ([]netip.Addr, error) {
	return traffic.Sample(ctx, device, large, watchFor)
}

// watch finds the paths that carry large packets, until ctx ends. The times of the samples vary, because traffic
// may be periodic too.
func (p *Prober) watch(ctx context.Context) {
	var logged sync.Once
	for ctx.Err() == nil {
		var samples sync.WaitGroup
		for _, device := range p.crowded() {
			samples.Go(func() {
				to, err := p.sample(ctx, device)
				if gone := errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENETDOWN); err != nil && !gone && ctx.Err() == nil {
					logged.Do(func() {
						klog.FromContext(ctx).Error(err, "cannot find out which paths carry packets: the MTU of each path is checked in turn")
					})
				}
				p.carry(to)
			})
		}
		_ = wait.For(ctx, wait.Vary(watchFor, 0.2))
		samples.Wait()
	}
}

// crowded returns the devices of all paths if there are so many that some have to wait.
func (p *Prober) crowded() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.paths) <= uncrowded {
		return nil
	}
	var devices []string
	for _, s := range p.paths {
		if !slices.Contains(devices, s.path.Device) {
			devices = append(devices, s.path.Device)
		}
	}
	return devices
}

// carry records that large packets were sent to these addresses.
func (p *Prober) carry(to []netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range to {
		if s := p.to(a); s != nil {
			p.order.carries(s, time.Now())
			p.added.Send()
		}
	}
}

// to returns the path to an address, or nil.
func (p *Prober) to(a netip.Addr) *state {
	for bits := a.BitLen(); bits > 0; bits-- {
		subnet := netip.PrefixFrom(a, bits).Masked()
		if s := p.paths[subnet]; s != nil {
			return s
		}
	}
	return nil
}
