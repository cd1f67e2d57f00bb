// SPDX-License-Identifier: Apache-2.0

// Package wait makes goroutines wait: for the end of a time, the next try of something
// that fails, a signal of another goroutine, or a run that they share with other callers.
// A Renewal also renews what would expire while a function runs.
package wait

import (
	"cmp"
	"context"
	"math/rand/v2"
	"time"
)

// For blocks for d. It returns the error of ctx if ctx ends first, or has ended before.
func For(ctx context.Context, d time.Duration) error { return ForOr(ctx, d, nil) }

// ForOr is like For, but also returns nil as soon as it receives from wake or wake is closed. With a nil
// wake it is the same as For.
func ForOr(ctx context.Context, d time.Duration, wake <-chan struct{}) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	timer := time.NewTimer(d)
	defer timer.Stop()

	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-wake:
		return nil
	case <-timer.C:
		return nil
	}
}

// InUseLimit limits the time of WhileInUse.
const InUseLimit = 2 * time.Second

// WhileInUse calls try until it returns false. try returns true while a socket or lock is in use. WhileInUse
// pauses shortly between the calls, and gives up after InUseLimit or when ctx ends. The sockets and locks of
// a process that has just ended may be in use for a moment: a child that the process has forked to run
// another program, such as iptables, has them until that program starts.
func WhileInUse(ctx context.Context, try func() (inUse bool)) {
	const pause = 20 * time.Millisecond
	for end := time.Now().Add(InUseLimit); try() && time.Now().Before(end) && For(ctx, pause) == nil; {
		continue
	}
}

// UntilNext returns the time until the next of the moments that are a multiple of period. What several networks of a
// process do regularly, they do at these moments, because waking up for each of them would cost more.
func UntilNext(period time.Duration) time.Duration {
	return period - time.Duration(time.Now().UnixNano())%period
}

// Vary returns a random time that is shorter or longer than d by up to the given share, so
// that hosts do not act at the same moment.
func Vary(d time.Duration, share float64) time.Duration {
	return time.Duration(float64(d) * (1 - share + 2*share*rand.Float64()))
}

// Defaults for the fields of Backoff that are zero.
const (
	defaultLeast = 100 * time.Millisecond
	defaultMost  = 30 * time.Second
	defaultShare = 0.2
)

// Backoff waits between tries. The pause doubles from Least to Most, and varies by Share in
// either direction. The zero Backoff is usable: it doubles from 100 ms to 30 s, and varies
// by a fifth.
type Backoff struct {
	Least, Most time.Duration
	Share       float64
	// Forget is the time without a call of Wait after which the pause is the shortest one again. With zero,
	// only Reset does that.
	Forget time.Duration

	pause  time.Duration // the last pause before it was varied; 0 at first
	waited time.Time     // when Wait returned last
}

// Next returns the next pause, and doubles the one after it.
func (b *Backoff) Next() time.Duration {
	least := cmp.Or(b.Least, defaultLeast)
	most := cmp.Or(b.Most, defaultMost)
	b.pause = min(max(2*b.pause, least), most)
	return Vary(b.pause, cmp.Or(b.Share, defaultShare))
}

// Reset makes the next pause the shortest one again.
func (b *Backoff) Reset() { b.pause = 0 }

// Wait blocks for the sum of the next pause and more. It returns the error of ctx if ctx
// ends first.
func (b *Backoff) Wait(ctx context.Context, more time.Duration) error {
	if b.Forget > 0 && time.Since(b.waited) > b.Forget {
		b.Reset()
	}
	defer func() { b.waited = time.Now() }()
	return For(ctx, more+b.Next())
}

// Signal wakes a goroutine that receives from it. Several calls of Send before the goroutine
// receives are one signal, so the goroutine must read the current state each time.
type Signal chan struct{}

// NewSignal returns a Signal.
func NewSignal() Signal { return make(Signal, 1) }

// Send sends the signal. It never blocks and may be called from any goroutine.
func (s Signal) Send() {
	select {
	case s <- struct{}{}:
	default:
	}
}
