// SPDX-License-Identifier: Apache-2.0

package backend_test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/flanneld/flanneld/backend"
)

// TestNotifier checks that changes of all sources arrive, that changes which the loop has
// not seen yet count as one, and that Close waits for the sources.
func TestNotifier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		n := backend.NewNotifier(ctx)
		cancel() // the context of a start, which ends before the network
		kernel := make(chan struct{})
		n.Forward(kernel)
		n.Forward(nil)
		ended := false
		n.Go(func(ctx context.Context) {
			n.Notify()
			<-ctx.Done()
			ended = true
		})
		expect := func(when string, want int) {
			t.Helper()
			synctest.Wait()
			got := 0
			for ; len(n.Changed()) > 0; got++ {
				<-n.Changed()
			}
			if got != want {
				t.Errorf("%s: %d changes, want %d", when, got, want)
			}
		}
		expect("a source that calls Notify", 1)
		kernel <- struct{}{}
		kernel <- struct{}{}
		expect("two changes of the kernel before the loop looks", 1)
		expect("no change", 0)
		n.Close()
		if !ended {
			t.Error("Close has returned before a source")
		}
	})
}
