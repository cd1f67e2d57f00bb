// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"maps"
	"net/netip"
	"slices"
)

// SharedPublicIP is a public address that several accepted leases have. Hosts behind one NAT have the same
// address. So do two Nodes if one host is gone, and another host has got its address.
type SharedPublicIP struct {
	PublicIP netip.Addr
	Keys     []string // of the leases, the oldest first
}

// Shared returns the public addresses that several accepted leases have, sorted by address.
func (a *Arbiter) Shared() []SharedPublicIP {
	if len(a.shared) == 0 {
		return nil
	}

	leases := make(map[netip.Addr][]*Lease, len(a.shared))
	for _, l := range a.accepted {
		for _, e := range l.Endpoints {
			if a.shared[e.PublicIP] > 0 {
				leases[e.PublicIP] = append(leases[e.PublicIP], l)
			}
		}
	}

	all := make([]SharedPublicIP, 0, len(leases))
	for _, public := range slices.SortedFunc(maps.Keys(leases), netip.Addr.Compare) {
		one := SharedPublicIP{PublicIP: public}
		for _, l := range slices.SortedFunc(slices.Values(leases[public]), compareAge) {
			one.Keys = append(one.Keys, l.Key)
		}
		all = append(all, one)
	}
	return all
}
