// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"net/netip"

	"github.com/flanneld/flanneld/subnet"
)

// Recall finds the own lease by its public address, or as the lease that was passed to Resumed. If the
// public address is not known yet, it finds the lease with the subnet that the node had. It leaves its
// listing to Acquire. See subnet.Manager.
func (m *Manager) Recall(ctx context.Context, own subnet.Claim) (subnet.Claim, error) {
	defer m.outage.Forget(sourceLease)
	var l listing
	err := m.retry(ctx, sourceLease, func() (err error) {
		l, err = m.listOr(ctx, &stash{})
		return err
	})
	if err != nil {
		return subnet.Claim{}, err
	}
	m.forAcquire.put(l)
	who := identity(own)
	ours := func(e entry) bool { return e.err == nil && hasPublicIP(e.lease, who) || m.isResumed(e) }
	if !who.IsValid() {
		ours = func(e entry) bool { return e.err == nil && overlap(e.subnets, m.previous(own)) }
	}
	found := recalled(l.entries, ours, m.previous(own))
	if found == nil {
		return subnet.Claim{}, nil
	}
	if !who.IsValid() {
		return found.lease.Claim(), nil
	}
	if _, pools, err := m.config(ctx); err == nil {
		unlock, err := m.lock(ctx)
		if err != nil {
			return subnet.Claim{}, err
		}
		defer unlock()
		// If another node with the same address may have made the lease, Acquire does not use it,
		// but takes the subnet that this node had. The data in that lease is not this node's.
		if p, err := choose(pools, m.previous(own), m.own, ours, l.entries); err == nil && p.other {
			return subnet.Claim{}, nil
		}
	}
	return found.lease.Claim(), nil
}

// recalled returns the first own entry that overlaps one of before, the subnets that the node had.
// If none does, it returns the first own entry, or nil if there is none. ours reports whether an
// entry is an own one.
func recalled(entries []entry, ours func(entry) bool, before []netip.Prefix) *entry {
	var found *entry
	for i, e := range entries {
		if ours(e) && (found == nil || !overlap(found.subnets, before) && overlap(e.subnets, before)) {
			found = &entries[i]
		}
	}
	return found
}
