// SPDX-License-Identifier: Apache-2.0

// Package prefix contains address families and the address arithmetic that net/netip
// leaves out.
package prefix

import (
	"math/big"
	"net/netip"
	"slices"
	"strconv"
)

// Family is an IP address family. Its value is the IP version.
type Family int

// The two address families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// FamilyOf returns the family of a. IPv4-mapped IPv6 addresses count as IPv6.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// String returns "IPv4" or "IPv6".
func (f Family) String() string { return "IPv" + strconv.Itoa(int(f)) }

// Bits returns the length of an address of the family in bits: 32 or 128.
func (f Family) Bits() int {
	if f == IPv4 {
		return 32
	}
	return 128
}

// MinMTU is the minimum MTU in bytes of a link that carries the family.
func (f Family) MinMTU() int {
	if f == IPv4 {
		return 68
	}
	return 1280
}

// Host returns the prefix that contains only a: a /32 or a /128.
func Host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// First returns the first address after the base address of p. The bridge of the pods in
// subnet p has this address. If p is a single address, First returns that address.
func First(p netip.Prefix) netip.Addr {
	if p.IsSingleIP() {
		return p.Addr()
	}
	return p.Masked().Addr().Next()
}

// Last returns the highest address of p.
func Last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// Contains reports whether outer contains every address of inner.
func Contains(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// Add returns the address n above a. ok is false if the result is outside the address
// space of a's family.
func Add(a netip.Addr, n *big.Int) (sum netip.Addr, ok bool) {
	v := new(big.Int).SetBytes(a.AsSlice())
	v.Add(v, n)
	if v.Sign() < 0 || v.BitLen() > a.BitLen() {
		return netip.Addr{}, false
	}
	b := v.FillBytes(make([]byte, a.BitLen()/8))
	sum, ok = netip.AddrFromSlice(b)
	return sum, ok
}

// Distance returns b - a, which is negative if b is below a. Both must belong to the same
// family.
func Distance(a, b netip.Addr) *big.Int {
	x := new(big.Int).SetBytes(a.AsSlice())
	y := new(big.Int).SetBytes(b.AsSlice())
	return y.Sub(y, x)
}

// Merge returns the smallest set of prefixes that contain exactly the addresses of all, sorted.
func Merge(all []netip.Prefix) []netip.Prefix {
	sorted := make([]netip.Prefix, 0, len(all))
	for _, p := range all {
		sorted = append(sorted, p.Masked())
	}

	slices.SortFunc(sorted, netip.Prefix.Compare)
	var merged []netip.Prefix
	for _, p := range sorted {
		if n := len(merged); n > 0 && Contains(merged[n-1], p) {
			continue
		}

		merged = append(merged, p)
		for n := len(merged); n > 1; n-- { // the last two may be the halves of a prefix
			low := merged[n-2]
			high := merged[n-1]
			both := netip.PrefixFrom(low.Addr(), low.Bits()-1).Masked()
			if low.Bits() != high.Bits() || both.Addr() != low.Addr() || !Contains(both, high) {
				break
			}
			merged = append(merged[:n-2], both)
		}
	}
	return merged
}

// OfFamily returns the first of prefixes that belongs to f. All of them must be valid. ok is false
// if none belongs to f.
func OfFamily(prefixes []netip.Prefix, f Family) (p netip.Prefix, ok bool) {
	for _, p := range prefixes {
		if FamilyOf(p.Addr()) == f {
			return p, true
		}
	}
	return netip.Prefix{}, false
}
