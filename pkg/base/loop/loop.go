// SPDX-License-Identifier: Apache-2.0

// Package loop calls a function whenever the loop is woken, regularly at a slow interval,
// and again after the function has failed. The function reads the current state each
// time, so a lost or repeated wake does no harm.
package loop

import (
	"context"
	"errors"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// minPause is the minimum pause after a failure. Frequent wakes must not turn a failing
// step into a busy loop.
const minPause = 100 * time.Millisecond

// spread is the share by which the resync period varies, so that hosts do not act at the
// same moment.
const spread = 0.2

// Loop calls a step function each time it is woken, and at least once per resync period.
// Several wakes during one step lead to a single further step: the step reads the current
// state, so it does not need one call per event.
type Loop struct {
	resync time.Duration
	step   func(context.Context) error
	wake   wait.Signal
	calls  chan func()
}

// New returns a loop that calls step. The first call is when Run starts. The resync
// period is resync, varied by spread.
func New(resync time.Duration, step func(context.Context) error) *Loop {
	return &Loop{resync: resync, step: step, wake: wait.NewSignal(), calls: make(chan func())}
}

// After is the error that a successful step returns when it must run again after the
// given time at the latest.
type After time.Duration

// Error implements error.
func (a After) Error() string { return "again after " + time.Duration(a).String() }

// Wake asks for a step. It never blocks and may be called from any goroutine.
func (l *Loop) Wake() { l.wake.Send() }

// Do runs f on the goroutine of the loop, between two steps, and returns after f. If ctx
// ends before the loop can run f, f does not run and Do returns the error of ctx. If the
// loop has ended, Do blocks until ctx ends.
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

// Run blocks until ctx ends, then returns nil. It repeats a failed step after a pause,
// which a wake shortens to minPause. It does not log the failure: the step does that.
func (l *Loop) Run(ctx context.Context) error {
	var backoff wait.Backoff
	for ctx.Err() == nil {
		pause := wait.Vary(l.resync, spread)
		err := l.step(ctx)
		if after, ok := errors.AsType[After](err); ok {
			pause = min(pause, time.Duration(after))
			backoff.Reset()
		} else if err != nil {
			if wait.For(ctx, minPause) != nil {
				return nil
			}
			pause = backoff.Next()
		} else {
			backoff.Reset()
		}
		l.rest(ctx, pause)
	}
	return nil
}

// rest blocks until the next step is due: after the pause, or at the next wake or the end
// of ctx. Meanwhile it runs the functions of Do.
func (l *Loop) rest(ctx context.Context, pause time.Duration) {
	timer := time.NewTimer(pause)
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
