// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"maps"
	"slices"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/changes"
	"github.com/flanneld/flanneld/subnet"
)

// While passes fail, a new error is logged at once. If the text of the error differs each time, for
// example because many changes fail in random order, errorBurst errors are logged at once, and then
// one in errorEvery.
const (
	errorEvery = time.Minute
	errorBurst = 5
)

// syncLog is the log of a Syncer. It logs when a refusal, a failure, or the sharing of a public address
// begins and when it ends, and not at every pass. It logs the number of held peers when that grows. It
// is not safe for concurrent use.
type syncLog struct {
	onRefused func(key, reason string) // may be nil
	refused   map[string]string        // reasons of the present refusals, by lease key
	refusal   *changes.Limit
	sharing   *changes.Limit
	failing   bool          // the last pass has failed
	logged    string        // last logged error
	limit     *rate.Limiter // limit of logged errors without a success between them
	numHeld   int           // at the last pass
}

func newSyncLog(onRefused func(key, reason string)) syncLog {
	return syncLog{
		onRefused: onRefused, refused: map[string]string{}, refusal: changes.NewLimit(changes.Many), sharing: changes.NewLimit(changes.Many),
		limit: rate.NewLimiter(rate.Every(errorEvery), errorBurst),
	}
}

// held logs when there are more held peers than before, and when there are none any more. n is their
// number, and keys returns them. held does not log each peer that comes back: after a store was emptied,
// all peers come back one by one.
func (l *syncLog) held(ctx context.Context, n int, keys func() []string) {
	switch {
	case n > l.numHeld:
		klog.FromContext(ctx).Error(nil, "the store has forgotten peers that it did not remove: they are kept until it contradicts them or their lease has run out",
			"kept", n, "first", keys()[0])
	case n == 0 && l.numHeld > 0:
		klog.FromContext(ctx).Info("no peer is kept any more that the store does not have")
	}
	l.numHeld = n
}

// refusals logs new refusals, refusals with a new reason, and the end of refusals, for the leases with
// these keys. reason returns why a lease is refused, or "" if it is not.
func (l *syncLog) refusals(ctx context.Context, keys map[string]struct{}, reason func(key string) string) {
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		why := reason(key)
		if why == l.refused[key] {
			continue
		}
		if why == "" {
			delete(l.refused, key)
		} else {
			l.refused[key] = why
		}

		log, ok := l.refusal.Next(klog.FromContext(ctx))
		switch {
		case !ok:
		case why == "":
			log.Info("lease no longer refused", "lease", key)
		default:
			log.Error(nil, "lease refused", "lease", key, "reason", why)
			if l.onRefused != nil {
				l.onRefused(key, why)
			}
		}
	}
}

// shared logs once when several leases begin to share a public address, and once when they no longer
// do. All of these leases are served, but one of them may be that of a host that is gone.
func (l *syncLog) shared(ctx context.Context, changed []subnet.SharedPublicIP) {
	for _, shared := range changed {
		log, ok := l.sharing.Next(klog.FromContext(ctx))
		switch {
		case !ok:
		case len(shared.Keys) == 0:
			log.Info("leases no longer share a public address", "publicIP", shared.PublicIP)
		default:
			log.Error(nil, "leases share a public address", "publicIP", shared.PublicIP, "leases", shared.Keys[:2], "count", len(shared.Keys))
		}
	}
}

// result logs the error of a pass that fails after a success. While passes go on to fail, it logs an
// error that differs from the last logged one, as far as limit permits. It also logs the first success
// after a failure.
func (l *syncLog) result(ctx context.Context, err error) {
	log := klog.FromContext(ctx)
	switch {
	case err != nil && (!l.failing || err.Error() != l.logged && l.limit.Allow()):
		log.Error(err, "data path not in order, trying again")
		l.logged = err.Error()
	case err == nil && l.failing:
		log.Info("data path in order again")
	}
	l.failing = err != nil
}
