// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"time"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/wait"
)

// quiet is the minimum time between two wakes because of announcements. A busy host
// announces many changes that do not matter to flanneld.
const quiet = 50 * time.Millisecond

// If another program keeps changing the same entries, each change causes an announcement
// and a pass that repairs it. The first repairBurst such passes have pauses of only
// quiet between them. Later ones are limited to repairRate, so that they cost little.
const (
	repairRate  = 2 // passes per second
	repairBurst = 20
)

func newRepairs() *loglimit.Repairs {
	return loglimit.NewRepairs(repairRate, repairBurst, "repaired what another program had changed", "entries")
}

func forward(ctx context.Context, changed <-chan struct{}, repairs *loglimit.Repairs, wake func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}

		wake()
		if wait.For(ctx, max(quiet, repairs.Pause())) != nil {
			return
		}
	}
}
