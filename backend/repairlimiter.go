// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/wait"
)

// quiet is the minimum time between two wakes because of announcements. A busy host
// announces many changes that do not matter to flanneld.
const quiet = 50 * time.Millisecond

// A burst of repairs is made at once. If another program keeps changing the same entries,
// repairs are limited to repairRate, so that they cost little.
const (
	repairRate  = rate.Limit(2) // passes per second
	repairBurst = 20
)

// repairLog is the minimum time between two log lines about repairs.
const repairLog = time.Minute

// repairLimiter limits how often the loop repairs changes by other programs, and logs the
// repairs.
type repairLimiter struct {
	limit    *rate.Limiter // limit of passes that repair something
	repaired int           // number of repairs that are not logged yet
	logged   time.Time
}

func newRepairLimiter() *repairLimiter {
	return &repairLimiter{limit: rate.NewLimiter(repairRate, repairBurst)}
}

// forwardChanges calls wake when changed receives, within the limits, until ctx ends.
func (r *repairLimiter) forwardChanges(ctx context.Context, changed <-chan struct{}, wake func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		wake()
		debt := time.Duration(-r.limit.Tokens() / float64(repairRate) * float64(time.Second))
		if wait.For(ctx, max(quiet, debt)) != nil {
			return
		}
	}
}

// count counts the repairs of a pass. It logs them at once the first time, and then at
// most once a minute.
func (r *repairLimiter) count(ctx context.Context, repaired int) {
	now := time.Now()
	if repaired > 0 {
		r.limit.ReserveN(now, 1)
	}
	r.repaired += repaired
	if r.repaired == 0 || now.Sub(r.logged) < repairLog {
		return
	}
	klog.FromContext(ctx).Info("repaired what another program had changed", "entries", r.repaired)
	r.repaired, r.logged = 0, now
}
