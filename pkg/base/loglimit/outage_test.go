// SPDX-License-Identifier: Apache-2.0

package loglimit

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

	"github.com/flanneld/flanneld/pkg/base/wait"
)

type failure struct{ kind string }

func (f failure) Error() string { return f.kind + " error" }
func (f failure) Kind() string  { return f.kind }

func (failure) RetryAfter() time.Duration { return time.Second }

func TestTracker(t *testing.T) {
	var reported []string
	tracker := NewOutage("store", func(err error) { reported = append(reported, fmt.Sprint(err)) })
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	ctx := klog.NewContext(t.Context(), logger)
	ended, cancel := context.WithCancel(ctx)
	cancel()

	tracker.Report(ctx, "watch", nil)
	tracker.Report(ctx, "watch", fmt.Errorf("list: %w", failure{"down"}))
	tracker.Report(ctx, "watch", failure{"down"})
	tracker.Report(ctx, "watch", Again{Text: "closed on purpose"})
	tracker.Report(ctx, "watch", fmt.Errorf("closed: %w", context.Canceled))
	tracker.Report(ctx, "lease", failure{"TLS"})
	tracker.Report(ctx, "lease", failure{"down"})
	tracker.Report(ended, "lease", nil)
	tracker.Report(ctx, "watch", errors.New("nonsense, but an answer"))
	tracker.Report(ctx, "lease", nil)
	tracker.Report(ctx, "watch", failure{"down"})
	tracker.Report(ctx, "watch", fmt.Errorf("conflict: %w", Again{Text: "another was faster", Answered: true}))
	tracker.Report(ctx, "watch", failure{"down"})
	tracker.Forget("watch")
	tracker.Report(ctx, "lease", nil)

	want := "<nil>, list: down error, TLS error, <nil>, down error, <nil>, down error, <nil>"
	if got := strings.Join(reported, ", "); got != want {
		t.Errorf("reported %s\nwant %s", got, want)
	}
	log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if n := strings.Count(log, "store is not usable"); n != 4 {
		t.Errorf("%d lines about the outage, want 4:\n%s", n, log)
	}
	if n := strings.Count(log, "store is usable again"); n != 3 {
		t.Errorf("%d lines about its end, want 3:\n%s", n, log)
	}
}

// TestRetry expects a try after each Failure, also after one that says nothing about the service, and the
// pause that the service has asked for.
func TestRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		final := errors.New("nonsense, but an answer")
		outcomes := []error{failure{"down"}, Again{Text: "closed on purpose"}, fmt.Errorf("list: %w", failure{"down"}), final}
		tries := 0
		var reported []error
		tracker := NewOutage("store", func(err error) { reported = append(reported, err) })
		start := time.Now()
		b := &wait.Backoff{Least: time.Millisecond, Most: time.Millisecond}
		err := tracker.Retry(t.Context(), "watch", b, func() error {
			tries++
			return outcomes[tries-1]
		})
		if !errors.Is(err, final) || tries != len(outcomes) || len(reported) != 2 || reported[1] != nil {
			t.Errorf("%v after %d tries, reported %v", err, tries, reported)
		}
		if took := time.Since(start).Round(time.Second); took != 2*time.Second {
			t.Errorf("the pauses took %v, want the 2s that the service has asked for", took)
		}

		ctx, cancel := context.WithCancel(t.Context())
		err = tracker.Retry(ctx, "watch", b, func() error {
			cancel()
			return failure{"down"}
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v after the end of the context", err)
		}
	})
}
