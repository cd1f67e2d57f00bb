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
	// uncrowded is the largest number of paths with which each path is checked once in every interval.
	uncrowded = Rate * int(interval/time.Second)
	// watchFor is the duration of a sample. The next sample begins at about the end of the last one, so that
	// a device is watched nearly all the time. Samples of a fast device are shorter.
	watchFor = 2 * time.Second
	// large is the size in bytes above which a packet shows that the MTU of its path matters: the least
	// MTU that a path may get over IPv4. Acknowledgements are smaller.
	large = 576
	// busyFor is the time after the last large packet until a path counts as idle. It is long, because a
	// connection that hangs repeats its packet at growing intervals, and because a sample of a fast device
	// misses most of the packets.
	busyFor = 30 * time.Second
	// busyInARow is how many busy paths are checked before one that is not busy. If more than manyBusy
	// paths are busy, a path that is not busy is checked after each busy one.
	busyInARow, manyBusy = 3, 150
)

// order is the order in which paths are checked. A path waits in one queue, or it is being checked.
type order struct {
	busy  queue // paths that carry large packets
	fresh queue // paths that were never checked
	due   queue // all other paths
	inRow int   // number of busy paths that were checked since the last path that is not busy
}

// turn is the part of a path's state that belongs to the order.
type turn struct {
	large    time.Time // the last time when the path carried a large packet
	place    int       // number of the path's present place in a queue; each new place gets a new number
	busy     bool      // the path is in the queue busy
	checking bool
}

// queue contains paths in the order in which they were added.
type queue []entry

// entry is a place in a queue. It is void if the path has got another place since, or is gone.
type entry struct {
	*state
	place int
}

// add adds a path at the end of the queue. If the path has another place in a queue, that place becomes void.
func (q *queue) add(s *state) {
	s.turn.place++
	*q = append(*q, entry{s, s.turn.place})
}

func (e entry) void() bool { return e.gone || e.place != e.turn.place }

// carries records that a path carries large packets at the time now. Unless the path is being checked, it
// then waits in the queue busy.
func (o *order) carries(s *state, now time.Time) {
	s.turn.large = now
	if !s.turn.checking && !s.turn.busy {
		o.wait(s, now)
	}
}

// checked records the end of a check, and adds the path to the queue busy or due.
func (o *order) checked(s *state, now time.Time) {
	s.turn.checking = false
	o.wait(s, now)
}

// wait adds a path to the queue busy if it has carried a large packet within busyFor, and otherwise to the
// queue due.
func (o *order) wait(s *state, now time.Time) {
	if s.turn.busy = now.Sub(s.turn.large) < busyFor; s.turn.busy {
		o.busy.add(s)
	} else {
		o.due.add(s)
	}
}

// next returns the path that must be checked now, or nil and the time until there may be one. It takes the
// path out of its queue. The caller must call checked after the check.
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

// first takes the first path out of a queue. If the last check of that path began less than an interval ago,
// or the queue is empty, it returns nil and the time until there may be a path to check. It drops void
// entries, and moves busy paths that have become idle to the queue due.
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

// sample is the function that Prober.sample contains outside of tests.
func sample(ctx context.Context, device string) ([]netip.Addr, error) {
	return traffic.Sample(ctx, device, large, watchFor)
}

// watch finds the paths that carry large packets, until ctx ends. It does so only while some paths have to
// wait for their check. Samples begin at varying intervals, because traffic may be periodic too.
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

// crowded returns the devices of all paths if there are so many paths that some have to wait, otherwise nil.
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

// carry records that large packets were sent to these addresses, and wakes Run. It ignores addresses to
// which there is no path.
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

// to returns the path to the smallest subnet that contains the address, or nil if there is none.
func (p *Prober) to(a netip.Addr) *state {
	for bits := a.BitLen(); bits > 0; bits-- {
		subnet := netip.PrefixFrom(a, bits).Masked()
		if s := p.paths[subnet]; s != nil {
			return s
		}
	}
	return nil
}
