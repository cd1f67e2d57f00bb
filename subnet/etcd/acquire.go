// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// ownLease is the own lease, as this manager last wrote it or found it in the store. The zero
// ownLease means that there is none.
type ownLease struct {
	key      string
	claim    subnet.Claim // as published
	value    []byte
	create   int64 // revision at which the key was created
	revision int64 // revision of the last write of the key
	grant    grant // the etcd lease of the key; zero: the key is a reservation
}

// plan is the decision of Acquire, made from the leases in the store.
type plan struct {
	keep      *entry         // the own lease to continue with; nil: take subnets
	subnets   []netip.Prefix // the subnets to take; only if keep is nil
	stale     []entry        // other own leases and reservations, which the transaction that writes the lease deletes
	duplicate string         // key of the first other lease that has the own address and stays; empty: none
	other     bool           // the node takes subnets although a usable lease has its address
}

// choose decides which lease the node uses. It is pure. wanted are the subnets that the node had
// before, best first. running is the own lease of the manager, and zero at the start of the daemon:
// if there is one, no reservation moves the node to another subnet. ours reports whether an entry
// belongs to the node. choose returns subnet.ErrNoSubnets, wrapped, if no subnet is free.
func choose(pools []subnet.Pool, wanted []netip.Prefix, running ownLease, ours func(entry) bool, entries []entry) (plan, error) {
	var p plan
	var mine []*entry
	taken := make([]netip.Prefix, 0, len(entries))
	for i, e := range entries {
		switch {
		case !ours(e):
		case fits(pools, e.subnets) && !overlapsOlder(e, ours, entries):
			mine = append(mine, &entries[i])
		default:
			p.stale = append(p.stale, e)
			continue
		}
		taken = append(taken, e.subnets...)
	}
	p.keep = leaseToKeep(pools, wanted, running.exists(), taken, mine)
	if p.keep == nil {
		p.other = len(mine) > 0
		// A reservation may be unusable only because it lacks a subnet of one family. So the
		// subnets of unusable reservations are tried first.
		var before, after []netip.Prefix
		for _, e := range p.stale {
			if running.exists() || e.leased() {
				after = append(after, e.subnets...)
			} else {
				before = append(before, e.subnets...)
			}
		}
		var err error
		if p.subnets, err = subnet.Allocate(pools, slices.Concat(before, wanted, after), taken, nil); err != nil {
			return plan{}, err
		}
	} else {
		// An unusable reservation belongs to the operator and stays, because nothing replaces it.
		// While the node runs, unusable leases stay too.
		p.stale = slices.DeleteFunc(p.stale, func(e entry) bool { return running.exists() || !e.leased() })
	}
	for _, e := range mine {
		switch {
		case e == p.keep:
		case p.outdated(*e, running):
			p.stale = append(p.stale, *e)
		case p.duplicate == "":
			p.duplicate = e.key
		}
	}
	return p, nil
}

// leaseToKeep returns the lease among mine, the usable own entries, with which the node continues.
// It returns nil if the node takes subnets instead. running means that the manager has an own
// lease.
func leaseToKeep(pools []subnet.Pool, wanted []netip.Prefix, running bool, taken []netip.Prefix, mine []*entry) *entry {
	// At a start a reservation is preferred to the subnet that the node had.
	reserved := !running && slices.ContainsFunc(mine, func(e *entry) bool { return !e.leased() })
	if reserved {
		mine = slices.DeleteFunc(slices.Clone(mine), (*entry).leased)
	}
	if len(mine) == 0 {
		return nil
	}
	if had := slices.IndexFunc(mine, func(e *entry) bool { return overlap(e.subnets, wanted) }); had >= 0 {
		return mine[had]
	}
	if _, free := pools[0].Free(wanted, taken); free && !reserved {
		return nil // take the wanted subnet, because pods run in it
	}
	return mine[0]
}

