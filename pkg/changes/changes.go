// SPDX-License-Identifier: Apache-2.0

// Package changes limits how many changes of peers are reported if thousands change at once.
package changes

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"
)

// Burst is how many changes are reported at a time.
const Burst = 5

// every is the time after which one more change may be reported.
const every = time.Minute

// Limit says which changes are reported. It is safe for concurrent use.
type Limit struct {
	limit *rate.Limiter

	mu     sync.Mutex
	silent int // changes that were not reported since the last one that was
}

// NewLimit returns a Limit.
func NewLimit() *Limit { return &Limit{limit: rate.NewLimiter(rate.Every(every), Burst)} }

// Next returns log for the next change, with the number of changes before it that were not reported. It
// returns false if this one is not reported either.
func (l *Limit) Next(log klog.Logger) (klog.Logger, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.limit.Allow() {
		l.silent++
		return log, false
	}
	if l.silent > 0 {
		log = log.WithValues("changesNotLogged", l.silent)
	}
	l.silent = 0
	return log, true
}
