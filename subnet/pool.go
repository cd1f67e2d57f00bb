// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"cmp"
	"crypto/rand"
	"fmt"
	"iter"
	"math/big"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Pool is the range of subnets that a network gives to hosts: all of one length, from the first
// to the last. The zero Pool has no subnets.
type Pool struct {
	first, last netip.Prefix
}

// Pool derives the range of subnets from n, which must come from ParseConfig.
// An error is one line and wraps ErrInvalidConfig.
func (n Network) Pool() (Pool, error) {
	length, err := n.subnetLen()
	if err != nil {
		return Pool{}, invalid("%w", err)
	}
	f := n.Family()
	first := n.Min
	last := n.Max
	if !first.IsValid() {
		one := new(big.Int).Lsh(big.NewInt(1), uint(f.Bits()-length))
		first, _ = prefix.Add(n.Prefix.Addr(), one)
	}
	if !last.IsValid() {
		last = netip.PrefixFrom(prefix.Last(n.Prefix), length).Masked().Addr()
	}

	for _, a := range []struct {
		name string
		addr netip.Addr
	}{{"SubnetMin", first}, {"SubnetMax", last}} {
		name := keyName(f, a.name)
		if !n.Prefix.Contains(a.addr) {
			return Pool{}, invalid("%s is not in the range of the Network: %s is outside %s", name, a.addr, n.Prefix)
		}
		if netip.PrefixFrom(a.addr, length).Masked().Addr() != a.addr {
			return Pool{}, invalid("%s is not on a SubnetLen boundary: %s (SubnetLen is %d)", name, a.addr, length)
		}
	}
	if last.Less(first) {
		return Pool{}, invalid("%s %s is above %s %s", keyName(f, "SubnetMin"), first, keyName(f, "SubnetMax"), last)
	}

	pool := Pool{netip.PrefixFrom(first, length), netip.PrefixFrom(last, length)}
	for _, r := range unroutable {
		if pool.overlaps(r.Prefix) {
			return Pool{}, invalid("%s: a host could get a subnet of %s, which is %s and reaches no other host: leave it out by %s and %s",
				keyName(f, "Network"), r.Prefix, r.use, keyName(f, "SubnetMin"), keyName(f, "SubnetMax"))
		}
	}
	return pool, nil
}

// gives reports whether hosts get subnets from the part of the network where s is. Without SubnetMin and
// SubnetMax that is the whole network: in Kubernetes the control plane may assign any subnet.
func (n Network) gives(s netip.Prefix) bool {
	pool, err := n.Pool()
	return err != nil || !n.Min.IsValid() && !n.Max.IsValid() ||
		!s.Addr().Less(pool.first.Addr()) && !prefix.Last(pool.last).Less(prefix.Last(s))
}

// subnetLen returns the configured prefix length or the default. The default is /24 for IPv4 and
// /64 for IPv6 if at least four such subnets fit, otherwise the length of which exactly four fit.
func (n Network) subnetLen() (int, error) {
	f := n.Family()
	usual := 24
	longest := 30
	if f == prefix.IPv6 {
		usual = 64
		longest = 126
	}

	bits := n.Prefix.Bits()
	switch {
	case n.SubnetLen > longest:
		return 0, fmt.Errorf("%s must be less than /%d, is %d", keyName(f, "SubnetLen"), longest+1, n.SubnetLen)
	case n.SubnetLen > 0 && n.SubnetLen < bits+2:
		return 0, fmt.Errorf("network must be able to accommodate at least four subnets: %s is %d, %s is %s",
			keyName(f, "SubnetLen"), n.SubnetLen, keyName(f, "Network"), n.Prefix)

	case n.SubnetLen > 0:
		return n.SubnetLen, nil
	case bits+2 > longest:
		name := "network"
		if f == prefix.IPv6 {
			name = "IPv6Network"
		}
		return 0, fmt.Errorf("%s is too small. Minimum useful network prefix is /%d, have %s", name, longest-2, n.Prefix)
	}
	return max(usual, bits+2), nil
}

// String returns the range in the form "10.5.1.0/24 to 10.5.255.0/24".
func (p Pool) String() string { return fmt.Sprintf("%s to %s", p.first, p.last) }

// Size returns the number of subnets of the pool, taken or not.
func (p Pool) Size() *big.Int {
	n := p.index(p.last.Addr())
	return n.Add(n, big.NewInt(1))
}

