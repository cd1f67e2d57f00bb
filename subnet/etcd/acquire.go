package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/klog/v2"

	"flanneld/pkg/prefix"
	"flanneld/subnet"
)

// ownLease is the own key as it was last written or found right.
type ownLease struct {
	key      string
	claim    subnet.Claim // as published
	value    []byte
	create   int64 // revisions
	revision int64
	grant    grant // zero: a reservation
}

// plan is what Acquire does with what it found.
type plan struct {
	keep    *entry         // the own lease to go on with
	subnets []netip.Prefix // otherwise what to take
	stale   []entry        // own leases that go with the taking: ruled out, or replaced
	twin    string         // key of another lease that carries the own address
}

// choose is pure. wanted is what the node had before, best first; running, whether it
// has it now: then no reservation moves it.
func choose(pools []subnet.Pool, wanted []netip.Prefix, running bool, ours func(entry) bool, entries []entry) (plan, error) {
	var p plan
	var mine []*entry
	taken := make([]netip.Prefix, 0, len(entries))
	for i, e := range entries {
		switch {
		case !ours(e):
		case fits(pools, e.subnets) && !beaten(e, ours, entries):
			mine = append(mine, &entries[i])
		default:
			p.stale = append(p.stale, e)
			continue
		}
		taken = append(taken, e.subnets...)
	}
	// A reservation goes before what the node had. The leases go with its taking: of two
	// with one address peers would take the older.
	var replaced []entry
	leased := func(e *entry) bool { return e.leaseID != 0 }
	reserved := !running && slices.ContainsFunc(mine, func(e *entry) bool { return !leased(e) })
	if reserved {
		for _, e := range mine {
			if leased(e) {
				replaced = append(replaced, *e)
			}
		}
		mine = slices.DeleteFunc(mine, leased)
	}
	if len(mine) > 0 {
		p.keep = mine[0]
		_, free := pools[0].Free(wanted, taken)
		had := slices.IndexFunc(mine, func(e *entry) bool { return overlap(e.subnets, wanted) })
		switch {
		case had >= 0:
			p.keep = mine[had]
		case free && !reserved:
			// Pods run in that subnet, whatever else carries our address.
			p.keep, p.twin = nil, mine[0].key
		}
	}
	if p.keep != nil {
		// Peers may accept one that is ruled out, which is older, and not the one that is kept.
		// A reservation is the operator's: it stays where nothing comes in its place.
		p.stale = slices.DeleteFunc(p.stale, func(e entry) bool { return running || !leased(&e) })
		p.stale = append(p.stale, replaced...)
		if other := slices.IndexFunc(mine, func(e *entry) bool { return e != p.keep }); other >= 0 {
			p.twin = mine[other].key
		}
		return p, nil
	}
	var before, after []netip.Prefix // a reservation may be ruled out for its families alone
	for _, e := range p.stale {
		if running || leased(&e) {
			after = append(after, e.subnets...)
		} else {
			before = append(before, e.subnets...)
		}
	}
	var err error
	p.subnets, err = subnet.Allocate(pools, slices.Concat(before, wanted, after), taken, nil)
	return p, err
}

// beaten reports whether one of e's subnets belongs to an older lease of
// another node. A key is the pair of both families' subnets: two nodes that
// pick the same IPv4 subnet, but not the same IPv6 one, do not meet in it.
func beaten(e entry, ours func(entry) bool, entries []entry) bool {
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

// check refuses a claim that lacks what the configuration enables.
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
	l, err := m.listOr(ctx, &m.forAcquire)
	if err != nil {
		return err
	}
	for _, e := range l.entries {
		m.recognize(ctx, e)
	}
	who := identity(c)
	ours := func(e entry) bool {
		return e.err == nil && carries(e.lease, who) || m.wrote(e) || m.held(e)
	}
	p, err := choose(pools, m.previous(c), m.running(), ours, l.entries)
	if err != nil {
		return err
	}
	if p.twin != "" {
		klog.FromContext(ctx).Error(nil, "another lease carries the public address of this node", "key", p.twin, "publicIP", who)
	}
	if p.keep != nil {
		own, err := claimOn(p.keep.key, p.keep.subnets, c)
		if err != nil {
			return err
		}
		if err := m.settle(ctx, *p.keep, own, p.stale, spare); err != nil {
			return err
		}
		for _, e := range p.stale {
			klog.FromContext(ctx).Info("another lease of this node was deleted", "lease", e.key, "kept", own.key)
		}
		m.forWatch.put(l)
		return nil
	}
	own, err := claimOn(formatKey(p.subnets), p.subnets, c)
	if err != nil {
		return err
	}
	if err := m.create(ctx, own, p.stale, spare); err != nil {
		return err
	}
	m.forWatch.put(l)
	return nil
}

// claimOn returns the lease that c makes on subnets.
func claimOn(key string, subnets []netip.Prefix, c subnet.Claim) (ownLease, error) {
	own := ownLease{key: key, claim: subnet.Claim{BackendType: c.BackendType}}
	for _, s := range subnets {
		e, _ := c.Endpoint(prefix.FamilyOf(s.Addr()))
		own.claim.Endpoints = append(own.claim.Endpoints, subnet.Endpoint{Subnet: s, PublicIP: e.PublicIP, Data: e.Data})
	}
	var err error
	own.value, err = encode(own.claim)
	return own, err
}

