// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
)

// The key <prefix>/leaders/<task> names the leader for a task. The key has an etcd lease, so the store
// deletes the key when the leader does not renew that lease any more.

// term is a time in which this node is the leader for one task.
type term struct {
	*Manager
	key, name string
	lease     clientv3.LeaseID
}

// leaderKey is the key that names a leader, as it was read.
type leaderKey struct {
	leader   subnet.Leader
	lease    int64 // the id of its etcd lease; 0 if it has none
	revision int64 // of the last change; 0 if the key does not exist
}

// errTermOver means that this node is not the leader any more.
var errTermOver = errors.New("this node is not the leader any more")

func (m *Manager) keyOfLeader(task string) string { return path.Join(m.cfg.Prefix, "leaders", task) }

// Leader implements subnet.Elector.
func (m *Manager) Leader(ctx context.Context, task string) (subnet.Leader, error) {
	found, err := m.readLeader(ctx, m.keyOfLeader(task))
	return found.leader, err
}

// Lead implements subnet.Elector. A daemon that was restarted continues as the leader.
func (m *Manager) Lead(ctx context.Context, task string, own subnet.Lease, lead func(context.Context, subnet.Announce)) error {
	t := &term{Manager: m, key: m.keyOfLeader(task), name: identity(own.Claim()).String()}
	found, err := m.readLeader(ctx, t.key)
	if err != nil {
		return err
	}
	if by := found.leader.Name; by != "" && by != t.name {
		return fmt.Errorf("%w: %s", subnet.ErrLed, by)
	}
	began := time.Now()
	defer t.end(ctx)
	if err := t.begin(ctx, found.revision); err != nil {
		return err
	}
	wait.Renewal{TTL: m.timing.leader, Renew: t.renewOnce, Lost: errTermOver}.Hold(ctx, began, func(ctx context.Context) { lead(ctx, t.announce) })
	return nil
}

// readLeader reads the key that names a leader. The leader is empty if the key does not exist. It
// is also empty if the key has no etcd lease, because nothing would delete such a key. If the value
// cannot be read, the leader has a name that says so.
func (m *Manager) readLeader(ctx context.Context, key string) (found leaderKey, err error) {
	err = m.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.Get(ctx, key)
		if err != nil || len(resp.Kvs) == 0 {
			return err
		}
		kv := resp.Kvs[0]
		found.lease, found.revision = kv.Lease, kv.ModRevision
		if kv.Lease != 0 && json.Unmarshal(kv.Value, &found.leader) != nil {
			found.leader.Name = "a node that has written an unreadable value"
		}
		return nil
	})
	if err != nil {
		return leaderKey{}, fmt.Errorf("read the leader from etcd key %s: %w", key, err)
	}
	return found, nil
}

// begin writes the key with a new etcd lease if the key is still at revision, zero meaning absent.
// Otherwise it returns subnet.ErrLed, wrapped.
func (t *term) begin(ctx context.Context, revision int64) error {
	taken := false
	err := t.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.Grant(ctx, int64(t.timing.leader.Seconds()))
		if err != nil {
			return err
		}
		t.lease = resp.ID
		taken, err = t.put(ctx, c, nil, clientv3.Compare(clientv3.ModRevision(t.key), "=", revision))
		return err
	})
	switch {
	case err != nil:
		return fmt.Errorf("become the leader by etcd key %s: %w", t.key, err)
	case !taken:
		return fmt.Errorf("%w: it was faster", subnet.ErrLed)
	}
	return nil
}

// put writes the key in one transaction if the condition is true, and reports whether it was true.
func (t *term) put(ctx context.Context, c *clientv3.Client, announced json.RawMessage, condition clientv3.Cmp) (done bool, err error) {
	value, err := json.Marshal(subnet.Leader{Name: t.name, Announced: announced})
	if err != nil {
		return false, err
	}
	resp, err := c.Txn(ctx).If(condition).Then(clientv3.OpPut(t.key, string(value), clientv3.WithLease(t.lease))).Commit()
	return err == nil && resp.Succeeded, err
}

// renewOnce is the Renew of a wait.Renewal. It returns errTermOver if the etcd lease is gone, if an
// operator has deleted the key, or if the key has another etcd lease.
func (t *term) renewOnce(ctx context.Context) error {
	found, err := t.readLeader(ctx, t.key)
	if err != nil {
		return err
	}
	if found.lease != int64(t.lease) {
		return errTermOver
	}
	if _, err = t.renew(ctx, t.lease); errors.Is(err, errNoGrant) {
		return errTermOver
	}
	return err
}

// announce implements subnet.Announce.
func (t *term) announce(ctx context.Context, text json.RawMessage) error {
	done := false
	err := t.call(ctx, func(ctx context.Context, c *clientv3.Client) (err error) {
		done, err = t.put(ctx, c, text, clientv3.Compare(clientv3.LeaseValue(t.key), "=", t.lease))
		return err
	})
	switch {
	case err != nil:
		return fmt.Errorf("write etcd key %s: %w", t.key, err)
	case !done:
		return errTermOver
	}
	return nil
}

// end revokes the etcd lease, and so deletes the key, even if ctx has ended. If that fails, the store
// deletes the key when the etcd lease expires.
func (t *term) end(ctx context.Context) {
	if t.lease == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = t.call(ctx, func(ctx context.Context, c *clientv3.Client) error {
		_, err := c.Revoke(ctx, t.lease)
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return nil
		}
		return err
	})
}
