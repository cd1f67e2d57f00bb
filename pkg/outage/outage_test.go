// SPDX-License-Identifier: Apache-2.0

package outage

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

type failure struct{ kind string }

func (f failure) Error() string { return f.kind + " error" }
func (f failure) Kind() string  { return f.kind }

func TestTracker(t *testing.T) {
	var told []string
	tracker := New("store", func(err error) { told = append(told, fmt.Sprint(err)) })
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	ended, cancel := context.WithCancel(ctx)
	cancel()

	tracker.Report(ctx, "watch", nil)
	tracker.Report(ctx, "watch", fmt.Errorf("list: %w", failure{"down"}))
	tracker.Report(ctx, "watch", failure{"down"})
	tracker.Report(ctx, "lease", failure{"TLS"})
	tracker.Report(ctx, "lease", failure{"down"})
	tracker.Report(ended, "lease", nil)
	tracker.Report(ctx, "watch", errors.New("nonsense, but an answer"))
	tracker.Report(ctx, "lease", nil)
	tracker.Report(ctx, "watch", failure{"down"})
	tracker.Forget("watch")
	tracker.Report(ctx, "lease", nil)

	want := "<nil>, list: down error, TLS error, <nil>, down error, <nil>"
	if got := strings.Join(told, ", "); got != want {
		t.Errorf("told %s\nwant %s", got, want)
	}
	log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if n := strings.Count(log, "store is not usable"); n != 3 {
		t.Errorf("%d lines about the outage, want 3:\n%s", n, log)
	}
	if n := strings.Count(log, "store is usable again"); n != 2 {
		t.Errorf("%d lines about its end, want 2:\n%s", n, log)
	}
}

func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := Backoff{Least: time.Second, Most: 4 * time.Second}
		wait := func(atLeast, low, high time.Duration) {
			t.Helper()
			start := time.Now()
			if err := b.Wait(t.Context(), atLeast); err != nil {
				t.Fatal(err)
			}
			if d := time.Since(start); d < low || d > high {
				t.Errorf("waited %s, want %s to %s", d, low, high)
			}
		}
		for _, next := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 4 * time.Second} {
			wait(0, next/2, next*3/2)
		}
		b.Reset()
		wait(time.Minute, time.Minute+time.Second/2, time.Minute+3*time.Second/2)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := b.Wait(ctx, 0); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want the end of the context", err)
		}
	})
}
