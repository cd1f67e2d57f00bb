// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"fmt"
	"sync"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
)

// watch calls wake when the rules of one of places may have changed, and each time that listening
// begins. All runs that keep rules in these places share one subscription.
func (h *Host) watch(ctx context.Context, places []firewall.Place, wake func()) {
	shared, _ := h.watchers.LoadOrStore(fmt.Sprint(places), &wait.Shared{})
	w := shared.(*wait.Shared)
	changed, first, _ := w.Join(func(wake func()) (stop func(), err error) {
		ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		var wg sync.WaitGroup
		wg.Go(func() { nftables.Watch(ctx, places, wake) })
		return func() {
			cancel()
			wg.Wait()
		}, nil
	})

	defer w.Leave(changed)
	if !first {
		wake() // another Keeper has begun to listen before, so nothing else wakes this one now
	}

	for {
		select {
		case <-changed:
			wake()
		case <-ctx.Done():
			return
		}
	}
}
