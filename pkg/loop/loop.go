// SPDX-License-Identifier: Apache-2.0

// Package loop calls a function whenever it is woken, regularly at a slow interval, and
// again after it fails. The function reads the current state each time, so a lost or
// repeated wake does no harm.
package loop

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
)

// The pause after a failure doubles from minBackoff to maxBackoff.
const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 30 * time.Second
)

// Backoff returns pauses between tries. Each pause is about twice as long as the one
// before.
type Backoff struct{ pause time.Duration }

// Next returns the pause before the next try.
func (b *Backoff) Next() time.Duration {
	b.pause = min(max(2*b.pause, minBackoff), maxBackoff)
	return jitter(b.pause)
}

// Reset makes the next pause the shortest one again.
func (b *Backoff) Reset() { b.pause = 0 }

// Loop calls a step function each time it is woken, and at least once per resync period.
// Several wakes during one step lead to a single further step: the step reads the current
// state, so it does not need one call per event.
type Loop struct {
	resync time.Duration
	step   func(context.Context) error
	wake   chan struct{}
	calls  chan func()
}

// New returns a loop over step. Its first step runs when Run starts.
func New(resync time.Duration, step func(context.Context) error) *Loop {
	return &Loop{resync: resync, step: step, wake: make(chan struct{}, 1), calls: make(chan func())}
}

// After is the error that a successful step returns when it must run again after the
// given time.
type After time.Duration

// Error implements error.
func (a After) Error() string { return "again after " + time.Duration(a).String() }

// Wake asks for a step. It never blocks and may be called from any goroutine.
func (l *Loop) Wake() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Do runs f on the goroutine of the loop, between two steps, and returns after f. If ctx
// ends before the loop can run f, or the loop has ended, f does not run and Do returns
// the error of ctx.
func (l *Loop) Do(ctx context.Context, f func()) error {
	done := make(chan struct{})
	select {
	case l.calls <- func() { defer close(done); f() }:
		<-done
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run blocks until ctx ends, then returns nil. It repeats a failed step after a pause. It
// does not log the failure: the step does that.
func (l *Loop) Run(ctx context.Context) error {
	var backoff Backoff
	for ctx.Err() == nil {
		wait := jitter(l.resync)
		err := l.step(ctx)
		if after, ok := errors.AsType[After](err); ok {
			wait = min(wait, time.Duration(after))
			backoff.Reset()
		} else if err != nil {
			// Frequent wakes must not turn a failing step into a busy loop.
			if !sleep(ctx, minBackoff) {
				return nil
			}
			wait = backoff.Next()
		} else {
			backoff.Reset()
		}
		l.rest(ctx, wait)
	}
	return nil
}

// rest blocks until the next step is due.
func (l *Loop) rest(ctx context.Context, wait time.Duration) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
			return
		case <-timer.C:
			return
		case f := <-l.calls:
			f()
		}
	}
}

// jitter changes d by up to 20 % in either direction, so that hosts do not act at the
// same moment.
func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.8 + 0.4*rand.Float64()))
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
