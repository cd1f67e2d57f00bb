// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// The activities whose outcome the Manager reports to its loglimit.Outage.
const (
	sourceConfig      = "config"
	sourceLease       = "lease"
	sourceWatch       = "watch"
	sourceObservation = "observation"
)

// call makes one request, and explains its error. It returns the error of ctx if ctx has ended. The
// usual deadline is timing.request: see wait.Patience.
func (m *Manager) call(ctx context.Context, f func(context.Context, *clientv3.Client) error) error {
	took, err := m.patience.Try(m.timing.request, func(deadline time.Duration) error {
		return m.callWithin(ctx, deadline, f)
	})
	m.slow.Store(took > m.timing.slow)
	return err
}

// get reads one key, or several with options.
func (m *Manager) get(ctx context.Context, key string, options ...clientv3.OpOption) (resp *clientv3.GetResponse, err error) {
	err = m.call(ctx, func(ctx context.Context, c *clientv3.Client) (err error) {
		resp, err = c.Get(ctx, key, options...)
		return err
	})
	return resp, err
}

// txn makes a transaction of ops. conditions may be nil.
func (m *Manager) txn(ctx context.Context, conditions []clientv3.Cmp, ops ...clientv3.Op) (resp *clientv3.TxnResponse, err error) {
	err = m.call(ctx, func(ctx context.Context, c *clientv3.Client) (err error) {
		resp, err = c.Txn(ctx).If(conditions...).Then(ops...).Commit()
		return err
	})
	return resp, err
}

// unchanged is the condition that a key is still at a revision, zero meaning absent.
func unchanged(key string, revision int64) []clientv3.Cmp {
	return []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(key), "=", revision)}
}

func (m *Manager) callWithin(ctx context.Context, deadline time.Duration, f func(context.Context, *clientv3.Client) error) error {
	err := m.client.do(ctx, deadline, f)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return explain(m.cfg.Endpoints, deadline, err)
}

// calm is the time without a pause after which the pauses start again from the shortest, as after a long
// watch. It is longer than the deadline of any request: the pauses between requests to a store that hangs
// must grow.
const calm = time.Minute

func (m *Manager) backoff() *wait.Backoff {
	return &wait.Backoff{Least: m.timing.backoffMin, Most: m.timing.backoff, Share: 0.5, Forget: calm}
}

// retry repeats f: see loglimit.Outage.Retry.
func (m *Manager) retry(ctx context.Context, activity string, f func() error) error {
	return m.outage.Retry(ctx, activity, m.backoff(), f)
}