// outdated reports whether e has to be deleted in the transaction that writes the lease of the
// plan. e has the own address and is not the lease of the plan. If two leases have the same
// identity, such as a VTEP MAC, peers accept the older one. So an older lease would disconnect this
// node until it expires. A restored backup brings such leases back.
//
// A reservation is never outdated, because only the operator deletes those. While the node runs, it
// also keeps leases that are newer than its own lease was, because they may belong to another host
// with the same address: two hosts must not delete each other's lease again and again.
func (p plan) outdated(e entry, running ownLease) bool {
	switch {
	case !e.leased():
		return false
	case running.exists():
		return p.keep == nil && running.isNewerThan(e)
	case p.keep == nil || !p.keep.leased():
		return true
	}
	return e.createRevision < p.keep.createRevision
}

// isNewerThan reports whether e was created before the own lease. The result is also right for an
// entry of a restored backup, because it has a lower revision than an own lease that was created
// after the backup.
func (o ownLease) isNewerThan(e entry) bool { return e.createRevision < o.create }

// exists reports whether there is an own lease.
func (o ownLease) exists() bool { return o.key != "" }

// leased reports whether e is a lease that expires, not a reservation.
func (e *entry) leased() bool { return e.leaseID != 0 }

// overlapsOlder reports whether an older lease or reservation of another node has one of e's
// subnets. A key names the subnets of both families, so two nodes that choose the same IPv4 subnet
// and different IPv6 subnets write different keys.
func overlapsOlder(e entry, ours func(entry) bool, entries []entry) bool {
	return slices.ContainsFunc(entries, func(other entry) bool {
		return other.createRevision < e.createRevision && other.err == nil && !ours(other) &&
			slices.ContainsFunc(other.subnets, func(s netip.Prefix) bool { return slices.Contains(e.subnets, s) })
	})
}

// fits reports whether a lease has one subnet in each pool and no other.
func fits(pools []subnet.Pool, subnets []netip.Prefix) bool {
	return slices.EqualFunc(pools, subnets, subnet.Pool.Contains)
}

// Acquire takes or renews the own lease. It keeps the subnet that the node had
// whenever that is possible. See subnet.Manager.
func (m *Manager) Acquire(ctx context.Context, cfg subnet.Config, c subnet.Claim) (subnet.Lease, error) {
	defer m.outage.Forget(sourceLease)
	pools, err := cfg.Pools()
	if err == nil {
		err = check(cfg, c)
	}
	if err != nil {
		return subnet.Lease{}, fmt.Errorf("acquire lease: %w", err)
	}
	var spare grant
	defer func() { m.revoke(ctx, spare) }()
	var own subnet.Lease
	err = m.retry(ctx, sourceLease, func() error {
		if err := m.awaitFreeSubnet(ctx, pools, c); err != nil {
			return fmt.Errorf("wait for a free subnet: %w", err)
		}
		unlock, err := m.lock(ctx)
		if err != nil {
			return err
		}
		defer unlock()
		if err := m.acquire(ctx, pools, c, &spare); err != nil {
			return fmt.Errorf("acquire lease: %w", err)
		}
		own = m.own.lease()
		return nil
	})
	return own, err
}

// check returns an error if c lacks a public address of a family that cfg enables.
func check(cfg subnet.Config, c subnet.Claim) error {
	for _, n := range cfg.Networks {
		f := prefix.FamilyOf(n.Prefix.Addr())
		if e, ok := c.Endpoint(f); !ok || !e.PublicIP.IsValid() {
			return fmt.Errorf("%s is enabled but this node has no public %s address", f, f)
		}
	}
	return nil
}

func (m *Manager) acquire(ctx context.Context, pools []subnet.Pool, c subnet.Claim, spare *grant) error {
	if done, err := m.update(ctx, pools, c, spare); done || err != nil {
		return err
	}
	l, err := m.listOr(ctx, &m.forAcquire)
	if err != nil {
		return err
	}
	writes := m.writes
	err = m.acquireFrom(ctx, l, pools, c, spare)
	switch {
	case err == nil:
		m.forWatch.put(l)
	case passes(err) && !errors.Is(err, errConflict) && m.writes == writes && len(m.unanswered) == 0:
		// The list succeeded and only later, small requests failed, so the next try uses l again.
		// When all hosts start at once, a list for each try would make the store slower.
		m.forAcquire.put(l)
	default:
		m.known.Store(nil) // the last known state may be the cause, or the store has a key that l lacks
	}
	return err
}

