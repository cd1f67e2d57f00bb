package backend

import (
	"context"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"
)

// quiet is the least time between two wakes by the kernel: on a busy host it
// announces a lot that is not of our concern.
const quiet = 50 * time.Millisecond

// A burst of repairs is made at once. Who keeps changing what is ours is
// answered at repairRate, so that the fight costs next to nothing.
const (
	repairRate  = rate.Limit(2) // passes a second
	repairBurst = 20
)

// repairLog is the least time between two lines about repairs.
const repairLog = time.Minute

// drift is about what others change in the kernel behind our back.
type drift struct {
	limit    *rate.Limiter // of passes that had to put something right
	repaired int           // and not logged yet
	logged   time.Time
}

func newDrift() *drift { return &drift{limit: rate.NewLimiter(repairRate, repairBurst)} }

// forward calls wake for what changed delivers, as often as it should, until
// ctx ends.
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

// note takes in how much a pass has put right. It logs that, the first time at
// once and in a fight once a minute.
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
