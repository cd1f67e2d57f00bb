// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"math/big"
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

	kept := p.covered(reserved)
	taken := p.covered(all)
	return Usage{
		Free: saturated(new(big.Int).Sub(p.Size(), taken)), Leased: saturated(new(big.Int).Sub(taken, kept)), Reserved: saturated(kept),
	}
}

// covered returns how many subnets of the pool overlap one of taken.
func (p Pool) covered(taken []netip.Prefix) *big.Int {
	n := new(big.Int)
	for _, s := range p.spans(taken) {
		n.Add(n, s.size())
	}
	return n
}

// saturated returns n, or math.MaxUint64 if n does not fit.
func saturated(n *big.Int) uint64 {
	if !n.IsUint64() {
		return 1<<64 - 1
	}
	return n.Uint64()
}
