// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"

	"github.com/flanneld/flanneld/pkg/wait"
)

// The activities that talk to the store.
const (
	sourceConfig      = "config"
	sourceLease       = "lease"
	sourceWatch       = "watch"
	sourceObservation = "observation"
)

// report records the outcome of an activity. It ignores connections that were closed on purpose.
func (m *Manager) report(ctx context.Context, activity string, err error) {
	if errors.Is(err, errClosed) || errors.Is(err, errRenewed) {
		return
	}
	m.outage.Report(ctx, activity, err)
}

func (m *Manager) backoff() *wait.Backoff {
	return &wait.Backoff{Least: m.timing.backoffMin, Most: m.timing.backoff, Share: 0.5}
}
