// Package loop runs a level-triggered step: on demand, at a slow tick, and
// again after failure.
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

// Backoff is the pause between tries, which gets longer with each.
type Backoff struct{ pause time.Duration }

// Next returns the pause before the next try.
func (b *Backoff) Next() time.Duration {
	b.pause = min(max(2*b.pause, minBackoff), maxBackoff)
	return jitter(b.pause)
}

// Reset has the next pause be a short one.
func (b *Backoff) Reset() { b.pause = 0 }

// Loop calls a step whenever it is woken, and at least once in every resync
// period. Wakes while the step runs are one wake: the step looks at what is,
// not at what happened.
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

// After is what a step returns that has to run again in that time, and has not
// failed.
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

// Do runs f on the loop's goroutine, between steps, and returns when it has
// run. Where the loop does not get to it before ctx ends, or has ended itself,
// f does not run and the error is ctx's.
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

// Run blocks until ctx ends, and returns nil then. A step that fails is
// repeated, after a pause; reporting the failure is the step's own business.
func (l *Loop) Run(ctx context.Context) error {
	var backoff Backoff
	for ctx.Err() == nil {
		wait := jitter(l.resync)
		err := l.step(ctx)
		if after, ok := errors.AsType[After](err); ok {
			wait = min(wait, time.Duration(after))
			backoff.Reset()
		} else if err != nil {
			// However often it is woken, a step that fails rests a little.
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

// rest returns when it is time for a step.
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

// jitter spreads d by 20 % either way, so that hosts do not move in step.
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
