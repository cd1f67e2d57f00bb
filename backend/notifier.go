// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"sync"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// Notifier implements Network.Changed for networks with several sources of changes.
// All changes since the loop last received from the channel are one value in it.
type Notifier struct {
	changed wait.Signal
	ctx     context.Context // ends at Close
	cancel  context.CancelFunc
	running sync.WaitGroup
}

// NewNotifier returns a Notifier whose functions run with the logger of ctx. They
// continue after the end of ctx, until the caller closes the Notifier.
func NewNotifier(ctx context.Context) *Notifier {
	n := &Notifier{changed: wait.NewSignal()}
	n.ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	return n
}

// Changed implements Network.
func (n *Notifier) Changed() <-chan struct{} { return n.changed }

// Notify makes the loop call Sync soon. It never blocks, and may be called at any time.
func (n *Notifier) Notify() { n.changed.Send() }

// Forward starts a goroutine that calls Notify whenever changed receives, until Close.
// changed may be nil, which never receives.
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

// Go runs watch in a goroutine, with a context that ends at Close. watch must return
// soon after that.
func (n *Notifier) Go(watch func(context.Context)) {
	n.running.Go(func() { watch(n.ctx) })
}

// Close ends the context of all functions that Go has started, and waits for them.
func (n *Notifier) Close() {
	n.cancel()
	n.running.Wait()
}
