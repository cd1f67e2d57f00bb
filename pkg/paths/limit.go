// SPDX-License-Identifier: Apache-2.0

package paths

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Limit limits the packets that all probers of a host send together. It divides the rate among them in
// proportion to their numbers of paths, so that their rounds take the same time. It is safe for
// concurrent use.
type Limit struct {
	*rate.Limiter

	mu      sync.Mutex
	probers map[*Prober]demand
	all     demand // sum of the demands
}

// demand contains the numbers of paths of a prober.
type demand struct {
	paths int // number of paths to all peers
	due   int // number of paths that this host checks in a round
}

// NewLimit returns the limit for all probers of a host.
func NewLimit() *Limit {
	return &Limit{Limiter: rate.NewLimiter(Rate, Rate), probers: map[*Prober]demand{}}
}

// set replaces the demand of p. A zero d removes p, which has ended.
func (l *Limit) set(p *Prober, d demand) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.probers[p]
	l.all.paths += d.paths - was.paths
	l.all.due += d.due - was.due
	if d == (demand{}) {
		delete(l.probers, p)
	} else {
		l.probers[p] = d
	}
}

// split reports whether a round would take too long if p had n paths and this host checked all of them.
// If it returns true, only one host of each pair checks the path. The two hosts need not agree: if only
// one of them splits, the other one checks all its paths.
func (l *Limit) split(p *Prober, n int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return roundOf(l.all.paths-l.probers[p].paths+n) > round
}

// pause returns the time between two checks of p in a round, at the present demand of all probers. If p
// has no paths to check, it returns the time until the next round.
func (l *Limit) pause(p *Prober) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if own := l.probers[p].due; own > 0 {
		return roundOf(l.all.due) / time.Duration(own)
	}
	return leastRound
}

// roundOf returns the time in which n paths are checked once. It is at least leastRound.
func roundOf(n int) time.Duration {
	return max(leastRound, time.Duration(float64(n)/(Rate*share)*float64(time.Second)))
}
