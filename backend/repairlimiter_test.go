// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"bytes"
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/flanneld/flanneld/pkg/wait"
)

// TestRepairLimiter lets another program restore its entry for some time.
func TestRepairLimiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, changed := newRepairLimiter(), wait.NewSignal()
		var wakes, repairs atomic.Int64
		repairs.Store(1)
		go r.forwardChanges(t.Context(), changed, func() {
			wakes.Add(1)
			r.count(t.Context(), int(repairs.Load()))
		})
		announce := func(during time.Duration) int64 {
			before := wakes.Load()
			for start := time.Now(); time.Since(start) < during; time.Sleep(time.Millisecond) {
				changed.Send()
				synctest.Wait()
			}
			return wakes.Load() - before
		}
		if got := announce(time.Millisecond); got != 1 {
			t.Errorf("%d wakes at once, want one", got)
		}
		if got := announce(time.Second); got < 18 || got > 21 {
			t.Errorf("%d wakes in the first second of repeated changes, want one in every %s", got, quiet)
		}
		const long = 30 * time.Second
		most := int64(float64(repairRate) * long.Seconds())
		if got := announce(long); got < most-4 || got > most+4 {
			t.Errorf("%d wakes in %s of repeated changes, want about %d", got, long, most)
		}
		time.Sleep(time.Minute)
		repairs.Store(0)
		if got := announce(10 * time.Second); got < 190 || got > 201 {
			t.Errorf("%d wakes in 10s of irrelevant changes, want one in every %s", got, quiet)
		}
	})
}

func TestRepairLimiterWithoutChannel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			newRepairLimiter().forwardChanges(ctx, nil, func() { t.Error("woken by a network without a channel") })
		}()
		time.Sleep(time.Hour)
		cancel()
		<-done
	})
}

func TestRepairsAreLoggedOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
		r := newRepairLimiter()
		r.count(ctx, 0)
		if log.Len() > 0 {
			t.Errorf("log without a repair: %s", &log)
		}
		r.count(ctx, 3)
		for start := time.Now(); time.Since(start) < 59*time.Second; time.Sleep(time.Second) {
			r.count(ctx, 2)
		}
		if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "entries=3") {
			t.Errorf("in the first minute: %s", text)
		}
		time.Sleep(time.Second)
		r.count(ctx, 0)
		if text := log.String(); strings.Count(text, "\n") != 2 || !strings.Contains(text, "entries=118") {
			t.Errorf("in the second minute: %s", text)
		}
	})
}
