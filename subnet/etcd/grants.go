// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// ensureGrant requests an etcd lease and puts it into m.spare, unless there is one already. If a
// request fails, the next one has the same id, so that the store does not get a second etcd lease.
func (m *Manager) ensureGrant(ctx context.Context) error {
	if m.spare.ttl != 0 {
		return nil
	}
	if m.spare.id == 0 {
		m.spare.id = clientv3.LeaseID(1 + rand.Int64N(math.MaxInt64))
		m.claimGrant(m.spare.id)
	}
	return m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		start := time.Now()
		ttl, err := grantLease(ctx, c, m.spare.id, m.cfg.TTL)
		if err == nil {
			m.spare = newGrant(m.spare.id, start, ttl)
		}
		return err
	})
}

// grantFor renews the etcd lease id, and returns it. If it is zero or gone, or has another TTL,
// grantFor returns m.spare, which it requests if necessary.
func (m *Manager) grantFor(ctx context.Context, id clientv3.LeaseID) (grant, error) {
	if id != 0 {
		g, err := m.renew(ctx, id)
		if err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return grant{}, err
		}
		// The store may grant a longer TTL than requested. An etcd lease that this manager got is
		// not replaced because of that: a new one would have the same TTL.
		if err == nil && (g.ttl == m.cfg.TTL || g.ttl > m.cfg.TTL && id == m.own.grant.id) {
			return g, nil
		}
	}
	err := m.ensureGrant(ctx)
	return m.spare, err
}

// renew renews an etcd lease. It returns rpctypes.ErrLeaseNotFound, wrapped, if the store does not have it any more.
func (m *Manager) renew(ctx context.Context, id clientv3.LeaseID) (g grant, err error) {
	err = m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		start := time.Now()
		ttl, err := keepAlive(ctx, c, id)
		if err == nil {
			g = newGrant(id, start, ttl)
		}
		return err
	})
	return g, err
}

// discard revokes an etcd lease unless a key uses it. It tries only once, because an etcd lease
// that was not revoked expires.
func (m *Manager) discard(ctx context.Context, id clientv3.LeaseID) {
	if id == 0 {
		return
	}
	_ = m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.TimeToLive(ctx, id, clientv3.WithAttachedKeys())
		if err != nil || resp.TTL <= 0 || len(resp.Keys) > 0 {
			return err
		}
		_, err = c.Revoke(ctx, id)
		return err
	})
}

// discardSpare revokes m.spare unless a key uses it, even if ctx has ended. It waits for a second at most.
func (m *Manager) discardSpare(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	unlock, err := m.lock(ctx)
	if err != nil {
		return
	}
	defer unlock()
	m.discard(ctx, m.spare.id)
	m.spare = grant{}
}
