// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// create writes own, whose key does not exist, and makes it this host's lease of the manager. It
// deletes stale keys in the same transaction. If one of them is a reservation of the same subnets,
// the new key becomes a reservation too. Otherwise it gets the etcd lease of this host. since is the
// revision of the listing in which the subnets were free. create returns errConflict if another
// client was faster.
func (m *Manager) create(ctx context.Context, own ownLease, since int64, stale []*entry) error {
	if !slices.ContainsFunc(stale, own.reservedBy) {
		var err error
		if own.grant, err = m.grantFor(ctx, m.lastGrant()); err != nil {
			return err
		}
	}

	revision, err := m.write(ctx, own, 0, stale)
	if err != nil {
		return err
	}
	own.create = revision
	own.revision = revision
	if err := m.yieldToOlder(ctx, own, since, stale); err != nil {
		if !errors.Is(err, errConflict) {
			m.noteUnanswered(own)
		}
		return err
	}

	m.remember(ctx, own, stale...)
	return nil
}

// yieldToOlder deletes this host's key, which was just created, and returns errConflict, if another
// host was first: it has created a lease with one of the subnets after revision since. It also
// returns errConflict if this host's key has changed or is gone. The keys of the two hosts can differ
// although they have a subnet in common, because a key names the subnets of both families: while a
// network gets its second family, some hosts still write keys of one family, and hosts may choose
// the same subnet of one family only.
//
// since is the revision of the listing in which the subnets were free, or zero to compare with all
// leases. If yieldToOlder cannot read the store, the next attempt finds the key and decides again.
func (m *Manager) yieldToOlder(ctx context.Context, own ownLease, since int64, stale []*entry) error {
	l, err := m.createdSince(ctx, own, since)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(l, func(e *entry) bool { return e.key == own.key && e.modRevision == own.revision })
	if i < 0 {
		return errConflict
	}

	mine := func(e *entry) bool { return e.key == own.key }
	if !overlapsOlder(l[i], mine, l) {
		return nil
	}

	if len(stale) > 0 {
		// The key has replaced the lease with which the host runs. Without both, peers would remove
		// their routes to this host. The next attempt finds the key among the stale ones, and
		// replaces it in one transaction.
		return errConflict
	}
	_, err = m.txn(ctx, unchanged(m.dir+own.key, own.revision), clientv3.OpDelete(m.dir+own.key))
	return cmp.Or(err, errConflict)
}

// createdSince returns the leases that were created after revision since and may share a subnet
// with own, including this host's lease as the store has it now. If own has only an IPv4 subnet,
// createdSince reads only keys with that subnet, otherwise all leases created since then.
func (m *Manager) createdSince(ctx context.Context, own ownLease, since int64) ([]*entry, error) {
	from := m.dir
	end := clientv3.GetPrefixRangeEnd(m.dir)
	if len(own.claim.Endpoints) == 1 && own.claim.Endpoints[0].Family() == prefix.IPv4 {
		// The key of a lease with the same IPv4 subnet is this host's key, or this host's key with "&" and
		// an IPv6 subnet behind it.
		from = m.dir + own.key
		end = m.dir + own.key + string(rune('&'+1))
	}

	resp, err := m.get(ctx, from, clientv3.WithRange(end), clientv3.WithMinCreateRev(since+1))
	if err != nil {
		return nil, fmt.Errorf("look for leases of the same subnet: %w", err)
	}
	found := make([]*entry, len(resp.Kvs))
	for i, kv := range resp.Kvs {
		found[i] = m.entry(kv)
	}
	return found, nil
}

// refresh makes the key that was found as e equal to own, and own this host's lease of the manager. It keeps
// the etcd lease of the key alive, or replaces it by m.spare if it is gone or has another TTL. It writes the
// key only if its value or its etcd lease changes, if a write is unanswered, or if there are stale keys,
// which the same transaction deletes. A key without an etcd lease is a reservation and stays one. refresh
// returns errConflict if one of the keys has changed.
func (m *Manager) refresh(ctx context.Context, e *entry, own ownLease, stale []*entry) error {
	own.create = e.createRevision
	own.revision = e.modRevision
	own.grant = grant{}
	if e.leaseID != 0 {
		id := e.leaseID
		if m.relationTo(own.claim, nil, nil)(e) != proven {
			id = m.lastGrant() // the host that has written e may still use its etcd lease
		}
		var err error
		if own.grant, err = m.grantFor(ctx, id); err != nil {
			return err
		}
	}

	// A write that the store may still execute requires that this key does not change.
	pending := len(m.unanswered) > 0
	if own.grant.id != e.leaseID || own.sum() != e.sum || len(stale) > 0 || pending {
		revision, err := m.write(ctx, own, e.modRevision, stale)
		if err != nil {
			return err
		}
		own.revision = revision
	}
	m.remember(ctx, own, append(stale, e)...)
	return nil
}

