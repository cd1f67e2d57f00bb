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

// TestForward has another program fight over an entry, and then give in.
func TestForward(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		changed := make(chan struct{}, 1)
		var wakes atomic.Int64
		go forward(t.Context(), changed, func() { wakes.Add(1) })
		tell := func() {
			select {
			case changed <- struct{}{}:
			default:
			}
			synctest.Wait()
		}
		for range repairBurst {
			tell()
		}
		if wakes.Load() != repairBurst {
			t.Errorf("%d of the first %d changes came through at once", wakes.Load(), repairBurst)
		}
		const fight = 30 * time.Second
		for start := time.Now(); time.Since(start) < fight; time.Sleep(time.Millisecond) {
			tell()
		}
		most := int64(float64(repairRate) * fight.Seconds())
		if got := wakes.Load() - repairBurst; got < most-2 || got > most+2 {
			t.Errorf("%d wakes in %s of fight, want about %d", got, fight, most)
		}
		time.Sleep(time.Minute)
		before := wakes.Load()
		tell()
		if wakes.Load() != before+1 {
			t.Error("a change after a minute of peace does not come through at once")
		}
	})
}

func TestForwardNever(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			forward(ctx, nil, func() { t.Error("woken by a network that never changes") })
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
		var d drift
		d.note(ctx, 0)
		if log.Len() > 0 {
			t.Errorf("nothing was repaired, and yet: %s", &log)
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
