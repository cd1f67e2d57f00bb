// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"time"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// The activities whose outcome the Manager reports to its loglimit.Outage.
const (
	starting    = "start"
	maintaining = "own node"
	watching    = "watch"
	getting     = "get node " // the name of the Node follows
)

// retry repeats f: see loglimit.Outage.Retry.
func (m *Manager) retry(ctx context.Context, activity string, f func() error) error {
	return m.outage.Retry(ctx, activity, m.backoff(), f)
}

// calm is the time without a pause after which the pauses start again from the shortest, as after a long
// watch. It is longer than the deadline of any request: the pauses between requests to a server that hangs
// must grow.
const calm = time.Minute

func (m *Manager) backoff() *wait.Backoff {
	return &wait.Backoff{Least: m.timing.backoffMin, Most: m.timing.backoff, Share: m.timing.vary, Forget: calm}
}
