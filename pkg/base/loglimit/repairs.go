// SPDX-License-Identifier: Apache-2.0

package loglimit

import (
	"context"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"
)

// logPause is the minimum time between two log lines.
const logPause = time.Minute

// Repairs counts repairs. A caller makes passes, each of which may repair something. After
// each pass it calls Note, and before the next pass it waits for the time that Pause returns.
type Repairs struct {
	limit         *rate.Limiter // of passes that repaired something
	message, unit string

	repaired int // number of repairs that are not logged yet
	logged   time.Time
}

// NewRepairs returns a Repairs. Pause permits the first passes with repairs, burst of them, without a pause.
// After that it permits perSecond such passes per second. message is the message of the log line, and
// unit is its key for the number of repairs.
func NewRepairs(perSecond rate.Limit, burst int, message, unit string) *Repairs {
	return &Repairs{limit: rate.NewLimiter(perSecond, burst), message: message, unit: unit}
}

// Note adds the repairs of a pass. repaired is their number, and may be zero. Note logs
// them at once the first time, and then at most once a minute. Only one goroutine at a
// time may call it.
func (l *Repairs) Note(ctx context.Context, repaired int) {
	now := time.Now()
	if repaired > 0 {
		l.limit.ReserveN(now, 1)
	}
	l.repaired += repaired
	if l.repaired == 0 || now.Sub(l.logged) < logPause {
		return
	}
	klog.FromContext(ctx).Info(l.message, l.unit, l.repaired)
	l.repaired = 0
	l.logged = now
}

// Pause returns the time until the next pass. It is zero if the passes with repairs so far
// are within the limit. Any goroutine may call Pause.
func (l *Repairs) Pause() time.Duration {
	debt := -l.limit.Tokens() / float64(l.limit.Limit())
	return max(0, time.Duration(debt*float64(time.Second)))
}
