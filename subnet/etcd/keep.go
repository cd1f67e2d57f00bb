// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// Keep keeps this host's lease alive. It reads the key at the start, after every outage, when the key
// may have changed, and when the lease has to be renewed. It corrects the key if necessary. See
// subnet.Manager.
func (m *Manager) Keep(ctx context.Context, own subnet.Lease) error {
	defer m.discardSpare(ctx)
	restores := wait.Backoff{
		Least: m.timing.restoreMin, Most: m.timing.restored,
		Share: 0.5, Forget: 10 * m.timing.restored,
	}
	for {
		err := m.retry(ctx, sourceLease, func() error {
			own, checked, err := m.ensure(ctx, own)
			if err != nil {
				return err
			}
			m.discardSpare(ctx) // it was not needed
			if checked == 0 {
				// Two programs that overwrite each other's value must not do so in a tight loop.
				return restores.Wait(ctx, 0)
			}
			return m.await(ctx, own, checked)
		})
		if err != nil {
			return err
		}
	}
}

// ensure reads this host's key and corrects it: it creates the key again, writes its value again, or
// renews the lease. checked is the revision up to which the key needs no correction. It is zero if the key
// was gone or had another value, perhaps because another program has written it. own is this host's lease
// after that. ensure returns subnet.ErrLeaseLost, wrapped, if the key belongs to another
// node, or is gone and cannot be created because another key has one of its subnets.
func (m *Manager) ensure(ctx context.Context, l subnet.Lease) (own ownLease, checked int64, err error) {
	if err := m.writing.Acquire(ctx, 1); err != nil {
		return own, 0, err
	}
	defer m.writing.Release(1)
	found, checked, err := m.read(ctx, cmp.Or(m.own.key, l.Key))
	if err != nil {
		return own, 0, fmt.Errorf("read this host's lease: %w", err)
	}
	if found != nil {
		if err := m.yieldIfOlder(ctx, found); err != nil {
			return own, 0, err
		}
		m.recognize(ctx, found)
	}
	if own, err = m.ownOr(l); err != nil {
		return own, 0, err
	}
	logger := klog.FromContext(ctx).WithValues("key", own.key)
	switch {
	case found == nil:
		err := m.asPermitted(ctx, func(may *rights) error { return m.recreate(ctx, own, may) })
		if err != nil {
			return own, 0, err
		}
		logger.Info("this host's lease was gone, taken again")
		return m.own, 0, nil
	case m.isOwn(found) && (own.grant.id == 0 || m.untilRenewal(own.grant) > 0):
		return m.own, checked, nil
	case m.relationTo(own.claim, nil, nil)(found) == foreign && identity(found.lease.Claim()).IsValid():
		return own, 0, lost(own.key, found)
	}

	err = m.asPermitted(ctx, func(*rights) error { return m.refresh(ctx, found, own, nil) })
	if err != nil {
		return own, 0, fmt.Errorf("renew this host's lease: %w", err)
	}
	if found.sum == own.sum() {
		return m.own, max(checked, m.own.revision), nil
	}
	logger.Info("this host's lease was changed, written again")
	return m.own, 0, nil
}

// yieldIfOlder completes a recreate that has written this host's key as found, but failed before it
// compared the key with those of other nodes. If another node was first, yieldIfOlder deletes this
// host's key and returns errConflict. It returns nil if found is a reservation or belongs to another
// node, or if it was compared before.
func (m *Manager) yieldIfOlder(ctx context.Context, found *entry) error {
	if found.key != m.own.key || found.createRevision == m.own.create || found.leaseID == 0 {
		return nil
	}
	made := m.own
	made.revision = found.modRevision
	if !hasPublicIP(found.lease, identity(made.claim)) && m.attempt(found) < 0 {
		return nil // the key belongs to another node
	}
	return m.yieldToOlder(ctx, made, 0, nil)
}

// ownOr returns this host's lease of the manager, which may be a later one than l. If there is none, it
// derives one from l, without the revision of the last write and without an etcd lease.
func (m *Manager) ownOr(l subnet.Lease) (ownLease, error) {
	if m.own.exists() {
		return m.own, nil
	}
	own := ownLease{key: l.Key, create: int64(l.Order), claim: l.Claim()}
	var err error
	own.value, err = codec.Encode(own.claim)
	return own, err
}

