// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// grant is an etcd lease. The zero grant means that there is none.
type grant struct {
	id      clientv3.LeaseID
	ttl     time.Duration // zero: the store has not answered the request for it
	expires time.Time
	early   float64 // the part, from 0 to 0.1, by which the time until the renewal is shortened
}

// errNoGrant means that an etcd lease has expired or never existed.
var errNoGrant = errors.New("etcd lease is gone")

// newGrant returns a grant that the store has made or renewed, with the time at which the request
// began as start. The field early is random, so that hosts that got their grants at the same time
// renew them at different times.
func newGrant(id clientv3.LeaseID, start time.Time, ttl time.Duration) grant {
	return grant{id, ttl, start.Add(ttl), rand.Float64() / 10}
}

// ensureGrant requests an etcd lease and puts it into spare, unless spare is one already. If a
// request fails, the next one has the same id, so that the store does not get a second etcd lease.
// A spare etcd lease belongs to the caller until a key uses it.
func (m *Manager) ensureGrant(ctx context.Context, spare *grant) error {
	if spare.ttl != 0 {
		return nil
	}
	if spare.id == 0 {
		spare.id = clientv3.LeaseID(1 + rand.Int64N(math.MaxInt64))
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

// forgetIfGone makes spare the zero grant if err means that the store does not have that etcd lease
// any more. It returns err.
func forgetIfGone(spare *grant, err error) error {
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		*spare = grant{}
	}
	return err
}

// renew renews an etcd lease. It returns errNoGrant if the store does not have it any more.
func (m *Manager) renew(ctx context.Context, id clientv3.LeaseID) (g grant, err error) {
	err = m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		start := time.Now()
		ttl, err := keepAlive(ctx, c, id)
		if err == nil {
			g = newGrant(id, start, ttl)
		}
		return err
	})
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return grant{}, errNoGrant
	}
	return g, err
}

// write puts the own key and deletes stale keys in one transaction. The transaction requires that
// the own key is still at revision, zero meaning absent, and that the stale keys have not changed.
// write returns the new revision, or errConflict if one of these conditions is false. If the store
// does not answer, write adds own to m.unanswered: any error counts as that, except for a refusal
// for lack of permission.
func (m *Manager) write(ctx context.Context, own ownLease, revision int64, stale []entry) (int64, error) {
	key := m.dir + own.key
	conditions := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(key), "=", revision)}
	ops := []clientv3.Op{clientv3.OpPut(key, string(own.value), clientv3.WithLease(own.grant.id))}
	for _, e := range stale {
		conditions = append(conditions, clientv3.Compare(clientv3.ModRevision(m.dir+e.key), "=", e.modRevision))
		ops = append(ops, clientv3.OpDelete(m.dir+e.key))
	}
	var resp *clientv3.TxnResponse
	m.writes++
	err := m.call(ctx, func(ctx context.Context, c *clientv3.Client) (err error) {
		resp, err = c.Txn(ctx).If(conditions...).Then(ops...).Commit()
		return err
	})
	switch {
	case errors.Is(err, rpctypes.ErrPermissionDenied): // the store has answered and written nothing
		return 0, err
	case err != nil:
		if !slices.ContainsFunc(m.unanswered, own.sameAs) {
			m.unanswered = append(m.unanswered, own)
		}
		return 0, err
	case !resp.Succeeded:
		return 0, errConflict
	}
	return resp.Header.Revision, nil
}

// remove deletes the key of e, unless the key has changed since e was read.
func (m *Manager) remove(ctx context.Context, e entry) error {
	return m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		key := m.dir + e.key
		_, err := c.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", e.modRevision)).Then(clientv3.OpDelete(key)).Commit()
		return err
	})
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
	if g.id == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	m.discard(ctx, g.id)
}
