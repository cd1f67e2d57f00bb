// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// grantFor renews the etcd lease id, and returns it. If it is zero or gone, or has another TTL,
// grantFor returns m.spare, which it requests if necessary. If a request fails, the next one has the
// same id, so that the store does not get a second etcd lease.
func (m *Manager) grantFor(ctx context.Context, id clientv3.LeaseID) (grant, error) {
	if id != 0 {
		g, err := m.timed(ctx, id, keepAlive)
		if err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return grant{}, err
		}
		// The store may grant a longer TTL than requested. An etcd lease that this manager got is
		// not replaced because of that: a new one would have the same TTL.
		if err == nil && (g.ttl == m.cfg.TTL || g.ttl > m.cfg.TTL && id == m.own.grant.id) {
			return g, nil
		}
	}

	if m.spare.id == 0 {
		m.spare.id = clientv3.LeaseID(1 + rand.Int64N(math.MaxInt64))
		m.claimGrant(m.spare.id)
	}
	if m.spare.ttl == 0 {
		g, err := m.timed(ctx, m.spare.id, m.grantLease)
		if err != nil {
			return grant{}, err
		}
		m.spare = g
	}
	return m.spare, nil
}

// grantLease creates an etcd lease with that id, and returns the TTL that the store has granted. If
// the lease exists, because the answer to an earlier request was lost, grantLease renews it. With
// the library's own function the server chooses the id, so each request without an answer would
// leave an etcd lease in the store.
func (m *Manager) grantLease(ctx context.Context, conn *clientv3.Client, id clientv3.LeaseID) (time.Duration, error) {
	r := &pb.LeaseGrantRequest{ID: int64(id), TTL: int64(m.cfg.TTL.Seconds())}
	resp, err := pb.NewLeaseClient(conn.ActiveConnection()).LeaseGrant(ctx, r)
	switch err = rpctypes.Error(err); {
	case errors.Is(err, rpctypes.ErrLeaseExist):
		return keepAlive(ctx, conn, id)
	case err != nil:
		return 0, err
	}
	return time.Duration(resp.TTL) * time.Second, nil
}

// timed returns the grant that request makes or renews.
func (m *Manager) timed(
	ctx context.Context, id clientv3.LeaseID,
	request func(context.Context, *clientv3.Client, clientv3.LeaseID) (ttl time.Duration, err error),
) (g grant, err error) {
	err = m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		start := time.Now()
		ttl, err := request(ctx, c, id)
		g = newGrant(id, start, ttl)
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
	if err := m.writing.Acquire(ctx, 1); err != nil {
		return
	}
	defer m.writing.Release(1)
	m.discard(ctx, m.spare.id)
	m.spare = grant{}
}
