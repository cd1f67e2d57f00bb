// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"context"
	"sync"

	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/firewall/nftables"
	"github.com/flanneld/flanneld/pkg/wait"
)

// watcher listens to changes of some chains for all sessions of a host that keep rules there.
type watcher struct {
	mu        sync.Mutex
	listeners map[wait.Signal]bool
	stop      func() // ends listening and waits for that; nil if there is no listener
}

// watch calls wake when the rules of one of places may have changed, until ctx ends. It also calls
// wake each time that listening begins.
func (w *watcher) watch(ctx context.Context, places []firewall.Place, wake func()) {
	changed := wait.NewSignal()
	w.join(ctx, places, changed)
	defer w.leave(changed)
	for {
		select {
		case <-changed:
			wake()
		case <-ctx.Done():
			return
		}
	}
}

// join adds a listener. The first one begins to listen.
func (w *watcher) join(ctx context.Context, places []firewall.Place, changed wait.Signal) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listeners[changed] = true
	if w.stop != nil {
		changed.Send() // listening has begun before
		return
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { nftables.Watch(ctx, places, w.wake) })
	w.stop = func() {
		cancel()
		wg.Wait()
	}
}

// wake wakes all listeners.
func (w *watcher) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for l := range w.listeners {
		l.Send()
	}
}

// leave removes a listener. The last one ends listening.
func (w *watcher) leave(changed wait.Signal) {
	w.mu.Lock()
	delete(w.listeners, changed)
	var stop func()
	if len(w.listeners) == 0 {
		stop, w.stop = w.stop, nil
	}
	w.mu.Unlock()
	if stop != nil {
		stop() // it waits for wake
	}
}
