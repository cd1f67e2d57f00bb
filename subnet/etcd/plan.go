// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/subnet"
)

// plan is the decision of Acquire, made from the leases in the store.
type plan struct {
	keep      *entry         // this host's lease to continue with; nil: take subnets
	subnets   []netip.Prefix // the subnets to take; only if keep is nil
	stale     []*entry       // other own leases and reservations, which the transaction that writes the lease deletes
	duplicate string         // key of the first other lease that has this host's address and stays; empty: none
	other     bool           // the node takes subnets although a usable lease has its address
}

// choose decides which lease the node uses. It is pure. wanted are the subnets that the node had
// before, best first, and former those of earlier configurations. running is this host's lease of the
// manager, and zero at the start of the daemon. If it is not zero, the node runs, and a reservation
// of another subnet does not come before the subnet that the node has. Other leases that this host
// has written are stale: they come from a configuration that was superseded. choose returns
// subnet.ErrNoSubnets, wrapped, if no subnet is free, and errForbidden if may permits none that is.
func choose(pools []subnet.Pool, wanted, former []netip.Prefix, running ownLease, relationOf func(*entry) relation, may *rights, entries []*entry) (plan, error) {
	ours := func(e *entry) bool { return relationOf(e) != foreign }
	var p plan
	var own, mine []*entry
	taken := make([]netip.Prefix, 0, len(entries))
	for _, e := range entries {
		if ours(e) {
			own = append(own, e)
		} else {
			taken = append(taken, e.subnets...)
		}
	}

	slices.SortFunc(own, func(x, y *entry) int { return cmp.Compare(x.key, y.key) })
	for _, e := range own {
		if fits(pools, e.subnets) && !overlapsOlder(e, ours, entries) {
			mine = append(mine, e)
			taken = append(taken, e.subnets...)
		} else {
			p.stale = append(p.stale, e)
		}
	}

	p.keep = leaseToKeep(pools, wanted, running.exists(), taken, mine)
	if p.keep == nil {
		p.other = len(mine) > 0
		// At a start, the subnets of unusable reservations are tried first, because such a
		// reservation may have a usable subnet of one family and none of the other.
		var before, after []netip.Prefix
		for _, e := range p.stale {
			if running.exists() || e.leased() {
				after = append(after, e.subnets...)
			} else {
				before = append(before, e.subnets...)
			}
		}

		var err error
		if p.subnets, err = may.allocate(pools, slices.Concat(before, wanted, after, former), taken); err != nil {
			return plan{}, err
		}
	} else {
		// An unusable reservation belongs to the operator and stays, because no new key takes its
		// place. While the node runs, unusable leases that it has not written stay too.
		p.stale = slices.DeleteFunc(p.stale, func(e *entry) bool { return !e.leased() || running.exists() && relationOf(e) != proven })
	}

	for _, e := range mine {
		switch {
		case e == p.keep:
		case e.leased() && relationOf(e) == proven, p.outdated(e, running):
			p.stale = append(p.stale, e)
		case p.duplicate == "":
			p.duplicate = e.key
		}
	}
	return p, nil
}

// leaseToKeep returns the lease among mine, the usable own entries, with which the node continues.
// It returns nil if the node has to take subnets with a new lease. running means that the manager
// has an own lease.
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
// plan. e must be a usable own entry, and not the one to keep. If two leases have the same
// identity, such as a VTEP MAC, peers accept the older one. So an older lease would disconnect this
// node until it expires. A restored backup brings such leases back.
//
// A usable reservation is never outdated, because only the operator deletes it. While the node
// runs, a lease is outdated only if the node takes subnets again and the lease is older than this
// host's lease was. A newer lease may belong to another host with the same address, and two hosts must
// not delete each other's lease again and again.
func (p plan) outdated(e *entry, running ownLease) bool {
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

// overlapsOlder reports whether an older lease or reservation of another node has a part of one of e's
// subnets. A key names the subnets of both families, so two nodes that choose the same IPv4 subnet
// and different IPv6 subnets write different keys. So do two nodes that choose while SubnetLen changes.
func overlapsOlder(e *entry, ours func(*entry) bool, entries []*entry) bool {
	return slices.ContainsFunc(entries, func(other *entry) bool {
		return other.createRevision < e.createRevision && other.err == nil && !ours(other) && overlap(other.subnets, e.subnets)
	})
}

// fits reports whether a lease has one subnet in each pool and no other.
func fits(pools []subnet.Pool, subnets []netip.Prefix) bool {
	return slices.EqualFunc(pools, subnets, subnet.Pool.Contains)
}
