// SPDX-License-Identifier: Apache-2.0

package loglimit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

type failure struct{ kind string }

func (f failure) Error() string { return f.kind + " error" }
func (f failure) Kind() string  { return f.kind }

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
	tracker.Report(ctx, "lease", failure{"TLS"})
	tracker.Report(ctx, "lease", failure{"down"})
	tracker.Report(ended, "lease", nil)
	tracker.Report(ctx, "watch", errors.New("nonsense, but an answer"))
	tracker.Report(ctx, "lease", nil)
	tracker.Report(ctx, "watch", failure{"down"})
	tracker.Forget("watch")
	tracker.Report(ctx, "lease", nil)

	want := "<nil>, list: down error, TLS error, <nil>, down error, <nil>"
	if got := strings.Join(reported, ", "); got != want {
		t.Errorf("reported %s\nwant %s", got, want)
	}
	log := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
	if n := strings.Count(log, "store is not usable"); n != 3 {
		t.Errorf("%d lines about the outage, want 3:\n%s", n, log)
	}
	if n := strings.Count(log, "store is usable again"); n != 2 {
		t.Errorf("%d lines about its end, want 2:\n%s", n, log)
	}
}
