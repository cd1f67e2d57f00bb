// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// Facts is the input to the choice of the external interface. It is plain data; Gather
// reads it from the kernel.
type Facts struct {
	// Links has all links, sorted by index.
	Links []Link
	// Defaults has the default routes of the main table, in kernel order. Gather leaves
	// it empty if an option selects an interface.
	Defaults []DefaultRoute
	// Reach is the route to Options.CanReach. It is the zero Reach if CanReach is not an
	// address.
	Reach Reach
}

// Link is a network interface with its addresses.
type Link struct {
	Name  string
	Index int
	MTU   int // bytes
	// Up means that the link is set up, Running that it has a carrier.
	Up, Running bool
	// Addrs is in kernel order.
	Addrs []Addr
}

// Addr is an address of a link.
type Addr struct {
	IP netip.Addr
	// Permanent addresses have no lifetime: they are configured, and come neither from
	// DHCP nor from a router advertisement.
	Permanent bool
	// Single addresses have no network and no peer on their link: /32 or /128. A
	// permanent one beside other addresses is a virtual address, as keepalived creates
	// it. In some clouds a host has only such an address.
	Single bool
	// Temporary is an IPv6 privacy address or an IPv4 secondary address: the kernel uses
	// one flag for both.
	Temporary bool
	// Deprecated addresses must not be used for new connections.
	Deprecated bool
	// Tentative addresses cannot be used until duplicate address detection is done.
	Tentative bool
	// Duplicate is a tentative address that another host uses. It stays unusable.
	Duplicate bool
}

// DefaultRoute is a default route of one family.
type DefaultRoute struct {
	Family prefix.Family
	// Links has the indexes of the route's outgoing links, each once. A multipath route
	// can have several links. Links is empty if the kernel reported none.
	Links  []int
	Metric int
}

// Reach is the result of a route lookup.
type Reach struct {
	Link   int        // index of the outgoing link
	Source netip.Addr // the source address of packets; zero if the kernel reported none
	// Failure says why there is no route; it is empty if there is one.
	Failure string
}

// link returns the link with the given index, or an error if there is none.
func (f Facts) link(index int) (Link, error) {
	for _, l := range f.Links {
		if l.Index == index {
			return l, nil
		}
	}
	return Link{}, fmt.Errorf("no interface with index %d", index)
}

// linksWith returns the links that have address a, whether it is usable or not.
func (f Facts) linksWith(a netip.Addr) []Link {
	var on []Link
	for _, l := range f.Links {
		if _, ok := l.addr(a); ok {
			on = append(on, l)
		}
	}
	return on
}

func (l Link) addr(ip netip.Addr) (Addr, bool) {
	i := slices.IndexFunc(l.Addrs, func(a Addr) bool { return a.IP == ip })
	if i < 0 {
		return Addr{}, false
	}
	return l.Addrs[i], true
}

// sends reports whether the host can send packets from address ip of l.
func (l Link) sends(ip netip.Addr) bool {
	a, ok := l.addr(ip)
	return ok && !a.Tentative && !a.Duplicate && l.Up && l.Running
}

// usable returns the addresses of family f that can be chosen without an option that
// names them, best first. Global addresses precede link-local ones; among these the order
// is: in use, permanent, not temporary, kernel order. flannel has the same order, with
// two exceptions: flannel does not prefer addresses in use, and treats virtual addresses
// like other permanent ones. A failover moves a virtual address to another host, so any
// other global address is better, except an IPv6 privacy address.
func (l Link) usable(f prefix.Family, inUse Interface) []netip.Addr {
	var as []Addr
	for _, a := range l.Addrs {
		if prefix.FamilyOf(a.IP) == f && !a.Deprecated && !a.Tentative &&
			(a.IP.IsGlobalUnicast() || a.IP.IsLinkLocalUnicast()) {
			as = append(as, a)
		}
	}
	slices.SortStableFunc(as, func(a, b Addr) int { return a.rank(inUse) - b.rank(inUse) })
	ips := make([]netip.Addr, len(as))
	for i, a := range as {
		ips[i] = a.IP
	}
	return ips
}

func (a Addr) rank(inUse Interface) int {
	r := 0
	if a.IP.IsLinkLocalUnicast() {
		r += 16
	}
	if !inUse.uses(a.IP) {
		r += 8
	}
	switch {
	case a.Permanent && a.Single:
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

// own returns the best usable address of family f. It returns an error if there is none.
// It also returns an error instead of a link-local address while a global one is
// tentative, which is the case for a second or two after every boot.
func (l Link) own(f prefix.Family, inUse Interface) (netip.Addr, error) {
	ips := l.usable(f, inUse)
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

// maxSeenAddrs is the number of addresses of an interface in an error.
const maxSeenAddrs = 4

// seen lists the interfaces with their addresses on one line. Interfaces with a global
// address come first, so that hundreds of veth devices do not displace them.
func (f Facts) seen() string {
	if len(f.Links) == 0 {
		return "no interfaces"
	}
	links := slices.Clone(f.Links)
	slices.SortStableFunc(links, func(a, b Link) int { return a.obscurity() - b.obscurity() })
	texts := make([]string, len(links))
	for i, l := range links {
		texts[i] = l.seen()
	}
	return oneline.List(texts, ", ")
}

func (l Link) obscurity() int {
	if slices.ContainsFunc(l.Addrs, func(a Addr) bool { return a.IP.IsGlobalUnicast() }) {
		return 0
	}
	return 1
}

func (l Link) seen() string {
	var words []string
	switch {
	case !l.Up:
		words = append(words, "down")
	case !l.Running:
		words = append(words, "no carrier")
	}
	if l.MTU == 0 {
		words = append(words, "MTU 0")
	}
	if len(l.Addrs) == 0 {
		words = append(words, "no address")
	}
	for i, a := range l.Addrs {
		if i == maxSeenAddrs {
			words = append(words, fmt.Sprintf("+%d", len(l.Addrs)-i))
			break
		}
		words = append(words, a.seen())
	}
	return l.Name + " (" + strings.Join(words, " ") + ")"
}

func (a Addr) seen() string {
	switch {
	case a.Duplicate:
		return a.IP.String() + "[duplicate]"
	case a.Tentative:
		return a.IP.String() + "[tentative]"
	case a.Deprecated:
		return a.IP.String() + "[deprecated]"
	}
	return a.IP.String()
}
