package backend

import (
	"context"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"
)

// A burst of repairs is made at once. Who keeps changing what is ours is
// answered at repairRate, so that the fight costs next to nothing.
const (
	repairRate  = rate.Limit(2) // a second
	repairBurst = 20
)

// repairLog is the least time between two lines about repairs.
const repairLog = time.Minute

// forward calls wake for what changed delivers, as often as repairRate allows,
// until ctx ends.
func forward(ctx context.Context, changed <-chan struct{}, wake func()) {
	limit := rate.NewLimiter(repairRate, repairBurst)
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		if limit.Wait(ctx) != nil {
			return
		}
		wake()
	}
}

// drift counts what had to be put right.
type drift struct {
	repaired int // and not logged yet
	logged   time.Time
}

// note logs repairs, the first at once and those of a fight once a minute.
func (d *drift) note(ctx context.Context, repaired int) {
	d.repaired += repaired
	now := time.Now()
	if d.repaired == 0 || now.Sub(d.logged) < repairLog {
		return
	}
	klog.FromContext(ctx).Info("repaired what another program had changed", "entries", d.repaired)
	d.repaired, d.logged = 0, now
}
