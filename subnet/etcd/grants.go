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

// ensureGrant requests an etcd lease and puts it into spare, unless spare is one already. If a
// request fails, the next one has the same id, so that the store does not get a second etcd lease.
// A spare etcd lease belongs to the caller until a key uses it.
func (m *Manager) ensureGrant(ctx context.Context, spare *grant) error {
	if spare.ttl != 0 {
		return nil
	}
	if spare.id == 0 {
		spare.id = clientv3.LeaseID(1 + rand.Int64N(math.MaxInt64))
		m.claimGrant(spare.id)
	}
	return m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		start := time.Now()
		ttl, err := grantLease(ctx, c, spare.id, m.cfg.TTL)
		if err == nil {
			*spare = newGrant(spare.id, start, ttl)
		}
		return err
	})
}

// grantFor renews the etcd lease id, and returns it. If it is zero or gone, or has another TTL,
// grantFor returns spare, which it requests if necessary.
func (m *Manager) grantFor(ctx context.Context, id clientv3.LeaseID, spare *grant) (grant, error) {
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
	err := m.ensureGrant(ctx, spare)
	return *spare, err
}

// forgetIfGone makes spare the zero grant if err means that the store does not have that etcd lease
// any more. It returns err.
func forgetIfGone(spare *grant, err error) error {
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		*spare = grant{}
	}
	return err
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

// revoke revokes g unless a key uses it, even if ctx has ended. It waits for a second at most.
func (m *Manager) revoke(ctx context.Context, g grant) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	m.discard(ctx, g.id)
}
