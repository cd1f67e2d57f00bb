// SPDX-License-Identifier: Apache-2.0

package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/subnet"
)

// keepPublished makes the store have this host's lease as it is, at the start of s and whenever the backend
// has other data for it, until ctx ends. It closes published after the start. It returns ErrLeaseLost,
// wrapped, like publish.
func (n *Network) keepPublished(ctx context.Context, s *session, published chan<- struct{}) error {
	var err error
	if n.last().Stored != nil {
		err = n.publish(ctx, s)
	}
	close(published)
	if err != nil {
		return err
	}

	failed := false // only the first failure is logged
	for {
		if !s.behind {
			select {
			case <-s.republish:
				s.behind = true
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		pause := n.turn(s)
		if failed {
			pause = n.retryTime() // a store that does not answer must not get a call for each change
		}
		if err := wait.For(ctx, pause); err != nil {
			return err
		}

		err := n.republish(ctx, s)
		if errors.Is(err, subnet.ErrLeaseLost) {
			return err
		}
		switch {
		case err == nil:
		case ctx.Err() != nil: // the store may have the new data, so the next session writes its own
			n.state.Update((*lastknown.State).Differ)
		case !failed:
			klog.FromContext(ctx).Error(err, "cannot publish this host's lease as it is now")
		}
		failed = err != nil
		s.behind = failed
	}
}

// publish writes this host's lease with its new addresses and data to the store. It returns
// ErrLeaseLost, wrapped, if the store has another key or other subnets for this host. It compares
// the subnets too, because the same key may get other subnets.
func (n *Network) publish(ctx context.Context, s *session) error {
	if err := wait.For(ctx, s.pause); err != nil {
		return err
	}
	now := n.last()
	own := now.Own
	if own.NextType != "" && (now.Stored == nil || own.NextType != now.Stored.NextType) {
		// When peers see this lease, they probe the way through the next backend. An earlier use of that
		// backend may have left objects for the peers, and the probes might use these. The first pass
		// removes them. If it fails, they may stay, but that must not prevent the publication.
		select {
		case <-s.compared:
		case <-ctx.Done():
			return ctx.Err()
		}
	}

	return retry(ctx, "cannot publish this host's lease as it is now", func() error {
		err := n.write(ctx, now.Config, own)
		if errors.Is(err, subnet.ErrLeaseLost) {
			return final{err}
		}
		return err
	})
}

// write writes this host's lease to the store as own. It returns ErrLeaseLost, wrapped, like publish.
func (n *Network) write(ctx context.Context, cfg subnet.Config, own subnet.Lease) error {
	got, err := n.store.Acquire(ctx, cfg, own.Claim())
	if err == nil {
		err = lostTo(own, got)
	}
	if err != nil {
		return err
	}
	n.state.Update(func(now *lastknown.State) {
		now.Stored = nil
		now.Own.Endpoints = own.Endpoints
	})
	klog.FromContext(ctx).Info("this host's lease is up to date", "lease", own.Key)
	return nil
}

// republishTimeout limits the time for publishing changed data of this host's lease. Meanwhile the network cannot take
// another lease.
const republishTimeout = 30 * time.Second

// republish writes this host's lease with the data that the backend has by now, while s continues. If the data
// has not changed, it writes nothing. In both cases it tells the backend what the store has. It returns
// ErrLeaseLost, wrapped, like publish, and an error if the backend wants another next backend.
func (n *Network) republish(ctx context.Context, s *session) error {
	ctx, cancel := context.WithTimeout(ctx, republishTimeout)
	defer cancel()
	n.writing.Lock()
	defer n.writing.Unlock()
	now := n.last()
	if now.Stored != nil {
		return errors.New("another lease is given back first")
	}
	claim, err := s.be.Claim(ctx, now.Own.Claim())
	if err != nil {
		return err
	}
	if claim.NextType != now.Own.NextType { // only another session can use that: see backend.Outcome.Reclaim
		return fmt.Errorf("the next backend would be %q instead of %q", claim.NextType, now.Own.NextType)
	}
	if !reflect.DeepEqual(claim, now.Own.Claim()) {
		now.Own.BackendType = claim.BackendType
		now.Own.Endpoints = claim.Endpoints
		if err := n.write(ctx, now.Config, now.Own); err != nil {
			return err
		}
	}
	s.syncer.Published(claim)
	return nil
}

// claimAndAcquire calls acquire with the claim of be, and returns this host's lease. prev is the last claim
// of this host. If the lease has another subnet than the claim, and be has other data for that subnet,
// claimAndAcquire calls acquire again with this data.
func claimAndAcquire(ctx context.Context, be backend.Backend, prev subnet.Claim, acquire func(subnet.Claim) (subnet.Lease, error)) (own subnet.Lease, err error) {
	claim, err := be.Claim(ctx, prev)
	if err != nil {
		return own, err
	}
	if own, err = acquire(claim); err != nil {
		return own, err
	}
	if lost(claim.Endpoints, own.Endpoints) { // the published data may depend on the subnet
		again, err := be.Claim(ctx, own.Claim())
		if err != nil {
			return own, err
		}
		if !sameData(claim.Endpoints, again.Endpoints) {
			if own, err = acquire(again); err != nil {
				return own, err
			}
		}
	}
	klog.FromContext(ctx).Info("subnet lease acquired", "lease", own.Key, "permanent", own.Permanent)
	return own, nil
}

// lost reports whether now lacks a subnet of before.
func lost(before, now []subnet.Endpoint) bool {
	return slices.ContainsFunc(before, func(b subnet.Endpoint) bool {
		return b.Subnet.IsValid() && !slices.ContainsFunc(now, func(n subnet.Endpoint) bool { return n.Subnet == b.Subnet })
	})
}

func sameData(a, b []subnet.Endpoint) bool {
	return slices.EqualFunc(a, b, func(a, b subnet.Endpoint) bool {
		return bytes.Equal(a.Data, b.Data) && bytes.Equal(a.NextData, b.NextData)
	})
}

// outside returns an error if cfg assigns subnets, but cannot assign every subnet of own.
func outside(cfg subnet.Config, own subnet.Lease) error {
	pools, err := cfg.Pools()
	if err != nil {
		return nil //nolint:nilerr // the configuration assigns no subnets
	}
	for _, e := range own.Endpoints {
		if !slices.ContainsFunc(pools, func(p subnet.Pool) bool { return p.Contains(e.Subnet) }) {
			return fmt.Errorf("%s is not of the present configuration, which has %s", e.Subnet, pools)
		}
	}
	return nil
}

// lostTo returns ErrLeaseLost, wrapped, if published, which the store has returned for own, has another
// key or other subnets.
func lostTo(own, published subnet.Lease) error {
	had := own.Subnets()
	has := published.Subnets()
	if published.Key != own.Key || !slices.Equal(has, had) {
		return fmt.Errorf("%w: the store returned %s with %v instead of %s with %v", subnet.ErrLeaseLost, published.Key, has, own.Key, had)
	}
	return nil
}

// fits reports whether own has, for each network of cfg, one subnet that cfg can assign. With
// Kubernetes the API assigns the subnets, so they only have to be in the networks.
func (n *Network) fits(cfg subnet.Config, own subnet.Lease) bool {
	if len(cfg.Networks) != len(own.Endpoints) {
		return false
	}
	for _, one := range cfg.Networks {
		e, ok := own.Endpoint(one.Family())
		if !ok || !one.Prefix.Contains(e.Subnet.Addr()) || one.Prefix.Bits() > e.Subnet.Bits() {
			return false
		}
	}
	return n.opts.KubeSubnetMgr || outside(cfg, own) == nil
}