// acquireFrom takes or renews the own lease, given a listing that may be up to stashTime old. spare
// is the etcd lease for all tries of one Acquire: see ensureGrant.
func (m *Manager) acquireFrom(ctx context.Context, l listing, pools []subnet.Pool, c subnet.Claim, spare *grant) error {
	for _, e := range l.entries {
		m.recognize(ctx, e)
	}
	who := identity(c)
	ours := func(e entry) bool {
		return e.err == nil && hasPublicIP(e.lease, who) || m.isOwn(e) || m.isResumed(e)
	}
	if err := m.completeOwn(ctx, &l, ours); err != nil {
		return err
	}
	p, err := choose(pools, m.previous(c), m.own, ours, l.entries)
	if errors.Is(err, subnet.ErrNoSubnets) {
		m.exhausted.Store(&exhaustedPool{l, pools, who})
	}
	if err != nil {
		return err
	}
	if p.duplicate != "" {
		klog.FromContext(ctx).Error(nil, "another lease carries the public address of this node", "key", p.duplicate, "publicIP", who)
	}
	if p.keep != nil {
		own, err := claimOn(p.keep.key, p.keep.subnets, c)
		if err != nil {
			return err
		}
		if err := m.refresh(ctx, *p.keep, own, p.stale, spare); err != nil {
			return err
		}
		logDeleted(ctx, p.stale, own)
		return nil
	}
	own, err := claimOn(codec.FormatKey(p.subnets), p.subnets, c)
	if err != nil {
		return err
	}
	return m.create(ctx, own, l.store.Revision, p.stale, spare)
}

// update makes the own lease publish c, if the manager has a lease with the subnets of c, these fit
// the pools, and the store has that lease as the manager wrote it. Otherwise done is false, and
// update changes nothing. It does not list other leases, because after a change of the network
// configuration all hosts call it at once.
func (m *Manager) update(ctx context.Context, pools []subnet.Pool, c subnet.Claim, spare *grant) (done bool, err error) {
	var have, want []netip.Prefix
	for _, e := range m.own.claim.Endpoints {
		have = append(have, e.Subnet)
	}
	for _, e := range c.Endpoints {
		want = append(want, e.Subnet)
	}
	if !m.own.exists() || !slices.Equal(have, want) || !fits(pools, have) {
		return false, nil
	}
	found, _, err := m.read(ctx, m.own.key)
	if err != nil {
		return false, fmt.Errorf("read own lease: %w", err)
	}
	if found == nil || !m.isOwn(*found) {
		return false, nil
	}
	own, err := claimOn(m.own.key, have, c)
	if err != nil {
		return false, err
	}
	return true, m.refresh(ctx, *found, own, nil, spare)
}

// claimOn returns an own lease that publishes c with these subnets. Its revisions and grant are zero.
func claimOn(key string, subnets []netip.Prefix, c subnet.Claim) (ownLease, error) {
	own := ownLease{key: key, claim: subnet.Claim{BackendType: c.BackendType, NextType: c.NextType}}
	for _, s := range subnets {
		e, _ := c.Endpoint(prefix.FamilyOf(s.Addr()))
		e.Subnet = s
		own.claim.Endpoints = append(own.claim.Endpoints, e)
	}
	var err error
	own.value, err = codec.Encode(own.claim)
	return own, err
}