// Contains reports whether s is one of the pool's subnets.
func (p Pool) Contains(s netip.Prefix) bool {
	return s.IsValid() && s == s.Masked() &&
		s.Bits() == p.first.Bits() &&
		!s.Addr().Less(p.first.Addr()) && !p.last.Addr().Less(s.Addr())
}

// overlaps reports whether a subnet of the pool contains an address of o.
func (p Pool) overlaps(o netip.Prefix) bool {
	return o.Addr().BitLen() == p.first.Addr().BitLen() &&
		!prefix.Last(o).Less(p.first.Addr()) && !prefix.Last(p.last).Less(o.Masked().Addr())
}

// guesses is the number of random subnets that Pick tries before it sorts the taken subnets. Unless
// the pool is nearly full, one of these guesses is very probably free.
const guesses = 4

// Pick returns a random subnet that overlaps none of taken; ok is false if none is free. taken may
// contain prefixes of any length and family, in any order. The time depends on the number of taken
// prefixes, not on the size of the pool.
func (p Pool) Pick(taken []netip.Prefix) (s netip.Prefix, ok bool) {
	if !p.first.IsValid() {
		return netip.Prefix{}, false
	}

	for range guesses {
		n, _ := rand.Int(rand.Reader, p.Size()) // never fails
		if s, _ := p.at(n); !slices.ContainsFunc(taken, s.Overlaps) {
			return s, true
		}
	}

	spans := p.spans(taken)
	free := p.Size()
	for _, t := range spans {
		free.Sub(free, t.size())
	}
	if free.Sign() <= 0 {
		return netip.Prefix{}, false
	}

	// The n-th free subnet comes after all taken spans that start at or below it.
	n, _ := rand.Int(rand.Reader, free)
	for _, t := range spans {
		if n.Cmp(t.from) < 0 {
			break
		}
		n.Add(n, t.size())
	}
	return p.at(n)
}

// at returns the pool's n-th subnet. The first one is 0. ok is false if its address would be beyond
// the last one of the family.
func (p Pool) at(n *big.Int) (s netip.Prefix, ok bool) {
	a, ok := prefix.Add(p.first.Addr(), new(big.Int).Lsh(n, p.hostBits()))
	return netip.PrefixFrom(a, p.first.Bits()), ok
}

// All returns all subnets of the pool in their order, taken or not.
func (p Pool) All() iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for n := new(big.Int); ; n.Add(n, big.NewInt(1)) {
			if s, ok := p.at(n); !ok || !p.Contains(s) || !yield(s) {
				return
			}
		}
	}
}

// span is a run of taken subnets, by index in the pool, both ends included.
type span struct{ from, to *big.Int }

func (s span) size() *big.Int {
	n := new(big.Int).Sub(s.to, s.from)
	return n.Add(n, big.NewInt(1))
}

// spans returns the runs of the pool's subnets that overlap a prefix in taken, sorted and without
// overlaps.
func (p Pool) spans(taken []netip.Prefix) []span {
	all := make([]span, 0, len(taken))
	for _, t := range taken {
		if !t.IsValid() || !p.overlaps(t) {
			continue
		}

		low := t.Masked().Addr()
		high := prefix.Last(t)
		if low.Less(p.first.Addr()) {
			low = p.first.Addr()
		}
		if p.last.Addr().Less(high) {
			high = p.last.Addr()
		}
		all = append(all, span{p.index(low), p.index(high)})
	}

	slices.SortFunc(all, func(a, b span) int { return cmp.Or(a.from.Cmp(b.from), a.to.Cmp(b.to)) })
	merged := all[:0]
	for _, s := range all {
		last := len(merged) - 1
		switch {
		case last < 0 || merged[last].to.Cmp(s.from) < 0:
			merged = append(merged, s)
		case merged[last].to.Cmp(s.to) < 0:
			merged[last].to = s.to
		}
	}
	return merged
}

// index returns the number of the pool's subnet that contains a. The pool's first subnet is 0. a
// must not be below the first subnet.
func (p Pool) index(a netip.Addr) *big.Int {
	d := prefix.Distance(p.first.Addr(), a)
	return d.Rsh(d, p.hostBits())
}

func (p Pool) hostBits() uint { return uint(p.first.Addr().BitLen() - p.first.Bits()) }
