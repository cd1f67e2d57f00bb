// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"

	"github.com/flanneld/flanneld/pkg/outage"
)

// The activities that talk to the store.
const (
	sourceConfig = "config"
	sourceLease  = "lease"
	sourceWatch  = "watch"
)

// report takes the outcome of an activity in. A connection that was given up
// on purpose says nothing.
func (m *Manager) report(ctx context.Context, activity string, err error) {
	if errors.Is(err, errClosed) || errors.Is(err, errRenewed) {
		return
	}
	m.outage.Report(ctx, activity, err)
}

func (m *Manager) backoff() *outage.Backoff {
	return &outage.Backoff{Least: m.timing.backoffMin, Most: m.timing.backoff}
}
