// SPDX-License-Identifier: Apache-2.0

package pathmtu

import (
	"slices"
	"time"
)

const (
	// Rate is the maximum number of echo requests per second that a host sends to find path MTUs, in all
	// its networks together.
	Rate = 10
	// interval is the least time between two checks of a path. The time is longer if there are more paths
	// than Rate allows.
	interval = 2 * time.Second
)

// queue contains the paths that wait for a check, by the time when it is due. Paths that were never checked come first.
type queue []*state

// add adds a path, behind others that are due at the same time.
func (q *queue) add(s *state) {
	at, _ := slices.BinarySearchFunc(*q, s.due, func(other *state, due time.Time) int {
		if other.due.After(due) {
			return 1
		}
		return -1
	})
	*q = slices.Insert(*q, at, s)
}

func (q *queue) remove(s *state) {
	*q = slices.DeleteFunc(*q, func(other *state) bool { return other == s })
}

// next takes the path that must be checked now out of the queue, or returns the time until there may be
// one. The caller adds the path again after the check.
func (q *queue) next(now time.Time) (*state, time.Duration) {
	if len(*q) == 0 {
		return nil, interval
	}
	s := (*q)[0]
	if left := s.due.Sub(now); left > 0 {
		return nil, left
	}
	*q = slices.Delete(*q, 0, 1)
	s.due = now.Add(interval)
	return s, 0
}
