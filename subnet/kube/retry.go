// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// The activities whose outcome the Manager reports to its outage.Tracker.
const (
	starting    = "start"
	maintaining = "own node"
	watching    = "watch"
	getting     = "get node " // the name of the Node follows
)

// report records the outcome of an activity. It ignores errEnded: connections that were closed on
// purpose, and watches that have ended early.
func (m *Manager) report(ctx context.Context, activity string, err error) {
	if !errors.Is(err, errEnded) {
		m.outage.Report(ctx, activity, err)
	}
}

// retry runs f until it succeeds, or fails for a reason that does not pass, or ctx ends. It returns
// the last error of f, or the error of ctx. It reports each result as the outcome of the activity.
func (m *Manager) retry(ctx context.Context, activity string, f func() error) error {
	defer m.outage.Forget(activity)
	b := m.backoff()
	for {
		err := f()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		m.report(ctx, activity, err)
		if !passes(err) {
			return err
		}
		if err := b.Wait(ctx, apiErrorOf(err).retryAfter); err != nil {
			return err
		}
	}
}

// calm is the time without a pause after which the pauses start again from the shortest, as after a long
// watch. It is longer than the deadline of any request: the pauses between requests to a server that hangs
// must grow.
const calm = time.Minute

func (m *Manager) backoff() *wait.Backoff {
	return &wait.Backoff{Least: m.timing.backoffMin, Most: m.timing.backoff, Share: m.timing.vary, Forget: calm}
}
