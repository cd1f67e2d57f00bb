// SPDX-License-Identifier: Apache-2.0

// Package schedule runs checks that are due again and again, several at the same time.
package schedule

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// Queue contains values that wait for a check, by the time when that is due. It is safe for concurrent use.
type Queue[T comparable] struct {
	added wait.Signal // another value is the first

	mu      sync.Mutex
	waiting []entry[T]
}

type entry[T any] struct {
	value T
	due   time.Time
}

// NewQueue returns an empty queue.
func NewQueue[T comparable]() *Queue[T] { return &Queue[T]{added: wait.NewSignal()} }

// Add adds a value, behind others that are due at the same time.
func (q *Queue[T]) Add(v T, due time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	at, _ := slices.BinarySearchFunc(q.waiting, due, func(e entry[T], due time.Time) int {
		if e.due.After(due) {
			return 1
		}
		return -1
	})
	q.waiting = slices.Insert(q.waiting, at, entry[T]{v, due})
	if at == 0 {
		q.added.Send()
	}
}

// Remove removes a value, unless it is being checked.
func (q *Queue[T]) Remove(v T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting = slices.DeleteFunc(q.waiting, func(e entry[T]) bool { return e.value == v })
}

// Len returns the number of values that wait.
func (q *Queue[T]) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting)
}

// idle is the pause while a queue is empty. A value that is added ends it.
const idle = time.Hour

// next takes the first value out of the queue if it is due soon. Otherwise ok is false, and pause is the time until it is.
func (q *Queue[T]) next(now time.Time, soon time.Duration) (v T, ok bool, pause time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		return v, false, idle
	}
	first := q.waiting[0]
	if left := first.due.Sub(now); left > soon {
		return v, false, left
	}
	q.waiting = slices.Delete(q.waiting, 0, 1)
	return first.value, true, 0
}

// Checks says how the values of a queue are checked.
type Checks[T any] struct {
	// Soon is how much earlier than due a check may begin. Then several checks begin at once.
	Soon time.Duration
	// AtOnce limits the number of checks at the same time.
	AtOnce int
	// Permit waits until one more check may begin. It returns an error if ctx ends.
	Permit func(ctx context.Context) error
	// Check checks a value that is not in the queue meanwhile, and adds it again unless it is gone.
	Check func(ctx context.Context, v T)
}

// Run checks values when they are due, until ctx ends, and returns when all checks have ended.
func (q *Queue[T]) Run(ctx context.Context, c Checks[T]) {
	var running sync.WaitGroup
	defer running.Wait()
	slots := make(chan struct{}, c.AtOnce)
	for ctx.Err() == nil {
		v, ok, pause := q.next(time.Now(), c.Soon)
		if !ok {
			_ = wait.ForOr(ctx, pause, q.added) // the loop notices the end of ctx
			continue
		}

		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		if c.Permit(ctx) != nil {
			return
		}

		running.Go(func() {
			defer func() { <-slots }()
			c.Check(ctx, v)
		})
	}
}
