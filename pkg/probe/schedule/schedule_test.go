// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestRun checks values that are due at different times, some of which come later or are removed. Each must be checked
// when it is due, or earlier by Soon, and not more of them at once than AtOnce.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue[string]()
		begin := time.Now()
		at := func(seconds float64) time.Time { return begin.Add(time.Duration(seconds * float64(time.Second))) }
		q.Add("third", at(9.3))
		q.Add("second", at(9))
		q.Add("removed", at(2))
		q.Add("never checked", time.Time{})
		q.Remove("removed")
		q.Remove("unknown")
		if n := q.Len(); n != 3 {
			t.Errorf("%d values wait, want 3", n)
		}

		var mu sync.Mutex
		begun := map[string]time.Duration{}
		running, most := 0, 0
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			q.Run(ctx, Checks[string]{
				Soon: time.Second / 2, AtOnce: 2, Permit: func(ctx context.Context) error { return ctx.Err() },
				Check: func(_ context.Context, v string) {
					mu.Lock()
					begun[v] = time.Since(begin)
					running++
					most = max(most, running)
					mu.Unlock()
					time.Sleep(time.Second)
					mu.Lock()
					running--
					mu.Unlock()
				},
			})
		})
		time.Sleep(3 * time.Second)
		q.Add("early", at(4)) // before the one for which Run waits
		time.Sleep(5 * time.Second)
		q.Add("fourth", at(9.4))
		time.Sleep(time.Minute)
		q.Add("when nothing waits", at(70))
		time.Sleep(3 * time.Second)
		cancel()
		wg.Wait()

		for v, want := range map[string]time.Time{
			"never checked": at(0), "early": at(4), "second": at(9), "third": at(9), "fourth": at(10), "when nothing waits": at(70),
		} {
			if got, ok := begun[v]; !ok || got != want.Sub(begin) {
				t.Errorf("%s: checked after %s, want %s", v, got, want.Sub(begin))
			}
		}
		if len(begun) != 6 || most != 2 {
			t.Errorf("%v were checked, %d at once; want 6, and 2 at once", begun, most)
		}
	})
}
