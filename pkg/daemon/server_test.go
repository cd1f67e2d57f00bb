// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/metrics"
	"github.com/flanneld/flanneld/pkg/report/status"
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

// TestSocketComesBack removes the folder of the local socket. The socket must come back with the next check of files,
// and the former one must not remove it.
//
//stages:rest it waits for that check, which comes every 30 s
func TestSocketComesBack(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "flannel", "subnet.env")
	opts, err := options.Parse([]string{"--subnet-file=" + file}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	group, members := errgroup.WithContext(ctx)
	if err := listen(ctx, members, group, opts, idle{}); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Dir(file)); err != nil {
		t.Fatal(err)
	}
	waittest.Eventually(t, 35*time.Second, "the socket is back", func() error {
		r, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://flanneld/healthz", http.NoBody)
		answer, err := status.Client(opts.SocketPath()).Do(r)
		if err == nil {
			answer.Body.Close()
		}
		return err
	})

	cancel()
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(opts.SocketPath()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket stays behind: %v", err)
	}
}

// idle is a daemon that serves nothing.
type idle struct{ served }

func (idle) Alive() error                { return nil }
func (idle) Metrics() []*metrics.Metrics { return nil }
