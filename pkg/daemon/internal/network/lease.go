// SPDX-License-Identifier: Apache-2.0

package network

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/subnet"
)

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
func (p *parts) fits(cfg subnet.Config, own subnet.Lease) bool {
	if len(cfg.Networks) != len(own.Endpoints) {
		return false
	}
	for _, n := range cfg.Networks {
		e, ok := own.Endpoint(n.Family())
		if !ok || !n.Prefix.Contains(e.Subnet.Addr()) || n.Prefix.Bits() > e.Subnet.Bits() {
			return false
		}
	}
	return p.opts.KubeSubnetMgr || outside(cfg, own) == nil
}