// create writes own, whose key does not exist, and makes it the own lease of the manager. It
// deletes stale keys in the same transaction. If one of them is a reservation of the same subnets,
// the new key becomes a reservation too. Otherwise it gets the etcd lease spare. since is the
// revision of the listing in which the subnets were free. create returns errConflict if another
// client was faster.
func (m *Manager) create(ctx context.Context, own ownLease, since int64, stale []entry, spare *grant) error {
	if !slices.ContainsFunc(stale, own.reservedBy) {
		if err := m.ensureGrant(ctx, spare); err != nil {
			return err
		}
		own.grant = *spare
	}
	revision, err := m.write(ctx, own, 0, stale)
	if err != nil {
		return forgetIfGone(spare, err)
	}
	own.create, own.revision = revision, revision
	if err := m.yieldToOlder(ctx, own, since); err != nil {
		return err
	}
	if own.grant.id == spare.id {
		*spare = grant{}
	}
	logDeleted(ctx, stale, own)
	m.remember(ctx, own, stale...)
	return nil
}

func logDeleted(ctx context.Context, stale []entry, own ownLease) {
	for _, e := range stale {
		if e.leased() {
			klog.FromContext(ctx).Info("another lease of this node was deleted", "lease", e.key, "kept", own.key)
		} else {
			klog.FromContext(ctx).Info("a reservation for this node could not be used as it is and was deleted", "reservation", e.key, "taken", own.key)
		}
	}
}

// reservedBy reports whether e is a reservation of the subnets of o. It ignores a family that only
// one of the two has, because IPv6 may have been enabled or disabled after the reservation.
func (o ownLease) reservedBy(e entry) bool {
	same := 0
	for _, own := range o.claim.Endpoints {
		if slices.Contains(e.subnets, own.Subnet) {
			same++
		}
	}
	return e.leaseID == 0 && same > 0 && same == min(len(e.subnets), len(o.claim.Endpoints))
}

// yieldToOlder deletes the own key, which was just created, and returns errConflict, if another
// host was first: it has created a lease with one of the subnets after revision since. It also
// returns errConflict if the own key has changed or is gone. The keys of the two hosts can differ
// although they have a subnet in common, because a key names the subnets of both families. While a
// network gets its second family, some hosts still write keys of one family.
//
// since is the revision of the listing in which the subnets were free, or zero to compare with all
// leases. If yieldToOlder cannot read the store, the next attempt finds the key and decides again.
func (m *Manager) yieldToOlder(ctx context.Context, own ownLease, since int64) error {
	l, err := m.createdSince(ctx, own, since)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(l, func(e entry) bool { return e.key == own.key && e.modRevision == own.revision })
	if i < 0 {
		return errConflict
	}
	mine := func(e entry) bool { return e.key == own.key }
	if !overlapsOlder(l[i], mine, l) {
		return nil
	}
	if err := m.remove(ctx, l[i]); err != nil {
		return err
	}
	return errConflict
}

