// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

// Acquire takes or renews this host's lease. It keeps the subnet that the node had if that is possible.
// At a start, a reservation for the node comes first. See subnet.Manager.
func (m *Manager) Acquire(ctx context.Context, cfg subnet.Config, c subnet.Claim) (subnet.Lease, error) {
	pools, err := cfg.Pools()
	if err == nil {
		err = check(cfg, c)
	}
	if err != nil {
		return subnet.Lease{}, fmt.Errorf("acquire lease: %w", err)
	}
	defer m.discardSpare(ctx)
	var own subnet.Lease
	err = m.retry(ctx, sourceLease, func() error {
		if err := m.awaitFreeSubnet(ctx, pools, c); err != nil {
			return fmt.Errorf("wait for a free subnet: %w", err)
		}
		if err := m.writing.Acquire(ctx, 1); err != nil {
			return err
		}
		defer m.writing.Release(1)
		if err := m.acquire(ctx, pools, c); err != nil {
			return fmt.Errorf("acquire lease: %w", err)
		}
		own = m.own.lease()
		return nil
	})
	return own, err
}

// check returns an error if cfg enables a family of which c has no public address.
func check(cfg subnet.Config, c subnet.Claim) error {
	for _, n := range cfg.Networks {
		f := n.Family()
		if e, ok := c.Endpoint(f); !ok || !e.PublicIP.IsValid() {
			return fmt.Errorf("%s is enabled but this node has no public %s address", f, f)
		}
	}
	return nil
}

func (m *Manager) acquire(ctx context.Context, pools []subnet.Pool, c subnet.Claim) error {
	if done, err := m.update(ctx, pools, c); done || err != nil {
		return err
	}
	l, err := m.leases(ctx)
	if err != nil {
		return err
	}
	err = m.asPermitted(ctx, func(may *rights) error { return m.acquireFrom(ctx, l, pools, c, may) })
	if err == nil || loglimit.Passes(err) && !errors.Is(err, errConflict) && len(m.unanswered) == 0 {
		// If the leases could be read and only later, small requests failed, the next try uses the leases again.
		// When all hosts start at once, a list for each try would make the store slower.
		return err
	}

	m.distrust() // the last known state may be wrong, or a write may have changed the store
	return err
}

// acquireFrom takes or renews this host's lease, given a listing that may be up to stashTime old.
func (m *Manager) acquireFrom(ctx context.Context, l listing, pools []subnet.Pool, c subnet.Claim, may *rights) error {
	for _, e := range l.entries {
		m.recognize(ctx, e)
	}

	who := identity(c)
	others, err := m.others(ctx, c, l.entries)
	if err != nil {
		return err
	}
	var former []netip.Prefix
	if m.cfg.Former != nil {
		former = m.cfg.Former()
	}
	p, err := choose(pools, m.previous(c), former, m.own, m.relationTo(c, may, others), may, l.entries)
	if errors.Is(err, subnet.ErrNoSubnets) {
		m.exhausted.Store(&exhaustedPool{pools, who, l.store})
	}
	if err != nil {
		return err
	}
	if p.duplicate == "" && len(others) > 0 {
		p.duplicate = others[0]
	}
	if p.duplicate != "" {
		klog.FromContext(ctx).Error(nil, "another lease carries the public address of this node", "key", p.duplicate, "publicIP", who)
	}

	key := codec.FormatKey(p.subnets)
	if p.keep != nil {
		key = p.keep.key
		p.subnets = p.keep.subnets
	}
	own, err := claimOn(key, p.subnets, c)
	switch {
	case err != nil:
		return err
	case p.keep == nil:
		return m.create(ctx, own, l.store.Revision, p.stale)
	}

	return m.refresh(ctx, p.keep, own, p.stale)
}

// previous returns the subnets that the node had before, best first: those of c, then
// Config.Previous.
func (m *Manager) previous(c subnet.Claim) []netip.Prefix {
	var subnets []netip.Prefix
	for _, s := range slices.Concat(c.Subnets(), m.cfg.Previous) {
		if s.IsValid() {
			subnets = append(subnets, s.Masked())
		}
	}
	return subnets
}

// update makes this host's lease publish c, if the manager has a lease with the subnets of c, these fit the
// pools, the store has that lease as the manager wrote it, and no other write is unanswered. Otherwise done
// is false, and update changes nothing. It does not list other leases, because after a change of the network
// configuration all hosts call it at once.
func (m *Manager) update(ctx context.Context, pools []subnet.Pool, c subnet.Claim) (done bool, err error) {
	have := m.own.claim.Subnets()
	if !m.own.exists() || len(m.unanswered) > 0 || !slices.Equal(have, c.Subnets()) || !fits(pools, have) {
		return false, nil
	}

	found, _, err := m.read(ctx, m.own.key)
	if err != nil {
		return false, fmt.Errorf("read this host's lease: %w", err)
	}
	if found == nil || !m.isOwn(found) {
		return false, nil
	}

	own, err := claimOn(m.own.key, have, c)
	if err != nil {
		return false, err
	}
	return true, m.refresh(ctx, found, own, nil)
}
