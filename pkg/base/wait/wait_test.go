// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if err := For(t.Context(), time.Second); err != nil || time.Since(start) != time.Second {
			t.Errorf("waited %s with %v, want a second", time.Since(start), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start = time.Now()
		if err := For(ctx, time.Hour); !errors.Is(err, context.DeadlineExceeded) || time.Since(start) != time.Second {
			t.Errorf("waited %s with %v, want the end of the context after a second", time.Since(start), err)
		}
		for range 100 {
			if err := For(ctx, 0); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("For returned %v after the end of the context, want its error", err)
			}
		}
	})
}

// TestForOr expects the end of the wait by whichever comes first: the signal, the time or the end of the context.
func TestForOr(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wake, ended := NewSignal(), make(chan struct{})
		close(ended)
		brief, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		time.AfterFunc(time.Second, wake.Send)
		for _, tt := range []struct {
			what string
			d    time.Duration
			wake <-chan struct{}
			want error
			took time.Duration
		}{
			{"a signal during the wait", time.Hour, wake, nil, time.Second},
			{"a time without a signal", 9 * time.Second, wake, nil, 9 * time.Second},
			{"a closed channel", time.Hour, ended, nil, 0},
			{"no channel", 10 * time.Second, nil, nil, 10 * time.Second},
			{"the end of the context", time.Hour, wake, context.DeadlineExceeded, 40 * time.Second},
			{"a context that has ended", time.Hour, ended, context.DeadlineExceeded, 0},
		} {
			start := time.Now()
			if err := ForOr(brief, tt.d, tt.wake); !errors.Is(err, tt.want) || time.Since(start) != tt.took {
				t.Errorf("%s: waited %v with error %v, want %v with %v", tt.what, time.Since(start), err, tt.took, tt.want)
			}
		}
	})
}

func TestVary(t *testing.T) {
	var shorter, longer bool
	for range 1000 {
		d := Vary(time.Minute, 0.5)
		if d < 30*time.Second || d > 90*time.Second {
			t.Fatalf("%s, want 30s to 90s", d)
		}
		shorter, longer = shorter || d < 45*time.Second, longer || d > 75*time.Second
	}
	if !shorter || !longer {
		t.Errorf("never shorter %v or longer %v by half of the share, want both", !shorter, !longer)
	}
	if d := Vary(0, 0.5); d != 0 {
		t.Errorf("%s for no time, want none", d)
	}
}

func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := Backoff{Least: time.Second, Most: 4 * time.Second, Share: 0.5}
		expect := func(more, low, high time.Duration) {
			t.Helper()
			start := time.Now()
			if err := b.Wait(t.Context(), more); err != nil {
				t.Fatal(err)
			}
			if d := time.Since(start); d < low || d > high {
				t.Errorf("waited %s, want %s to %s", d, low, high)
			}
		}
		for _, next := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 4 * time.Second} {
			expect(0, next/2, next*3/2)
		}
		b.Reset()
		expect(time.Minute, time.Minute+time.Second/2, time.Minute+3*time.Second/2)

		b = Backoff{Least: time.Second, Most: 4 * time.Second, Share: 0.5, Forget: time.Minute}
		expect(0, time.Second/2, 3*time.Second/2)
		time.Sleep(time.Minute)
		expect(0, time.Second, 3*time.Second)
		time.Sleep(time.Minute + 1)
		expect(0, time.Second/2, 3*time.Second/2)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := b.Wait(ctx, 0); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want the end of the context", err)
		}
	})
}

func TestZeroBackoff(t *testing.T) {
	var b Backoff
	for _, want := range []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond} {
		if d := b.Next(); d < want*4/5 || d > want*6/5 {
			t.Errorf("pause of %s, want %s and a fifth less or more", d, want)
		}
	}
	for range 10 {
		b.Next()
	}
	if d := b.Next(); d < 24*time.Second || d > 36*time.Second {
		t.Errorf("longest pause is %s, want 30s and a fifth less or more", d)
	}
}

func TestSignal(t *testing.T) {
	s := NewSignal()
	for range 2 {
		s.Send()
		s.Send()
		select {
		case <-s:
		default:
			t.Fatal("no signal was received")
		}
		select {
		case <-s:
			t.Fatal("two calls before the receiver were two signals, want one")
		default:
		}
	}
}

// TestUntilNext expects callers that come at different times to wait until the same moment.
func TestUntilNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // begins at a full minute
		for _, want := range []time.Duration{time.Minute, 40 * time.Second, 20 * time.Second, time.Minute} {
			if left := UntilNext(time.Minute); left != want {
				t.Errorf("%v until the next minute, want %v", left, want)
			}
			time.Sleep(20 * time.Second)
		}
	})
}
