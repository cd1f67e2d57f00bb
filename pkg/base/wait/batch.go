// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"context"
	"sync"
	"time"
)

// Batch runs a function for many callers at once: all callers that come before a run begins share
// its result, which is therefore never older than their call. Runs do not overlap. The zero Batch is
// usable.
type Batch[T any] struct {
	// Rest is the minimum time from the end of a run to the start of the next one.
	Rest time.Duration

	mu   sync.Mutex
	last *run[T] // the latest run; nil before the first
	next *run[T] // the run that new callers join: last until that run begins, then nil
}

// run is one run of the function.
type run[T any] struct {
	ctx     context.Context
	cancel  context.CancelFunc
	callers int           // number of callers whose contexts have not ended
	done    chan struct{} // closed when ended and result are set
	ended   time.Time
	result  T
}

// Do returns the result of a run that begins after the call. The first caller of a run calls its f on its
// own goroutine, and the f of the other callers is not used. The context of f ends when the contexts of
// all callers have ended. Do waits for the end of the run even if ctx has ended.
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

// join adds a caller to the next run and returns that run. first is set for the first caller, who must
// call the function after the run before has ended. before is nil for the other callers, and for the
// first run.
func (b *Batch[T]) join(ctx context.Context) (r, before *run[T], first bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next == nil {
		r = &run[T]{done: make(chan struct{})}
		r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
		before = b.last
		first = true
		b.next = r
		b.last = r
	}
	b.next.callers++
	return b.next, before, first
}

// leave removes a caller whose context has ended. When all callers have left r, leave cancels the context
// of r, and r accepts no further callers.
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
