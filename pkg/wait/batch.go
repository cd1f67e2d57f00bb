// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"context"
	"sync"
	"time"
)

// Batch runs a function for many callers at once: all callers that come before a run begins share
// its result, which is therefore never older than their call. One run follows the other. The zero
// Batch is usable.
type Batch[T any] struct {
	// Rest is the time from the end of a run to the begin of the next one.
	Rest time.Duration

	running sync.Mutex
	ended   time.Time // the last run; guarded by running

	mu   sync.Mutex
	next *run[T] // has not begun yet; nil if there is none
}

// run is one run of the function.
type run[T any] struct {
	ctx     context.Context
	cancel  context.CancelFunc
	callers int // whose context has not ended
	done    chan struct{}
	result  T
}

// Do returns the result of a run of f that begins after the call. The first caller of a run runs its f
// on its own goroutine. The context of f ends when the contexts of all callers have ended.
func (b *Batch[T]) Do(ctx context.Context, f func(context.Context) T) T {
	r, first := b.join(ctx)
	defer context.AfterFunc(ctx, func() { b.leave(r) })()
	if !first {
		<-r.done
		return r.result
	}
	b.running.Lock()
	defer b.running.Unlock()
	if !b.ended.IsZero() {
		_ = For(r.ctx, time.Until(b.ended.Add(b.Rest))) // f notices the end of its context
	}
	b.close(r)
	defer close(r.done)
	defer r.cancel()
	r.result = f(r.ctx)
	b.ended = time.Now()
	return r.result
}

// join returns the next run. first is set if the caller must run it.
func (b *Batch[T]) join(ctx context.Context) (r *run[T], first bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r = b.next; r == nil {
		r, first = &run[T]{done: make(chan struct{})}, true
		r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
		b.next = r
	}
	r.callers++
	return r, first
}

// leave counts a caller whose context has ended. A run that all callers have left accepts no others.
func (b *Batch[T]) leave(r *run[T]) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.callers--; r.callers > 0 {
		return
	}
	r.cancel()
	if b.next == r {
		b.next = nil
	}
}

// close ends the time in which callers join r.
func (b *Batch[T]) close(r *run[T]) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next == r {
		b.next = nil
	}
}
