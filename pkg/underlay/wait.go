// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"
)

// recheck is how often Wait checks without a notification, in case one was lost.
const recheck = time.Second

// Wait chooses the external interface, in the network namespace of the
// calling thread. If there is none, it waits for changes of links, addresses and routes,
// for at most timeout; zero or less means that it does not wait. If there is still none
// when the time is over, Wait returns an error with the reason. It accepts a last resort only
// when the time is over: a link-local address, because after a boot that address appears
// first, or a default route whose interface has no carrier. If ctx ends while Wait waits, Wait returns an error with the cause.
func Wait(ctx context.Context, o Options, timeout time.Duration) (Interface, error) {
	if err := o.check(); err != nil {
		return Interface{}, err
	}
	if timeout <= 0 {
		c, err := chooseNow(ctx, o)
		return c.Interface, err
	}
	return waitFor(ctx, o, timeout, recheck)
}

func waitFor(ctx context.Context, o Options, timeout, recheck time.Duration) (Interface, error) {
	changed, stop, err := o.subscribe()
	if err != nil {
		return Interface{}, err
	}
	defer stop()
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	tick := time.NewTicker(recheck)
	defer tick.Stop()

	for first := true; ; first = false {
		c, err := chooseNow(ctx, o)
		if err == nil && c.lastResort == "" {
			return c.Interface, nil
		}
		if first {
			reason := err
			if err == nil {
				reason = errors.New(c.lastResort)
			}
			klog.FromContext(ctx).Info("waiting for an external interface", "timeout", timeout, "reason", reason)
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-deadline.C:
			if err != nil {
				err = fmt.Errorf("waited %s: %w", timeout, err)
			}
			return c.Interface, err
		case <-ctx.Done():
			return Interface{}, fmt.Errorf("wait for an external interface: %w", context.Cause(ctx))
		}
	}
}

func chooseNow(ctx context.Context, o Options) (choice, error) {
	g := o.gather(ctx, 0)
	if g.err != nil {
		return choice{}, fmt.Errorf("choose external interface: %w", g.err)
	}
	return choose(g.facts, o)
}
