// SPDX-License-Identifier: Apache-2.0

package subnettest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/subnet"
)

// Watcher collects the snapshots that a manager publishes.
type Watcher struct {
	mu   sync.Mutex
	all  []subnet.Snapshot
	seen int         // number of snapshots that Until has examined
	wake wait.Signal // readable when there are new snapshots
}

// Watch runs m.Watch until the test ends, and returns the Watcher that collects its
// snapshots.
func Watch(t *testing.T, m subnet.Manager) *Watcher {
	t.Helper()
	w := &Watcher{wake: wait.NewSignal()}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- m.Watch(ctx, w.add) }()
	t.Cleanup(func() {
		cancel()
		if err := waittest.Receive(t, patience, "the end of Watch", done); !errors.Is(err, context.Canceled) {
			t.Errorf("Watch ended with %v", err)
		}
	})
	return w
}

func (w *Watcher) add(u subnet.Update) {
	s := u.Snapshot()
	slices.SortFunc(s.Leases, func(a, b *subnet.Lease) int { return strings.Compare(a.Key, b.Key) })
	slices.Sort(s.Undecodable)
	w.mu.Lock()
	w.all = append(w.all, s)
	w.mu.Unlock()
	w.wake.Send()
}

// All returns all snapshots so far.
func (w *Watcher) All() []subnet.Snapshot {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.all)
}

// Until waits for a snapshot for which ok returns true, and returns it. It skips the
// snapshots that earlier calls have examined. It ends the test on a timeout.
func (w *Watcher) Until(t *testing.T, what string, ok func(subnet.Snapshot) bool) subnet.Snapshot {
	t.Helper()
	timeout := time.After(patience)
	for {
		for _, s := range w.All()[w.seen:] {
			w.seen++
			if ok(s) {
				return s
			}
		}
		select {
		case <-w.wake:
		case <-timeout:
			t.Fatalf("no snapshot has %s; so far: %+v", what, w.All())
		}
	}
}

// Has returns a function that reports whether a snapshot has exactly the decodable
// leases with the given keys.
func Has(keys ...string) func(subnet.Snapshot) bool {
	slices.Sort(keys)
	return func(s subnet.Snapshot) bool {
		var have []string
		for _, l := range s.Leases {
			have = append(have, l.Key)
		}
		slices.Sort(have)
		return slices.Equal(have, keys)
	}
}
