// SPDX-License-Identifier: Apache-2.0

// Package loglimit keeps the log short when the same thing happens many times: changes of peers, repairs
// of what other programs change, and failures of a service that cannot be reached.
package loglimit

import (
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"
)

// Burst is the usual number of changes that may be reported at once.
const Burst = 5

// Many is the number of changes by other hosts that may be reported at once. It is more than an operator
// reads, but a host can make what it has published wrong and right again 300 times a second.
const Many = 100

// every is the time after which one more change may be reported.
const every = time.Minute

// Changes says which changes are reported. It is safe for concurrent use. A nil Changes permits all.
type Changes struct {
	limit *rate.Limiter

	mu     sync.Mutex
	silent int // number of changes since the last reported one
}

// NewChanges returns a Changes that permits burst changes at once, and then one more a minute.
func NewChanges(burst int) *Changes {
	return &Changes{limit: rate.NewLimiter(rate.Every(every), burst)}
}

// Next returns the logger with which the caller reports the next change. It is log, with the number of
// changes that were not reported before, if there are any. Next returns false if the caller must not
// report this change.
func (l *Changes) Next(log klog.Logger) (klog.Logger, bool) {
	if l == nil {
		return log, true
	}

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
