// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"
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

// drift limits the repairs of changes by other programs, and logs them.
type drift struct {
	limit    *rate.Limiter // limit of passes that repaired something
	repaired int           // number of repairs that are not logged yet
	logged   time.Time
}

func newDrift() *drift { return &drift{limit: rate.NewLimiter(repairRate, repairBurst)} }

// forward calls wake when changed receives, within the limits, until ctx ends.
func (d *drift) forward(ctx context.Context, changed <-chan struct{}, wake func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		wake()
		debt := time.Duration(-d.limit.Tokens() / float64(repairRate) * float64(time.Second))
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(quiet, debt)):
		}
	}
}

// note counts the repairs of a pass. It logs them at once the first time, and then at
// most once a minute.
func (d *drift) note(ctx context.Context, repaired int) {
	now := time.Now()
	if repaired > 0 {
		d.limit.ReserveN(now, 1)
	}
	d.repaired += repaired
	if d.repaired == 0 || now.Sub(d.logged) < repairLog {
		return
	}
	klog.FromContext(ctx).Info("repaired what another program had changed", "entries", d.repaired)
	d.repaired, d.logged = 0, now
}
