// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/subnet"
)

// Recall finds this host's lease by its public address, or as the lease that was passed to Resumed. If the
// public address is not known yet, it finds the lease with the subnet that the node had. See subnet.Manager.
func (m *Manager) Recall(ctx context.Context, own subnet.Claim) (c subnet.Claim, err error) {
	err = m.retry(ctx, sourceLease, func() error {
		if err := m.writing.Acquire(ctx, 1); err != nil {
			return err
		}
		defer m.writing.Release(1)
		c, err = m.recall(ctx, own)
		return err
	})
	return c, err
}

func (m *Manager) recall(ctx context.Context, own subnet.Claim) (subnet.Claim, error) {
	l, err := m.leases(ctx)
	if err != nil {
		return subnet.Claim{}, err
	}
	before := m.previous(own)
	if !identity(own).IsValid() {
		had := func(e *entry) relation {
			if e.err == nil && overlap(e.subnets, before) {
				return likely
			}
			return foreign
		}
		if found := recalled(l.entries, had, before); found != nil {
			return found.lease.Claim(), nil
		}
		return subnet.Claim{}, nil
	}

	relationOf := m.relationTo(own, nil, nil)
	related := slices.DeleteFunc(slices.Clone(l.entries), func(e *entry) bool { return relationOf(e) == foreign })
	others, err := m.others(ctx, own, related)
	if err != nil {
		return subnet.Claim{}, err
	}
	relationOf = m.relationTo(own, nil, others)
	found := recalled(related, relationOf, before)
	var may *rights
	if found != nil && relationOf(found) == likely {
		// The data of another host, such as its VTEP MAC, would make peers refuse this one.
		if may, err = m.rights(ctx); err == nil {
			relationOf = m.relationTo(own, may, others)
			found = recalled(related, relationOf, before)
		}
	}
	if found == nil {
		return subnet.Claim{}, nil
	}

	if _, pools, err := m.config(ctx); err == nil {
		// If another node with the same address may have made the lease, Acquire does not use it,
		// but takes the subnet that this node had. The data in that lease is not this node's.
		if p, err := choose(pools, before, nil, m.own, relationOf, may, l.entries); err == nil && p.other {
			return subnet.Claim{}, nil
		}
	}
	return found.lease.Claim(), nil
}

// recalled returns this host's entry to continue with, or nil if there is none: one that this host has
// written rather than another, then one that overlaps before, the subnets that the node had, and
// then the one with the first key.
func recalled(entries []*entry, relationOf func(*entry) relation, before []netip.Prefix) *entry {
	var found *entry
	best := 0
	for _, e := range entries {
		rank := 2 * int(relationOf(e))
		if rank > 0 && overlap(e.subnets, before) {
			rank++
		}
		if rank > best || rank > 0 && rank == best && e.key < found.key {
			best = rank
			found = e
		}
	}
	return found
}
