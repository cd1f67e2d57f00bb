// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"net/netip"
	"slices"
)

// SharedPublicIP is a public address that several accepted leases have.
type SharedPublicIP struct {
	PublicIP netip.Addr
	Keys     []string // of the leases, the oldest first
}

// sharedPublicIPs has the leases with each public address that several leases have: at least two each,
// the oldest first. Hosts behind one NAT have the same address. So do two Nodes if one host is gone, and
// another host has got its address.
type sharedPublicIPs map[netip.Addr][]*Lease

// add records that l has the address a, like the lease other and perhaps more leases. It returns the
// oldest lease that has the address.
func (s sharedPublicIPs) add(a netip.Addr, other, l *Lease) (oldest *Lease) {
	all := s[a]
	if all == nil {
		all = []*Lease{other}
	}
	i, _ := slices.BinarySearchFunc(all, l, compareAge)
	all = slices.Insert(all, i, l)
	s[a] = all
	return all[0]
}

// remove records that l no longer has the address a, and returns the oldest lease that still has
// it, or nil if no other lease has it.
func (s sharedPublicIPs) remove(a netip.Addr, l *Lease) (oldest *Lease) {
	all := s[a]
	if all == nil {
		return nil
	}
	if i, found := slices.BinarySearchFunc(all, l, compareAge); found {
		all = slices.Delete(all, i, i+1)
	}
	if s[a] = all; len(all) == 1 {
		delete(s, a)
	}
	return all[0]
}

func (s sharedPublicIPs) all() []SharedPublicIP {
	var all []SharedPublicIP
	for a, leases := range s {
		shared := SharedPublicIP{PublicIP: a}
		for _, l := range leases {
			shared.Keys = append(shared.Keys, l.Key)
		}
		all = append(all, shared)
	}
	slices.SortFunc(all, func(x, y SharedPublicIP) int { return x.PublicIP.Compare(y.PublicIP) })
	return all
}
