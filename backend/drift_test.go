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
)

// TestForward lets another program restore its entry for some time.
func TestForward(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, changed := newDrift(), make(chan struct{}, 1)
		var wakes, repairs atomic.Int64
		repairs.Store(1)
		go d.forward(t.Context(), changed, func() {
			wakes.Add(1)
			d.note(t.Context(), int(repairs.Load()))
		})
		tell := func(during time.Duration) int64 {
			before := wakes.Load()
			for start := time.Now(); time.Since(start) < during; time.Sleep(time.Millisecond) {
				select {
				case changed <- struct{}{}:
				default:
				}
				synctest.Wait()
			}
			return wakes.Load() - before
		}
		if got := tell(time.Millisecond); got != 1 {
			t.Errorf("%d wakes at once, want one", got)
		}
		if got := tell(time.Second); got < 18 || got > 21 {
			t.Errorf("%d wakes in the first second of repeated changes, want one in every %s", got, quiet)
		}
		const long = 30 * time.Second
		most := int64(float64(repairRate) * long.Seconds())
		if got := tell(long); got < most-4 || got > most+4 {
			t.Errorf("%d wakes in %s of repeated changes, want about %d", got, long, most)
		}
		time.Sleep(time.Minute)
		repairs.Store(0)
		if got := tell(10 * time.Second); got < 190 || got > 201 {
			t.Errorf("%d wakes in 10s of irrelevant changes, want one in every %s", got, quiet)
		}
	})
}

func TestForwardNever(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			newDrift().forward(ctx, nil, func() { t.Error("woken by a network without a channel") })
		}()
		time.Sleep(time.Hour)
		cancel()
		<-done
	})
}

func TestDriftIsLoggedOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
		d := newDrift()
		d.note(ctx, 0)
		if log.Len() > 0 {
			t.Errorf("log without a repair: %s", &log)
		}
		d.note(ctx, 3)
		for start := time.Now(); time.Since(start) < 59*time.Second; time.Sleep(time.Second) {
			d.note(ctx, 2)
		}
		if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "entries=3") {
			t.Errorf("in the first minute: %s", text)
		}
		time.Sleep(time.Second)
		d.note(ctx, 0)
		if text := log.String(); strings.Count(text, "\n") != 2 || !strings.Contains(text, "entries=118") {
			t.Errorf("in the second minute: %s", text)
		}
	})
}
