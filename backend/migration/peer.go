// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"net/netip"
	"time"
)

type peer struct {
	key      string // of the lease
	subnets  []netip.Prefix
	side     int           // the backend that carries the packets to the peer
	decided  bool          // side is the result of a decision, and not only the initial value
	unusable string        // why the data for the next backend cannot be used
	refused  [sides]string // why the kernel has no route by that backend
	due      time.Time     // when the log names the peer because it does not follow to the next backend; zero if it need not
}

func keysOf(peers []*peer) (keys []string) {
	for _, p := range peers {
		keys = append(keys, p.key)
	}
	return keys
}

// patience is the time after which the log names a peer that does not follow to the next backend.
const patience = time.Minute

// waiters is a queue of peers that do not follow to the next backend yet, in the order in which the
// log names them. A pass looks only at the head of the queue, because it may contain thousands of
// peers.
type waiters []waiter

type waiter struct {
	peer *peer
	due  time.Time // if it differs from peer.due, the peer no longer waits with this entry
}

func (w *waiters) add(p *peer, now time.Time) {
	p.due = now.Add(patience)
	*w = append(*w, waiter{p, p.due})
}

// late returns the peers that have waited for patience, each once. again is the time until there
// may be more of them, or zero if no peer waits.
func (w *waiters) late(now time.Time) (late []*peer, again time.Duration) {
	for len(*w) > 0 {
		first := (*w)[0]
		waits := first.due.Equal(first.peer.due)
		if left := first.due.Sub(now); waits && left > 0 {
			return late, left
		}
		*w = (*w)[1:]
		if waits {
			first.peer.due = time.Time{}
			late = append(late, first.peer)
		}
	}
	return late, 0
}
