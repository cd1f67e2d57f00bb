// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"context"
	"sync"
	"time"
)

// Renewal keeps something that expires unless it is renewed, such as the lease of a leader.
type Renewal struct {
	// TTL is the time after which it expires.
	TTL time.Duration
	// Renew renews it once. lost is set if that cannot succeed any more.
	Renew func(ctx context.Context) (lost bool, err error)
}

// Hold runs f while the renewal succeeds. began is the time at which it was taken, or before. It is
// renewed after each third of the TTL. The context of f ends after two thirds without a successful
// renewal, so that f can end before another host may take it. Hold returns after f.
func (r Renewal) Hold(ctx context.Context, began time.Time, f func(ctx context.Context)) {
	inner, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		defer cancel()
		r.keep(inner, began)
	})
	f(inner)
}

// keep renews until ctx ends, or the renewal has failed for too long.
func (r Renewal) keep(ctx context.Context, began time.Time) {
	for ok := true; ok; {
		inner, cancel := context.WithDeadline(ctx, began.Add(r.TTL/3*2))
		began, ok = r.next(inner, began.Add(r.TTL/3))
		cancel()
	}
}

// next renews once when that is due, with several tries until ctx ends. It returns the begin of the
// successful one.
func (r Renewal) next(ctx context.Context, due time.Time) (began time.Time, ok bool) {
	backoff := Backoff{Least: r.TTL / 60, Most: r.TTL / 15, Share: 0.5}
	for err := For(ctx, time.Until(due)); err == nil; err = backoff.Wait(ctx, 0) {
		began = time.Now()
		lost, failed := r.Renew(ctx)
		if failed == nil || lost {
			return began, failed == nil && ctx.Err() == nil
		}
	}
	return began, false
}
