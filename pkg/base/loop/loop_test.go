// SPDX-License-Identifier: Apache-2.0

package loop_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/pkg/base/loop"
)

// start runs a loop in the synctest bubble. It returns the loop and the times of its
// steps, relative to the start. fails is the number of steps that fail before one succeeds.
func start(t *testing.T, resync time.Duration, fails int) (*loop.Loop, *[]time.Duration) {
	t.Helper()
	begin := time.Now()
	var steps []time.Duration
	l := loop.New(resync, func(context.Context) error {
		steps = append(steps, time.Since(begin))
		if len(steps) <= fails {
			return errors.New("not yet")
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	synctest.Wait()
	return l, &steps
}

// advance moves the bubble's clock forward by d and waits until all goroutines are idle.
func advance(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func TestWakeRunsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, steps := start(t, time.Hour, 0)
		l.Wake()
		l.Wake() // coalesced with the first, or one more step: never lost
		synctest.Wait()
		if n := len(*steps); n < 2 || n > 3 || (*steps)[n-1] != 0 {
			t.Errorf("steps at %v, want two or three at 0s", *steps)
		}
	})
}

func TestResync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, steps := start(t, 5*time.Minute, 0)
		advance(61 * time.Minute)
		if n := len(*steps); n < 10 || n > 16 {
			t.Errorf("%d steps in an hour of 5m ± 20 %%", n)
		}
	})
}

func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, steps := start(t, time.Hour, 5)
		advance(30 * time.Second)
		if n := len(*steps); n != 6 {
			t.Fatalf("%d steps, want 5 failures and a success: %v", n, *steps)
		}
		for i := 2; i < 6; i++ {
			earlier, later := (*steps)[i-1]-(*steps)[i-2], (*steps)[i]-(*steps)[i-1]
			if later <= earlier {
				t.Errorf("pause %d is %s, after one of %s", i, later, earlier)
			}
		}
	})
}

func TestAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		var steps []time.Duration
		l := loop.New(time.Hour, func(context.Context) error {
			steps = append(steps, time.Since(begin))
			if len(steps) < 4 {
				return loop.After(700 * time.Millisecond)
			}
			return nil
		})
		ctx, cancel := context.WithCancel(t.Context())
		go func() { _ = l.Run(ctx) }()
		advance(10 * time.Second)
		cancel()
		synctest.Wait()
		if want := []time.Duration{0, 7e8, 14e8, 21e8}; !slices.Equal(steps, want) {
			t.Errorf("steps at %v, want %v", steps, want)
		}
	})
}

// TestAfterIsNoLaterThanResync checks that a step that asks for a later repetition still runs at
// each resync.
func TestAfterIsNoLaterThanResync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		steps := 0
		l := loop.New(time.Second, func(context.Context) error {
			steps++
			return loop.After(time.Hour)
		})
		ctx, cancel := context.WithCancel(t.Context())
		go func() { _ = l.Run(ctx) }()
		advance(12 * time.Second)
		cancel()
		synctest.Wait()
		if steps < 10 {
			t.Errorf("%d steps in 12s with a resync of 1s", steps)
		}
	})
}

func TestFailingStepIsNotABusyLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, steps := start(t, time.Hour, 1<<30)
		for range 1000 {
			l.Wake()
			advance(time.Millisecond)
		}
		if n := len(*steps); n > 12 {
			t.Errorf("%d steps in a second of wakes", n)
		}
	})
}

func TestDoRunsBetweenSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, steps := start(t, time.Hour, 0)
		before := len(*steps) // read here and written by the loop, but never at the same time
		var seen int
		if err := l.Do(t.Context(), func() { seen = len(*steps) }); err != nil || seen != before {
			t.Errorf("Do: %v, %d steps, want %d: Do must not cause a step", err, seen, before)
		}
		advance(61 * time.Minute) // a resync period of an hour varies from 48 to 72 minutes
		advance(12 * time.Minute) // after 73 minutes a step has run, because Do does not delay it
		if n := len(*steps); n != before+1 {
			t.Errorf("%d steps in an hour, want one more than %d", n, before)
		}
	})
}

func TestDoGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := loop.New(time.Hour, func(context.Context) error { return nil }) // never run
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := l.Do(ctx, func() { t.Error("f ran though the loop did not") }); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Do returned %v, want the context's error", err)
		}
	})
}
