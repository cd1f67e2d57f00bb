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
)

// order is the order in which paths are checked. A path waits in one queue, or it is being checked.
type order struct {
	fresh queue // paths that were never checked, which come first
	due   queue // all other paths
}

// queue contains paths in the order in which they were added. Those that are gone stay until their turn.
type queue []*state

// next takes the path that must be checked now out of its queue, or returns the time until there may be
// one. The caller adds the path to due after the check.
func (o *order) next(now time.Time) (*state, time.Duration) {
	pause := interval
	for _, q := range []*queue{&o.fresh, &o.due} {
		s, left := q.first(now)
		if s != nil {
			s.begun = now
			return s, 0
		}
		pause = min(pause, left)
	}
	return nil, pause
}

// first is next for one queue.
func (q *queue) first(now time.Time) (*state, time.Duration) {
	for len(*q) > 0 {
		s := (*q)[0]
		if left := s.begun.Add(interval).Sub(now); left > 0 && !s.gone {
			return nil, left
		}
		(*q)[0] = nil
		*q = (*q)[1:]
		if !s.gone {
			return s, 0
		}
	}
	return nil, interval
}
