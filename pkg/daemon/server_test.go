// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"
)

// TestStatusPageIsThrottled checks that a program cannot make the daemon write status pages all the time,
// and that a client that gives up does not count.
func TestStatusPageIsThrottled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pages := 0
		h := throttled(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { pages++ }))
		ask := func(ctx context.Context) {
			h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodGet, "/statusz", http.NoBody))
		}
		began := time.Now()
		for range pagesAtOnce + 3*pagesPerSecond {
			ask(t.Context())
		}
		if took := time.Since(began); took != 3*time.Second {
			t.Errorf("%d pages took %v, want 3s", pages, took)
		}

		gone, leave := context.WithCancel(t.Context())
		leave()
		before := pages
		ask(gone)
		if pages != before {
			t.Error("a client that had gone got a page")
		}
	})
}
