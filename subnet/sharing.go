// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"maps"
	"net/netip"
	"slices"
)

// Shared is a public address that several accepted leases have, or had.
type Shared struct {
	PublicIP netip.Addr
	Keys     []string // of the leases, the oldest first; nil: it is no longer shared
}

// sharing tracks the public addresses that several leases have: those of hosts behind one NAT,
// or of a host that is gone while its Node still exists and another host has its address.
type sharing struct {
	leases  map[netip.Addr][]*Lease // at least two each, the oldest first
	told    map[netip.Addr]struct{} // addresses that news has returned as shared
	touched map[netip.Addr]struct{} // addresses for which leases and told may differ
}

func newSharing() sharing {
	return sharing{told: map[netip.Addr]struct{}{}, touched: map[netip.Addr]struct{}{}}
}

// reset forgets all leases, but not which addresses news has returned.
func (s *sharing) reset() {
	s.leases = map[netip.Addr][]*Lease{}
	maps.Copy(s.touched, s.told)
}

// join records that l has an address that other and perhaps more leases have, and returns the
// oldest lease that has it.
func (s *sharing) join(a netip.Addr, other, l *Lease) (oldest *Lease) {
	all := s.leases[a]
	if all == nil {
		all = []*Lease{other}
		s.touched[a] = struct{}{}
	}
	i, _ := slices.BinarySearchFunc(all, l, compareAge)
	all = slices.Insert(all, i, l)
	s.leases[a] = all
	return all[0]
}

// leave records that l no longer has the address, and returns the oldest lease that still has
// it; nil if no other lease has it.
func (s *sharing) leave(a netip.Addr, l *Lease) (oldest *Lease) {
	all := s.leases[a]
	if all == nil {
		return nil
	}
	if i, found := slices.BinarySearchFunc(all, l, compareAge); found {
		all = slices.Delete(all, i, i+1)
	}
	if s.leases[a] = all; len(all) == 1 {
		delete(s.leases, a)
		s.touched[a] = struct{}{}
	}
	return all[0]
}

// news returns the changes since the last call, in the order of addresses.
func (s *sharing) news() []Shared {
	var all []Shared
	for a := range s.touched {
		leases := s.leases[a]
		_, told := s.told[a]
		switch shared := len(leases) > 0; {
		case shared == told:
			continue
		case shared:
			s.told[a] = struct{}{}
		default:
			delete(s.told, a)
		}
		one := Shared{PublicIP: a}
		for _, l := range leases {
			one.Keys = append(one.Keys, l.Key)
		}
		all = append(all, one)
	}
	clear(s.touched)
	slices.SortFunc(all, func(x, y Shared) int { return x.PublicIP.Compare(y.PublicIP) })
	return all
}
