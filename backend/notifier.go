// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"sync"

	"github.com/flanneld/flanneld/pkg/wait"
)

// Notifier implements Network.Changed for networks with several sources of changes.
// Changes that the loop has not seen yet count as one.
type Notifier struct {
	changed wait.Signal
	ctx     context.Context // ends at Close
	cancel  context.CancelFunc
	running sync.WaitGroup
}

// NewNotifier returns a Notifier with the logger of ctx. It continues after the end of
// ctx: the caller closes it.
func NewNotifier(ctx context.Context) *Notifier {
	n := &Notifier{changed: wait.NewSignal()}
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	return n
}

// Changed implements Network.
func (n *Notifier) Changed() <-chan struct{} { return n.changed }

// Notify makes the loop call Sync soon. It never blocks, and may be called at any time.
func (n *Notifier) Notify() { n.changed.Send() }

// Forward calls Notify whenever changed receives, until Close. A nil channel never
// receives.
func (n *Notifier) Forward(changed <-chan struct{}) {
	n.Go(func(ctx context.Context) {
		for {
			select {
			case <-changed:
				n.Notify()
			case <-ctx.Done():
				return
			}
		}
	})
}

// Go runs watch in a goroutine. watch must return soon after the end of its context.
func (n *Notifier) Go(watch func(context.Context)) {
	n.running.Go(func() { watch(n.ctx) })
}

// Close ends the context of all functions that Go has started, and waits for them.
func (n *Notifier) Close() {
	n.cancel()
	n.running.Wait()
}
