// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
)

// Acquire publishes c on this host's Node and returns the lease on its podCIDRs.
// It waits for the Node, and for its podCIDRs. See subnet.Manager.
func (m *Manager) Acquire(ctx context.Context, cfg subnet.Config, c subnet.Claim) (subnet.Lease, error) {
	waiting := false
	for {
		var own subnet.Lease
		err := m.retry(ctx, starting, func() error {
			s, err := m.recent(ctx)
			if err != nil {
				return err
			}
			if own, err = m.acquire(ctx, s, cfg, c); !errors.Is(err, errNoPodCIDR) {
				return err
			}

			m.outage.Report(ctx, starting, nil)
			if !waiting {
				waiting = true
				klog.FromContext(ctx).Error(err, "waiting for the API to give this node its subnet")
			}
			err = m.await(ctx, s, func(now *ownNode) bool { return !errors.Is(now.cidrsErr, errNoPodCIDR) })
			return cmp.Or(err, errOwnChanged)
		})
		if !errors.Is(err, errOwnChanged) {
			return own, err
		}
	}
}

// acquire publishes c on this host's Node, of which s is the present state, and returns the lease. It
// returns errNoPodCIDR, wrapped, if the Node does not exist or has no podCIDRs yet, and
// subnet.ErrUnfit, wrapped, if the podCIDRs cannot be used, or if they or the public addresses in c
// do not fit cfg. If something does not fit cfg, acquire also creates an Event.
func (m *Manager) acquire(ctx context.Context, s *ownNode, cfg subnet.Config, c subnet.Claim) (subnet.Lease, error) {
	name := *m.name.Load()
	switch {
	case !s.exists:
		return subnet.Lease{}, fmt.Errorf("node %s does not exist: %w", name, errNoPodCIDR)
	case errors.Is(s.cidrsErr, errNoPodCIDR):
		return subnet.Lease{}, fmt.Errorf("node %s: %w", name, s.cidrsErr)
	case s.cidrsErr != nil:
		return subnet.Lease{}, fmt.Errorf("%w: node %s: %w", subnet.ErrUnfit, name, s.cidrsErr)
	}

	es, err := endpointsOn(cfg, c, s.cidrs)
	if err != nil {
		err = fmt.Errorf("%w: node %s: %w", subnet.ErrUnfit, name, err)
		m.events.sendNow(ctx, s.uid, "FlannelSubnetRefused", err.Error())
		return subnet.Lease{}, err
	}
	m.writing.Lock()
	defer m.writing.Unlock()
	claim := subnet.Claim{BackendType: c.BackendType, NextType: c.NextType, Endpoints: es}
	want, wrong := m.wanted(s, claim)
	m.warnIgnored(ctx, wrong)

	// The server may execute a request whose answer is lost, for example because a newer claim has superseded this one.
	// So Keep must know the claim before, or it would take it for the change of another program. And s may be older than
	// what Keep, or the last Acquire, has written since.
	changes := m.keys.Difference(s.published(), want)
	if before := m.own.Swap(&claim); before != nil {
		was, _ := m.wanted(s, *before)
		maps.Copy(changes, m.keys.Difference(was, want))
	}
	if len(changes) > 0 {
		if err := m.annotate(ctx, name, changes); err != nil {
			return subnet.Lease{}, err
		}
	}

	return subnet.Lease{
		Key: name, Order: uint64(s.created), BackendType: c.BackendType, NextType: c.NextType, Endpoints: es, Permanent: true,
	}, nil
}
