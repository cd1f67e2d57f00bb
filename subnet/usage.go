// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"math"
	"net/netip"
)

// Usage contains the numbers of subnets of a pool. A number that does not fit is math.MaxUint64.
type Usage struct {
	Free     uint64 // overlap no lease
	Leased   uint64
	Reserved uint64 // by a lease that does not expire
}

// Usage counts the pool's subnets, given all leases. A lease of another length uses all subnets
// that it overlaps. A subnet that is reserved and leased counts as reserved.
func (p Pool) Usage(leases []Lease) Usage {
	if !p.first.IsValid() {
		return Usage{}
	}

	var reserved, all []netip.Prefix
	for _, l := range leases {
		all = append(all, l.Subnets()...)
		if l.Permanent {
			reserved = append(reserved, l.Subnets()...)
		}
	}

	taken := p.covered(all)
	u := Usage{Free: p.Size(), Reserved: p.covered(reserved)}
	u.Leased = taken - u.Reserved
	if u.Free < math.MaxUint64 {
		u.Free -= taken
	}
	return u
}

// covered returns how many subnets of the pool overlap one of taken.
func (p Pool) covered(taken []netip.Prefix) (n uint64) {
	for _, s := range p.spans(taken) {
		n += s.size()
	}
	return n
}