// write puts this host's key and deletes stale keys in one transaction. The transaction requires that
// this host's key is still at revision, zero meaning absent, and that the stale keys have not changed.
// write returns the new revision, or errConflict if one of these conditions is false. After any
// other error, the store may have executed the transaction, so write adds own to m.unanswered. Only
// a refusal for lack of permission proves that it has not.
func (m *Manager) write(ctx context.Context, own ownLease, revision int64, stale []*entry) (int64, error) {
	key := m.dir + own.key
	conditions := unchanged(key, revision)
	ops := []clientv3.Op{clientv3.OpPut(key, string(own.value), clientv3.WithLease(own.grant.id))}
	for _, e := range stale {
		conditions = append(conditions, unchanged(m.dir+e.key, e.modRevision)...)
		ops = append(ops, clientv3.OpDelete(m.dir+e.key))
	}

	m.claimKeys(m.own.key, own.key)
	resp, err := m.txn(ctx, conditions, ops...)
	switch {
	case errors.Is(err, rpctypes.ErrPermissionDenied): // the store has answered and written nothing
		return 0, fmt.Errorf("write %s: %w", key, err)
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		m.spare = grant{} // it has expired
		fallthrough
	case err != nil:
		m.noteUnanswered(own)
		return 0, err
	case !resp.Succeeded:
		return 0, errConflict
	}
	logDeleted(ctx, stale, own)
	return resp.Header.Revision, nil
}

func (m *Manager) noteUnanswered(own ownLease) {
	written := &entry{key: own.key, leaseID: own.grant.id, sum: own.sum()}
	if m.attempt(written) < 0 {
		m.unanswered = append(m.unanswered, own)
	}
}

func logDeleted(ctx context.Context, stale []*entry, own ownLease) {
	for _, e := range stale {
		if e.leased() {
			klog.FromContext(ctx).Info("another lease of this node was deleted", "lease", e.key, "kept", own.key)
		} else {
			klog.FromContext(ctx).Info("a reservation for this node could not be used as it is and was deleted", "reservation", e.key, "taken", own.key)
		}
	}
}

// isOwn reports whether e is what this manager last wrote to its key. A comparison of the revision
// alone is not sufficient, because revisions start again in a store that was emptied.
func (m *Manager) isOwn(e *entry) bool {
	return e.key == m.own.key && e.modRevision == m.own.revision && e.createRevision == m.own.create && e.leaseID == m.own.grant.id
}

// attempt returns the index in m.unanswered of the write that has led to e, or -1 if there is none.
// A write of another node has another etcd lease or, if it is a reservation, another value.
func (m *Manager) attempt(e *entry) int {
	return slices.IndexFunc(m.unanswered, func(w ownLease) bool { return w.leaves(e) })
}

// recognize makes e this host's lease if it is the result of an unanswered write of this manager.
func (m *Manager) recognize(ctx context.Context, e *entry) {
	if i := m.attempt(e); i >= 0 {
		own := m.unanswered[i]
		own.create = e.createRevision
		own.revision = e.modRevision
		m.remember(ctx, own)
	}
}

// remember records own, which the store has, as this host's lease, calls OnLease, and forgets the
// unanswered writes. Then it revokes the etcd leases that this host's lease had before and that the keys
// in replaced had, unless own or a key in the store uses them.
func (m *Manager) remember(ctx context.Context, own ownLease, replaced ...*entry) {
	unused := []clientv3.LeaseID{m.own.grant.id}
	for _, e := range replaced {
		unused = append(unused, e.leaseID)
	}

	if own.grant.id == m.spare.id {
		m.spare = grant{}
	}
	m.own = own
	m.unanswered = nil
	m.claimKeys(own.key)
	if m.cfg.OnLease != nil {
		m.cfg.OnLease(own.lease())
	}

	slices.Sort(unused)
	for _, id := range slices.Compact(unused) {
		if id != own.grant.id {
			m.discard(ctx, id)
		}
	}
}