// createdSince returns the leases that were created after revision since and may share a subnet
// with own, with the own one as the store has it now. These are all leases created since then,
// unless own has only an IPv4 subnet.
func (m *Manager) createdSince(ctx context.Context, own ownLease, since int64) ([]entry, error) {
	from, end := m.dir, clientv3.GetPrefixRangeEnd(m.dir)
	if len(own.claim.Endpoints) == 1 && own.claim.Endpoints[0].Family() == prefix.IPv4 {
		// The key of a lease with the same IPv4 subnet is the own key, or the own key with "&" and
		// an IPv6 subnet behind it.
		from, end = m.dir+own.key, m.dir+own.key+string(rune('&'+1))
	}
	var found []entry
	err := m.callWithin(ctx, m.timing.page, func(ctx context.Context, c *clientv3.Client) error {
		resp, err := c.Get(ctx, from, clientv3.WithRange(end), clientv3.WithMinCreateRev(since+1))
		if err != nil {
			return err
		}
		found = make([]entry, len(resp.Kvs))
		for i, kv := range resp.Kvs {
			found[i] = m.entry(kv)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look for leases of the same subnet: %w", err)
	}
	return found, nil
}

// refresh makes the key that was found as e equal to own, and own the own lease of the manager. It
// keeps the etcd lease of the key alive, or replaces it by spare if it is gone or has another TTL.
// It writes the key only if its value or its etcd lease changes, or if there are stale keys, which
// the same transaction deletes. A key without an etcd lease is a reservation and stays one. refresh
// returns errConflict if one of the keys has changed.
func (m *Manager) refresh(ctx context.Context, e entry, own ownLease, stale []entry, spare *grant) error {
	own.create, own.revision, own.grant = e.createRevision, e.modRevision, grant{}
	if e.leaseID != 0 {
		g, err := m.renew(ctx, e.leaseID)
		if err != nil && !errors.Is(err, errNoGrant) {
			return err
		}
		// The store may grant a longer TTL than requested. An etcd lease that this manager got is
		// not replaced because of that: a new one would have the same TTL.
		if err != nil || g.ttl < m.cfg.TTL || g.ttl > m.cfg.TTL && e.leaseID != m.own.grant.id {
			if err := m.ensureGrant(ctx, spare); err != nil {
				return err
			}
			g = *spare
		}
		own.grant = g
	}
	if own.grant.id != e.leaseID || string(own.value) != string(e.value) || len(stale) > 0 {
		revision, err := m.write(ctx, own, e.modRevision, stale)
		if err != nil {
			return forgetIfGone(spare, err)
		}
		own.revision = revision
	}
	if own.grant.id == spare.id {
		*spare = grant{}
	}
	m.remember(ctx, own, append(stale, e)...)
	return nil
}

// isOwn reports whether e is what this manager last wrote to its key. A comparison of the revision
// alone is not sufficient, because revisions start again in a store that was emptied.
func (m *Manager) isOwn(e entry) bool {
	return e.key == m.own.key && e.modRevision == m.own.revision && e.createRevision == m.own.create && e.leaseID == m.own.grant.id
}

// attempt returns the index in m.unanswered of the write that has created e, or -1 if there is
// none. A write of another node has another etcd lease or, if it is a reservation, another value.
func (m *Manager) attempt(e entry) int {
	found := ownLease{key: e.key, value: e.value, grant: grant{id: e.leaseID}}
	return slices.IndexFunc(m.unanswered, found.sameAs)
}

// recognize makes e the own lease if an unanswered write of this manager has created it.
func (m *Manager) recognize(ctx context.Context, e entry) {
	if i := m.attempt(e); i >= 0 {
		own := m.unanswered[i]
		own.create, own.revision = e.createRevision, e.modRevision
		m.remember(ctx, own)
	}
}

// sameAs reports whether a write of o and a write of other leave the same key, value and etcd
// lease.
func (o ownLease) sameAs(other ownLease) bool {
	return o.key == other.key && o.grant.id == other.grant.id && string(o.value) == string(other.value)
}

// remember makes own, which the store has, the own lease of the manager, calls OnLease, and forgets
// the unanswered writes. Then it revokes the etcd leases of the former own lease and of the keys in
// replaced, unless own or a key in the store uses them.
func (m *Manager) remember(ctx context.Context, own ownLease, replaced ...entry) {
	unused := []clientv3.LeaseID{m.own.grant.id}
	for _, e := range replaced {
		unused = append(unused, e.leaseID)
	}
	m.own, m.unanswered = own, nil
	m.ownKey.Store(&own.key)
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

func (o ownLease) lease() subnet.Lease {
	l := subnet.Lease{
		Key: o.key, Order: uint64(o.create), BackendType: o.claim.BackendType, NextType: o.claim.NextType, Endpoints: o.claim.Endpoints,
		Permanent: o.grant.id == 0,
	}
	if !l.Permanent {
		l.Expires = o.grant.expires
	}
	return l
}

// lock waits until no other goroutine reads or writes the own lease. The caller must call unlock.
// lock returns the error of ctx if ctx ends first.
func (m *Manager) lock(ctx context.Context) (unlock func(), err error) {
	select {
	case m.writing <- struct{}{}:
		return func() { <-m.writing }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
