// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// TestForwardChanges checks how often forward wakes the loop while a change is announced each
// millisecond. If each pass repairs an entry, forward must wake once per quiet at first, and then
// repairRate times per second. When passes repair nothing any more, it must wake once per quiet
// again.
func TestForwardChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		repairs, changed := newRepairs(), wait.NewSignal()
		var wakes, repaired atomic.Int64
		repaired.Store(1)
		go forward(t.Context(), changed, repairs, func() {
			wakes.Add(1)
			repairs.Note(t.Context(), int(repaired.Load()))
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
		most := int64(repairRate * long.Seconds())
		if got := announce(long); got < most-4 || got > most+4 {
			t.Errorf("%d wakes in %s of repeated changes, want about %d", got, long, most)
		}
		time.Sleep(time.Minute)
		repaired.Store(0)
		if got := announce(10 * time.Second); got < 190 || got > 201 {
			t.Errorf("%d wakes in 10s of irrelevant changes, want one in every %s", got, quiet)
		}
	})
}

func TestForwardChangesWithoutChannel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			forward(ctx, nil, newRepairs(), func() { t.Error("woken by a network without a channel") })
		}()
		time.Sleep(time.Hour)
		cancel()
		<-done
	})
}
