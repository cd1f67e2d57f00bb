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

	mu   sync.Mutex
	last *run[T] // the latest run; nil before the first
	next *run[T] // the same run while it accepts callers, which is until it begins
}

// run is one run of the function.
type run[T any] struct {
	ctx     context.Context
	cancel  context.CancelFunc
	callers int           // whose context has not ended
	done    chan struct{} // closed when the two next fields are set
	ended   time.Time
	result  T
}

// Do returns the result of a run of f that begins after the call. The first caller of a run runs its f
// on its own goroutine. The context of f ends when the contexts of all callers have ended.
func (b *Batch[T]) Do(ctx context.Context, f func(context.Context) T) T {
	r, before, first := b.join(ctx)
	defer context.AfterFunc(ctx, func() { b.leave(r) })()
	if !first {
		<-r.done
		return r.result
	}
	defer close(r.done)
	defer r.cancel()
	if before != nil {
		<-before.done
		_ = For(r.ctx, time.Until(before.ended.Add(b.Rest))) //nolint:contextcheck // the context of all callers; f notices its end
	}
	b.close(r)
	r.result = f(r.ctx) //nolint:contextcheck // the context of all callers
	r.ended = time.Now()
	return r.result
}

// join returns the next run. first is set if the caller must run it, after the run before it if there
// is one.
func (b *Batch[T]) join(ctx context.Context) (r, before *run[T], first bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next == nil {
		r = &run[T]{done: make(chan struct{})}
		r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
		before, first = b.last, true
		b.next, b.last = r, r
	}
	b.next.callers++
	return b.next, before, first
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
