// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"maps"
	"net/netip"
	"slices"
)

// SharedPublicIP is a public address that several accepted leases have, or had.
type SharedPublicIP struct {
	PublicIP netip.Addr
	Keys     []string // of the leases, the oldest first; nil if the address is no longer shared
}

// sharedPublicIPs tracks the public addresses that several leases have. Hosts behind one NAT have
// the same address. So do two Nodes if one host is gone, and another host has got its address.
type sharedPublicIPs struct {
	leases   map[netip.Addr][]*Lease // at least two each, the oldest first
	reported map[netip.Addr]struct{} // addresses that changes has returned as shared
	changed  map[netip.Addr]struct{} // addresses for which leases and reported may differ
}

func newSharedPublicIPs() sharedPublicIPs {
	return sharedPublicIPs{reported: map[netip.Addr]struct{}{}, changed: map[netip.Addr]struct{}{}}
}

// reset removes all leases, but remembers which addresses changes has returned as shared.
func (s *sharedPublicIPs) reset() {
	s.leases = map[netip.Addr][]*Lease{}
	maps.Copy(s.changed, s.reported)
}

// add records that l has the address a, like the lease other and perhaps more leases. It returns the
// oldest lease that has the address.
func (s *sharedPublicIPs) add(a netip.Addr, other, l *Lease) (oldest *Lease) {
	all := s.leases[a]
	if all == nil {
		all = []*Lease{other}
		s.changed[a] = struct{}{}
	}
	i, _ := slices.BinarySearchFunc(all, l, compareAge)
	all = slices.Insert(all, i, l)
	s.leases[a] = all
	return all[0]
}

// remove records that l no longer has the address a, and returns the oldest lease that still has
// it, or nil if no other lease has it.
func (s *sharedPublicIPs) remove(a netip.Addr, l *Lease) (oldest *Lease) {
	all := s.leases[a]
	if all == nil {
		return nil
	}
	if i, found := slices.BinarySearchFunc(all, l, compareAge); found {
		all = slices.Delete(all, i, i+1)
	}
	if s.leases[a] = all; len(all) == 1 {
		delete(s.leases, a)
		s.changed[a] = struct{}{}
	}
	return all[0]
}

func (s *sharedPublicIPs) all() []SharedPublicIP {
	var all []SharedPublicIP
	for a, leases := range s.leases {
		all = append(all, SharedPublicIP{a, keysOf(leases)})
	}
	slices.SortFunc(all, compareShared)
	return all
}

func keysOf(leases []*Lease) []string {
	var keys []string
	for _, l := range leases {
		keys = append(keys, l.Key)
	}
	return keys
}

func compareShared(x, y SharedPublicIP) int { return x.PublicIP.Compare(y.PublicIP) }

// changes returns the changes since the last call, sorted by address.
func (s *sharedPublicIPs) changes() []SharedPublicIP {
	var all []SharedPublicIP
	for a := range s.changed {
		leases := s.leases[a]
		_, reported := s.reported[a]
		switch shared := len(leases) > 0; {
		case shared == reported:
			continue
		case shared:
			s.reported[a] = struct{}{}
		default:
			delete(s.reported, a)
		}
		all = append(all, SharedPublicIP{a, keysOf(leases)})
	}

	clear(s.changed)
	slices.SortFunc(all, compareShared)
	return all
}
