// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"fmt"
	"net/netip"
	"slices"
)

// Pools returns the pool of each enabled family, IPv4 first. An error is one
// line and wraps ErrInvalidConfig.
func (c Config) Pools() ([]Pool, error) {
	pools := make([]Pool, 0, len(c.Networks))
	for _, n := range c.Networks {
		p, err := n.Pool()
		if err != nil {
			return nil, err
		}
		pools = append(pools, p)
	}
	return pools, nil
}

// Allocate returns a free subnet from each of the pools, in their order: the first of wanted
// that is in the pool and overlaps none of taken, or else a random one. The error wraps
// ErrNoSubnets and names the range.
func Allocate(pools []Pool, wanted, taken []netip.Prefix) ([]netip.Prefix, error) {
	subnets := make([]netip.Prefix, 0, len(pools))
	for _, p := range pools {
		s, ok := p.Free(wanted, taken)
		if !ok {
			s, ok = p.Pick(taken)
		}
		if !ok {
			return nil, fmt.Errorf("%w: all %s from %s are taken", ErrNoSubnets, p.Size(), p)
		}
		subnets = append(subnets, s)
	}
	return subnets, nil
}

// Free returns the first of wanted that is one of the pool's subnets and overlaps none of
// taken. ok is false if there is none.
func (p Pool) Free(wanted, taken []netip.Prefix) (s netip.Prefix, ok bool) {
	for _, w := range wanted {
		if p.Contains(w) && !slices.ContainsFunc(taken, w.Overlaps) {
			return w, true
		}
	}
	return netip.Prefix{}, false
}
