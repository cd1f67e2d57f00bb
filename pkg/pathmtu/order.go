// SPDX-License-Identifier: Apache-2.0

package pathmtu

import "time"

const (
	// Rate is the maximum number of echo requests per second that a host sends to find path MTUs, in all
	// its networks together.
	Rate = 10
	// interval is the least time between two checks of a path. The time is longer if there are more paths
	// than Rate allows.
	interval = 2 * time.Second
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
