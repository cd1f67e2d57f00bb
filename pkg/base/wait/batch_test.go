// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestBatch checks that all callers that come during the first run share the second one.
func TestBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const callers = 100
		b, runs := Batch[int]{Rest: time.Second}, 0
		run := func(context.Context) int {
			runs++
			time.Sleep(time.Minute)
			return runs
		}
		start := time.Now()
		var first sync.WaitGroup
		first.Go(func() { b.Do(t.Context(), run) })
		time.Sleep(time.Second)
		var group sync.WaitGroup
		for range callers {
			group.Go(func() {
				if got := b.Do(t.Context(), run); got != 2 {
					t.Errorf("a call during the first run got the result of run %d, want 2", got)
				}
			})
			time.Sleep(time.Millisecond) // until the caller has joined: a wait for a mutex stops the clock of the bubble
		}
		first.Wait()
		group.Wait()
		if took, want := time.Since(start), 2*time.Minute+time.Second; runs != 2 || took != want {
			t.Errorf("%d runs took %v, want 2 in %v", runs, took, want)
		}
	})
}

// TestBatchEnds checks that the context of a run ends when the contexts of all its callers have ended,
// and that a later caller gets a run of its own.
func TestBatchEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b Batch[error]
		run := func(ctx context.Context) error { return For(ctx, time.Hour) }
		one, end := context.WithTimeout(t.Context(), time.Minute)
		defer end()
		start := time.Now()
		if err := b.Do(one, run); err == nil || time.Since(start) != time.Minute {
			t.Errorf("%v after %v, want the end of the caller's context after a minute", err, time.Since(start))
		}
		if err := b.Do(t.Context(), run); err != nil {
			t.Errorf("the next caller got %v", err)
		}
	})
}
