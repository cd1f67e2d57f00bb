// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	// round is the time within which the path between every pair of hosts should be checked once. With several
	// thousand paths a round takes longer.
	round = 5 * time.Minute
	// leastRound is the time of a round if there are few peers.
	leastRound = 10 * time.Second
	// Rate is the number of packets of probes and diagnoses that a host may send in a second, with all its
	// networks.
	Rate = 10
	// share is the part of Rate for the probes that each path gets once in a round. The rest is for TCP
	// and for broken paths.
	share = 0.9
)

// Limit limits the packets that all probers of a host send together. It divides the rate among them in
// proportion to their numbers of paths, so that their rounds take the same time. It is safe for
// concurrent use.
type Limit struct {
	*rate.Limiter

	mu  sync.Mutex
	all demand // sum of the demands of all probers
}

// demand contains the numbers of paths of a prober.
type demand struct {
	paths int // number of paths to all peers
	due   int // number of paths that this host checks in a round
}

// NewLimit returns the limit for all probers of a host.
func NewLimit() *Limit { return &Limit{Limiter: rate.NewLimiter(Rate, Rate)} }

// member is one prober among those that share a limit.
type member struct {
	limit *Limit
	own   demand // limit.mu guards it
}

// join returns a new member, which has no demand yet.
func (l *Limit) join() *member { return &member{limit: l} }

// set replaces the demand of the prober. When the prober ends it must set the zero demand.
func (m *member) set(d demand) {
	m.limit.mu.Lock()
	defer m.limit.mu.Unlock()
	m.limit.all.paths += d.paths - m.own.paths
	m.limit.all.due += d.due - m.own.due
	m.own = d
}

// split reports whether a round would take too long if the prober had n paths and this host checked all paths
// of all probers. If it returns true, only one host of each pair checks the path. The two hosts need not get
// the same result: if split is true on only one of them, the other one checks all its paths.
func (m *member) split(n int) bool {
	m.limit.mu.Lock()
	defer m.limit.mu.Unlock()
	return roundOf(m.limit.all.paths-m.own.paths+n) > round
}

// round returns the time in which each prober checks its paths once, at the present demand of all probers. It is short for
// a prober without paths, which has to learn soon that there are some.
func (m *member) round() time.Duration {
	m.limit.mu.Lock()
	defer m.limit.mu.Unlock()
	if m.own.due == 0 {
		return leastRound
	}
	return roundOf(m.limit.all.due)
}

// pause returns the time between two checks of the prober in a round, at the present demand of all probers.
func (m *member) pause() time.Duration {
	m.limit.mu.Lock()
	defer m.limit.mu.Unlock()
	return roundOf(m.limit.all.due) / time.Duration(max(m.own.due, 1))
}

// roundOf returns the time in which n paths are checked once. It is at least leastRound.
func roundOf(n int) time.Duration {
	return max(leastRound, time.Duration(float64(n)/(Rate*share)*float64(time.Second)))
}
