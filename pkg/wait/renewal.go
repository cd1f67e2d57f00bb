// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Renewal keeps something that expires unless it is renewed, such as the lease of a leader.
type Renewal struct {
	// TTL is the time from a renewal to the expiry.
	TTL time.Duration
	// Renew makes one attempt. Its error wraps Lost if no later attempt can succeed.
	Renew func(ctx context.Context) error
	Lost  error
}

// Hold calls f, and renews after each third of the TTL until f returns. began is the time at which the
// caller took what it holds, or an earlier time. The context of f ends when ctx ends, when Renew
// reports a loss, and after two thirds of the TTL without a successful renewal: f can then end before
// another host may take over. Hold returns after f.
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

// keep renews until ctx ends, Renew reports a loss, or two thirds of the TTL pass without a success.
func (r Renewal) keep(ctx context.Context, began time.Time) {
	for ok := true; ok; {
		inner, cancel := context.WithDeadline(ctx, began.Add(r.TTL/3*2))
		began, ok = r.next(inner, began.Add(r.TTL/3))
		cancel()
	}
}

// next waits until due, and then repeats Renew until Renew succeeds or reports a loss, or ctx ends. ok is set
// if Renew has succeeded before ctx ended. began is then the begin of the successful call.
func (r Renewal) next(ctx context.Context, due time.Time) (began time.Time, ok bool) {
	backoff := Backoff{Least: r.TTL / 60, Most: r.TTL / 15, Share: 0.5}
	for err := For(ctx, time.Until(due)); err == nil; err = backoff.Wait(ctx, 0) {
		began = time.Now()
		failed := r.Renew(ctx)
		if failed == nil || errors.Is(failed, r.Lost) {
			return began, failed == nil && ctx.Err() == nil
		}
	}
	return began, false
}
