// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Facts is the input to the choice of the external interface. It is plain data; gather
// reads it from the kernel.
type Facts struct {
	// Links has all links, sorted by index. lo is always one of them.
	Links []Link
	// Defaults has the default routes of the main table, in kernel order. gather leaves
	// it empty if an option selects an interface.
	Defaults []DefaultRoute
	// Reach is the route to Options.CanReach. It is the zero Reach if CanReach is not an
	// address.
	Reach Reach
	// Peers has the routes to a few of Options.Peers. These are the kernel's answers, so
	// they include the effect of rules and of tables other than main.
	Peers []Reach
	// Elsewhere has the route of each family to an address outside of all networks, if no peer
	// of that family is known. It shows the source address that the kernel prefers.
	Elsewhere []Reach
}

// Link is a network interface with its addresses.
type Link struct {
	Name  string
	Index int
	Kind  string // such as "bridge"; empty for hardware and lo
	MTU   int    // bytes
	// Hardware is the hardware address; empty or zero if there is none.
	Hardware string
	// Master is the index of the bridge, bond or VRF of which the link is a port, and Parent
	// that of the link that carries its packets, such as that of a VLAN. Both are 0 if there is none.
	Master, Parent int
	// Up means that the link is set up, Running that it has a carrier.
	Up, Running bool
	// Addrs is in kernel order.
	Addrs []Addr
}

// Addr is an address of a link.
type Addr struct {
	IP netip.Addr
	// Network has the hosts that the address makes directly connected. On a point-to-point
	// link that is the other end, and not IP.
	Network netip.Prefix
	// Permanent addresses have no lifetime: they are configured, and come neither from
	// DHCP nor from a router advertisement.
	Permanent bool
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

// single reports whether the address has no network and no peer on its link. A permanent one beside
// others is a virtual address, as keepalived creates it. In some clouds a host has only such an address.
func (a Addr) single() bool { return a.Network == prefix.Host(a.IP) }

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
	To     netip.Addr
	Link   int        // index of the outgoing link
	Source netip.Addr // the source address of packets; zero if the kernel reported none
	// Failure says why there is no route; it is empty if there is one.
	Failure string
}

func (f Facts) link(index int) (Link, error) {
	for _, l := range f.Links {
		if l.Index == index {
			return l, nil
		}
	}
	return Link{}, fmt.Errorf("no interface with index %d", index)
}

func (l Link) loopback() bool { return l.Name == "lo" }

func (l Link) alive() bool { return l.Up && l.Running }

// onlyHolds reports whether l holds addresses but carries no packets to other hosts.
func (l Link) onlyHolds() bool { return l.loopback() || l.Kind == "dummy" }

// linksWith returns the links that have address a, usable or not.
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
	return ok && !a.Tentative && l.alive()
}

// maxSeenAddrs is the number of addresses of an interface in an error.
const maxSeenAddrs = 4

// seen lists the interfaces with their addresses on one line.
func (f Facts) seen() string {
	if len(f.Links) == 0 {
		return "no interfaces"
	}

	// Global addresses first, so that hundreds of veth devices do not displace them.
	global := func(a Addr) bool { return a.IP.IsGlobalUnicast() }
	links := slices.Clone(f.Links)
	slices.SortStableFunc(links, func(a, b Link) int {
		return truth(!slices.ContainsFunc(a.Addrs, global), !slices.ContainsFunc(b.Addrs, global))
	})

	texts := make([]string, len(links))
	for i, l := range links {
		texts[i] = l.seen()
	}
	return oneline.List(texts, ", ")
}

func (l Link) seen() string {
	var words []string
	if !l.Up {
		words = append(words, "down")
	} else if !l.Running {
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