// renewal returns the time at which g has to be renewed: the margin before its end, and earlier by
// up to a tenth of the rest, which is random, so that hosts of one age do not renew at one moment.
func (m *Manager) renewal(g grant) time.Time {
	margin := m.cfg.margin(g.ttl)
	return g.expires.Add(-margin - time.Duration(g.early*float64(g.ttl-margin)))
}

// untilRenewal returns the time until g has to be renewed, negative if that is overdue. It is the
// smaller of two times: one by the monotonic clock, which stops while the host is suspended, and
// one by the wall clock, which may be set back.
func (m *Manager) untilRenewal(g grant) time.Duration {
	at := m.renewal(g)
	return min(time.Until(at), at.Sub(m.wall()))
}

// ownerOf returns the public address of the node that has the lease l, for messages.
func ownerOf(l subnet.Lease) string {
	if a := identity(l.Claim()); a.IsValid() {
		return a.String()
	}
	return "an owner that cannot be read"
}

func lost(key string, by *entry) error {
	who := ownerOf(by.lease)
	if by.key != key {
		who += ", as part of " + subnet.Shorten(by.key)
	}
	return fmt.Errorf("%w: %s now belongs to %s", subnet.ErrLeaseLost, key, who)
}

// recreate creates this host's key again. It returns errConflict if this host's key exists, or if another
// client was faster. It deletes what this host has written besides, and leases with this host's address that
// are older than this host's lease was, or that overlap this host's subnets, unless they have the identity of
// another host, which had this address before. It returns subnet.ErrLeaseLost, wrapped, if any other lease or a
// reservation overlaps this host's subnets. A restored backup can bring such leases back: see plan.outdated.
func (m *Manager) recreate(ctx context.Context, own ownLease, may *rights) error {
	l, err := m.list(ctx)
	if err != nil {
		return err
	}
	subnets, err := codec.ParseKey(own.key)
	if err != nil {
		return fmt.Errorf("own key: %w", err)
	}
	var stale []*entry
	relationOf := m.relationTo(own.claim, may, nil)
	identities := codec.Identities(own.claim.Endpoints)
	if before := m.resumed.Load(); before != nil {
		identities = append(identities, codec.Identities(before.Endpoints)...)
	}
	for _, e := range l.entries {
		is := relationOf(e)
		ours := e.leased() && is != foreign
		if ours && is != proven && len(codec.Identities(e.lease.Endpoints)) > 0 {
			ours = codec.HasIdentity(e.lease.Endpoints, identities)
		}
		switch overlaps := overlap(e.subnets, subnets); {
		case e.key == own.key:
			return errConflict
		case ours && (overlaps || is == proven || own.isNewerThan(e)):
			stale = append(stale, e)
		case overlaps:
			return lost(own.key, e)
		}
	}
	return m.create(ctx, own, l.store.Revision, stale)
}

// await blocks until the key of own may have changed after revision checked, or has to be renewed: see awaitChange.
func (m *Manager) await(ctx context.Context, own ownLease, checked int64) error {
	left := time.Duration(math.MaxInt64)
	if own.grant.id != 0 {
		left = m.untilRenewal(own.grant)
	}
	return m.awaitChange(ctx, left, []string{m.dir + own.key}, checked, func(resp *pb.WatchResponse) bool {
		changed := slices.ContainsFunc(resp.Events, func(ev *mvccpb.Event) bool { return ev.Kv.ModRevision > checked })
		// If the host was suspended, the timer is late by the time of the suspension.
		return changed || own.grant.id != 0 && m.untilRenewal(own.grant) <= 0
	})
}

// errChanged ends the watch of awaitChange.
var errChanged = errors.New("a key has changed")

// awaitChange watches keys after a revision until changed returns true for a response, and returns nil. It also
// returns nil when the time is over, and if the watch is silent or cannot continue from that revision. It returns
// an error if the watch fails.
func (m *Manager) awaitChange(
	ctx context.Context, within time.Duration, keys []string, revision int64, changed func(*pb.WatchResponse) bool,
) error {
	inner, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	err := m.follow(inner, keys, revision+1, watcher{on: func(resp *pb.WatchResponse, _ int64) error {
		m.outage.Report(ctx, sourceLease, nil)
		if changed(resp) {
			return errChanged
		}
		return nil
	}})
	over := inner.Err() != nil && ctx.Err() == nil
	if over || errors.Is(err, errChanged) || errors.Is(err, errRelist) || errors.Is(err, errStalled) {
		return nil
	}
	return err
}
