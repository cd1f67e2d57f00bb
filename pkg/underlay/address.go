// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// usable returns the addresses of family f on l that can be chosen without an option that
// names them, best first.
func (s selector) usable(l Link, f prefix.Family) []netip.Addr {
	var as []Addr
	for _, a := range l.Addrs {
		if prefix.FamilyOf(a.IP) == f && a.usable() {
			as = append(as, a)
		}
	}
	slices.SortStableFunc(as, func(a, b Addr) int { return s.rank(l, a) - s.rank(l, b) })
	ips := make([]netip.Addr, len(as))
	for i, a := range as {
		ips[i] = a.IP
	}
	return ips
}

func (a Addr) usable() bool {
	return !a.Deprecated && !a.Tentative && (a.IP.IsGlobalUnicast() || a.IP.IsLinkLocalUnicast())
}

// rank returns the place of an address in the order of preference; the lowest is best. flannel
// has the same order from permanent on, except that it does not know virtual addresses.
func (s selector) rank(l Link, a Addr) int {
	// Each weight is more than the sum of those below it, so an address in use stays however
	// good another one is.
	r := 0
	if a.IP.IsLinkLocalUnicast() {
		r += 64
	}
	if !s.opts.InUse.uses(a.IP) {
		r += 32
	}
	if !slices.Contains(s.opts.Published, a.IP) {
		r += 16
	}
	if !s.isSource(l, a) {
		r += 8
	}

	// A failover moves a virtual address to another host, so any other global address is
	// better, except an IPv6 privacy address.
	switch {
	case a.Permanent && a.single():
		r += 5
	case !a.Permanent:
		r += 4
	}
	switch {
	case a.Temporary && a.Permanent: // an IPv4 secondary address
		r++
	case a.Temporary:
		r += 2
	}
	return r
}

// isSource reports whether the kernel sends packets to other hosts from address a of l. The source
// says something for IPv4 only. For IPv6 the kernel takes the address with the most leading
// bits in common with the destination (RFC 6724, rule 8), which may be a virtual or a
// privacy address.
func (s selector) isSource(l Link, a Addr) bool {
	from := func(r Reach) bool { return r.Link == l.Index && r.Source == a.IP }
	return a.IP.Is4() && (slices.ContainsFunc(s.facts.Peers, from) || slices.ContainsFunc(s.facts.Elsewhere, from))
}

// own returns the best usable address of family f on l. It returns an error if there is none.
// It also returns an error instead of a link-local address while a global one is
// tentative, which is the case for a second or two after every boot.
func (s selector) own(l Link, f prefix.Family) (netip.Addr, error) {
	ips := s.usable(l, f)
	if len(ips) > 0 && !ips[0].IsLinkLocalUnicast() {
		return ips[0], nil
	}
	for _, a := range l.Addrs {
		if prefix.FamilyOf(a.IP) == f && a.IP.IsGlobalUnicast() && a.Tentative && !a.Duplicate && !a.Deprecated {
			return netip.Addr{}, fmt.Errorf("%s: address %s is still tentative", l.Name, a.IP)
		}
	}
	if len(ips) == 0 {
		return netip.Addr{}, fmt.Errorf("%s has no usable %s address", l.Name, f)
	}
	return ips[0], nil
}