// create takes a subnet that nobody has. stale keys go in the same transaction: where one
// is a reservation of what is taken, the new one is, too.
func (m *Manager) create(ctx context.Context, own ownLease, stale []entry, spare *grant) error {
	if !slices.ContainsFunc(stale, own.reservedBy) {
		if err := m.provide(ctx, spare); err != nil {
			return err
		}
		own.grant = *spare
	}
	revision, err := m.write(ctx, own, 0, stale)
	if err != nil {
		return unspoiled(spare, err)
	}
	own.create, own.revision = revision, revision
	if err := m.yield(ctx, own); err != nil {
		return err
	}
	if own.grant.id == spare.id {
		*spare = grant{}
	}
	for _, e := range stale {
		if e.leaseID == 0 {
			klog.FromContext(ctx).Info("a reservation for this node could not be used as it is and was deleted", "reservation", e.key, "taken", own.key)
		}
	}
	m.remember(ctx, own, stale...)
	return nil
}

// reservedBy reports whether e is a reservation of the same subnets, but for those of a
// family that only one of the two has: IPv6 was enabled since, or disabled.
func (o ownLease) reservedBy(e entry) bool {
	same := 0
	for _, own := range o.claim.Endpoints {
		if slices.Contains(e.subnets, own.Subnet) {
			same++
		}
	}
	return e.leaseID == 0 && same > 0 && same == min(len(e.subnets), len(o.claim.Endpoints))
}

// yield gives up what was just created, with errConflict, if another node has
// created a lease with one of its subnets meanwhile and was first. Where it
// cannot tell, what was created is found, and judged, by the next attempt.
func (m *Manager) yield(ctx context.Context, own ownLease) error {
	if len(own.claim.Endpoints) < 2 {
		return nil // its key says it all
	}
	l, err := m.list(ctx)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(l.entries, func(e entry) bool { return e.key == own.key && e.modRevision == own.revision })
	if i < 0 {
		return errConflict
	}
	mine := func(e entry) bool { return e.key == own.key }
	if !beaten(l.entries[i], mine, l.entries) {
		return nil
	}
	if err := m.remove(ctx, l.entries[i]); err != nil {
		return err
	}
	return errConflict
}

// settle makes the key that was found as e what own says, with as little
// writing as possible: none if only the etcd lease needs to be kept alive. A
// key without an etcd lease is a reservation and stays one. stale keys go in the same
// transaction.
func (m *Manager) settle(ctx context.Context, e entry, own ownLease, stale []entry, spare *grant) error {
	own.create, own.revision, own.grant = e.createRevision, e.modRevision, grant{}
	if e.leaseID != 0 {
		g, err := m.renew(ctx, e.leaseID)
		if err != nil && !errors.Is(err, errNoGrant) {
			return err
		}
		// The store may give more than it is asked for: what this daemon was given is
		// all that there is to be had.
		if err != nil || g.ttl < m.cfg.TTL || g.ttl > m.cfg.TTL && e.leaseID != m.own.grant.id {
			if err := m.provide(ctx, spare); err != nil {
				return err
			}
			g = *spare
		}
		own.grant = g
	}
	if own.grant.id != e.leaseID || string(own.value) != string(e.value) || len(stale) > 0 {
		revision, err := m.write(ctx, own, e.modRevision, stale)
		if err != nil {
			return unspoiled(spare, err)
		}
		own.revision = revision
	}
	if own.grant.id == spare.id {
		*spare = grant{}
	}
	m.remember(ctx, own, append(stale, e)...)
	return nil
}

// wrote reports whether e is what this manager has written, and nobody since. The
// revision alone does not tell: they begin anew in a store that was emptied.
func (m *Manager) wrote(e entry) bool {
	return e.key == m.own.key && e.modRevision == m.own.revision && e.createRevision == m.own.create && e.leaseID == m.own.grant.id
}

// attempt returns which of the unanswered writes e is, or -1. That of another node has
// another etcd lease or, if it is a reservation, another value.
func (m *Manager) attempt(e entry) int {
	found := ownLease{key: e.key, value: e.value, grant: grant{id: e.leaseID}}
	return slices.IndexFunc(m.unanswered, found.sameAs)
}

// recognize takes e over if it is what this manager has written without an answer.
func (m *Manager) recognize(ctx context.Context, e entry) {
	if i := m.attempt(e); i >= 0 {
		own := m.unanswered[i]
		own.create, own.revision = e.createRevision, e.modRevision
		m.remember(ctx, own)
	}
}

// sameAs reports whether a key has the same after writing either.
func (o ownLease) sameAs(other ownLease) bool {
	return o.key == other.key && o.grant.id == other.grant.id && string(o.value) == string(other.value)
}

// running reports whether this manager has a lease.
func (m *Manager) running() bool { return m.ownKey.Load() != nil }

// remember takes over what was written. The etcd leases of what it replaces
// are revoked.
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
		Key: o.key, Order: uint64(o.create), BackendType: o.claim.BackendType, Endpoints: o.claim.Endpoints,
		Permanent: o.grant.id == 0,
	}
	if !l.Permanent {
		l.Expires = o.grant.expires
	}
	return l
}

// lock waits for the right to read and write the own lease.
func (m *Manager) lock(ctx context.Context) (unlock func(), err error) {
	select {
	case m.writing <- struct{}{}:
		return func() { <-m.writing }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
