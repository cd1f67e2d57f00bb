// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// LocalTarget is the target of the routes of a VPC to its own ranges.
const LocalTarget = "local"

// CheckRanges returns an error if one of networks overlaps a range of the VPC itself, where a cloud refuses routes. vpc and
// cloud name the VPC and the cloud.
func CheckRanges(tables []Table, networks []netip.Prefix, vpc, cloud string) error {
	local := func(r Route) bool { return r.Target == LocalTarget && r.Dst.Bits() > 0 }
	for _, r := range overlapping(tables, networks, local) {
		n := networks[slices.IndexFunc(networks, r.Dst.Overlaps)]
		return fmt.Errorf("the network %s overlaps %s of %s, where %s allows no routes to instances: choose another Network or IPv6Network", n, r.Dst, vpc, cloud)
	}
	return nil
}

// Look completes the states of the routes of flanneld in the networks for which is(r) is true, for clouds whose routes do
// not tell all about their targets. running reports for each target that exists whether it gets packets now.
func Look(
	ctx context.Context, tables []Table, networks []netip.Prefix, is func(Route) bool,
	running func(ctx context.Context, targets []string) (map[string]bool, error),
) error {
	concerns := func(r Route) bool {
		return r.ours() && is(r) && slices.ContainsFunc(networks, func(n netip.Prefix) bool { return prefix.Contains(n, r.Dst) })
	}

	targets := map[string]bool{}
	for _, t := range tables {
		for _, r := range t.Routes {
			if concerns(r) {
				targets[r.Target] = true
			}
		}
	}
	known, err := running(ctx, slices.Sorted(maps.Keys(targets)))
	if err != nil {
		return err
	}

	for _, t := range tables {
		for i, r := range t.Routes {
			if !concerns(r) {
				continue
			}
			state := Carrying
			if runs, exists := known[r.Target]; !exists {
				state = Gone
			} else if !runs {
				state = Idle
			}
			t.Routes[i].State = max(r.State, state)
		}
	}
	return nil
}
