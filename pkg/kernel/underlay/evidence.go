// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"cmp"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Candidate is a link with what speaks for and against it. It does not depend on the options that name
// an interface.
type Candidate struct {
	Name      string       `json:"name"`
	Addresses []netip.Addr `json:"addresses"` // global ones, in kernel order
	Chosen    bool         `json:"chosen"`
	For       []string     `json:"for,omitempty"`
	Against   []string     `json:"against,omitempty"`
	// Never says why only --iface chooses the link; it is empty for other links.
	Never string `json:"never,omitempty"`
}

// candidate is a Candidate with the facts that decide its place.
type candidate struct {
	Candidate
	link      Link
	poor      int // 0: it has global addresses in all families, 1: link-local ones, 2: a family has none
	inUse     int // how many of its addresses are in use
	published int // how many of its addresses this host has published before
	peers     int // to how many peers the kernel sends through it
	defaults  int // of how many families the best default route uses it
	hop       int // its place among the hops of that route
}

// candidates returns all links, best first. Those that never count are at the end.
//
//  1. A link that leads to pods, or over the tunnel, never counts. Neither does one for which none
//     of 3 to 6 speaks.
//  2. A link that is up, with a carrier and addresses of all families, comes before others.
//  3. An address in use stays while it serves; otherwise it is as good as any other.
//  4. An address that this host has published before stays likewise.
//  5. More peers are better: the kernel already sends to them through that link.
//  6. The default route in the main table decides what is left.
func (s selector) candidates() []candidate {
	all := make([]candidate, len(s.facts.Links))
	for i, l := range s.facts.Links {
		all[i] = s.candidate(l)
	}

	for _, f := range s.opts.Families {
		for hop, index := range s.bestDefault(f) {
			c := &all[slices.IndexFunc(all, func(c candidate) bool { return c.link.Index == index })]
			c.defaults++
			c.hop = hop
		}
	}

	slices.SortStableFunc(all, func(a, b candidate) int {
		return cmp.Or(
			truth(a.Never != "", b.Never != ""),
			truth(!a.counts(), !b.counts()),
			truth(!a.link.alive() || a.poor == 2, !b.link.alive() || b.poor == 2),
			b.inUse-a.inUse,
			b.published-a.published,
			b.peers-a.peers,
			a.poor-b.poor,
			b.defaults-a.defaults,
			a.hop-b.hop,
		)
	})
	return all
}

// counts reports whether anything speaks for c.
func (c candidate) counts() bool { return c.inUse+c.published+c.peers+c.defaults > 0 }

// truth compares two conditions; false comes first.
func truth(a, b bool) int { return ranks[a] - ranks[b] }

var ranks = map[bool]int{true: 1}

func (s selector) candidate(l Link) candidate {
	c := candidate{Candidate: Candidate{Name: l.Name, Addresses: []netip.Addr{}, Never: s.never(l)}, link: l}
	for _, a := range l.Addrs {
		if a.IP.IsGlobalUnicast() {
			c.Addresses = append(c.Addresses, a.IP)
		}
	}

	for _, f := range s.opts.Families {
		ips := s.usable(l, f)
		if len(ips) == 0 {
			c.poor = 2
		} else if ips[0].IsLinkLocalUnicast() {
			c.poor = max(c.poor, 1)
		}
	}

	for _, r := range s.facts.Peers {
		if l.carries(r) {
			c.peers++
		}
	}
	if !s.serves(l) {
		return c
	}

	for _, a := range l.Addrs {
		if a.IP.IsLinkLocalUnicast() {
			continue
		}
		if s.opts.InUse.uses(a.IP) {
			c.inUse++
		}
		if slices.Contains(s.opts.Published, a.IP) {
			c.published++
		}
	}
	return c
}

// serves reports whether packets to peers may leave through l, as far as the facts tell.
func (s selector) serves(l Link) bool {
	if len(s.facts.Peers) == 0 || slices.ContainsFunc(s.facts.Peers, l.carries) {
		return true
	}

	// A default route through l is enough: packets that are bound to the address or the link take it,
	// although a VPN has a better one for the others. But no link may be nearer to a peer.
	leads := func(r DefaultRoute) bool { return slices.Contains(r.Links, l.Index) }
	nearer := func(other Link) bool { return other.alive() && s.neighbours(other) }
	return s.neighbours(l) || slices.ContainsFunc(s.facts.Defaults, leads) && !slices.ContainsFunc(s.facts.Links, nearer)
}

// carries reports whether packets leave through l, or from an address that l only holds, as lo does on
// hosts that announce theirs by BGP. From other links the kernel borrows an address if the outgoing one
// has none.
func (l Link) carries(r Reach) bool {
	_, from := l.addr(r.Source)
	return r.Link == l.Index || from && l.onlyHolds()
}

// neighbours reports whether a peer is in a network of l.
func (s selector) neighbours(l Link) bool {
	return slices.ContainsFunc(l.Addrs, func(a Addr) bool {
		return slices.ContainsFunc(s.facts.Peers, func(r Reach) bool { return a.Network.Contains(r.To) })
	})
}

var ownDevice = regexp.MustCompile(`^flannel(-?\d+|(-v6)?\.(\d+|ipip)|-wg(\d+|-.*)?)$`)

// never says why only --iface chooses l. It returns "" for a link that others may choose.
func (s selector) never(l Link) string {
	if ownDevice.MatchString(l.Name) {
		return "it is a device of flanneld" // of the last process
	}
	for _, a := range l.Addrs {
		if i := slices.IndexFunc(s.opts.Pods, func(p netip.Prefix) bool { return p.Contains(a.IP) }); i >= 0 {
			return fmt.Sprintf("it leads to pods: its address %s is in %s", a.IP, s.opts.Pods[i])
		}
	}
	if p, err := s.facts.link(l.Parent); err == nil && s.never(p) != "" {
		return fmt.Sprintf("it is on %s, and %s", p.Name, strings.Replace(s.never(p), "it ", "that ", 1))
	}
	if m, err := s.facts.link(l.Master); err == nil {
		return "it is a port of " + m.Name
	}
	return ""
}

// bestDefault returns the links that count of the default route of family f with the lowest metric. A
// route whose links have no carrier is taken only if there is no other.
func (s selector) bestDefault(f prefix.Family) []int {
	left := func(index int) bool {
		l, err := s.facts.link(index)
		return err != nil || s.never(l) != ""
	}
	alive := func(index int) bool {
		l, _ := s.facts.link(index)
		return l.alive()
	}

	var routes []DefaultRoute
	for _, r := range s.facts.Defaults {
		r.Links = slices.DeleteFunc(slices.Clone(r.Links), left)
		if r.Family == f && len(r.Links) > 0 {
			routes = append(routes, r)
		}
	}
	if len(routes) == 0 {
		return nil
	}
	return slices.MinFunc(routes, func(a, b DefaultRoute) int {
		return cmp.Or(truth(!slices.ContainsFunc(a.Links, alive), !slices.ContainsFunc(b.Links, alive)), a.Metric-b.Metric)
	}).Links
}

func (s selector) byEvidence() (found, error) {
	c := s.candidates()[0]
	w := found{link: c.link}
	var split error
	if c.defaults < len(s.opts.Families) {
		split = s.splitDefault()
	}

	switch {
	case c.inUse > 0:
		w.note = "address in use"
	case c.published > 0:
		w.note = "address published before"
	case c.peers > 0:
		w.note = "route to other hosts"
	default:
		if !c.link.alive() {
			w.lastResort = c.Name + " has no carrier"
		}
		w.note = "default route"
		return w, split
	}
	if split == nil {
		w.note += ", default route"
	}

	// A link-local address alone does not prove that the family leads to other hosts: every
	// interface has one.
	if c.poor > 0 {
		return w, split
	}
	return w, nil
}

// splitDefault says why no interface has the default routes of all families.
func (s selector) splitDefault() error {
	var ways []string
	for _, f := range s.opts.Families {
		links := s.bestDefault(f)
		if len(links) == 0 {
			return fmt.Errorf("no %s default route in the main table%s", f, s.leftOut(f))
		}

		names := make([]string, len(links))
		for i, index := range links {
			l, _ := s.facts.link(index)
			names[i] = l.Name
		}
		ways = append(ways, fmt.Sprintf("%s leaves by %s", f, strings.Join(names, " and ")))
	}
	return fmt.Errorf("%s: want one interface for both, name it with --iface", strings.Join(ways, ", but "))
}

// leftOut names the default routes of family f that do not count, with the reason.
func (s selector) leftOut(f prefix.Family) string {
	var text strings.Builder
	for _, r := range s.facts.Defaults {
		for _, index := range r.Links {
			l, err := s.facts.link(index)
			if err == nil && r.Family == f && s.never(l) != "" {
				fmt.Fprintf(&text, ", except through %s: %s", l.Name, s.never(l))
			}
		}
	}
	return text.String()
}

// arguments returns what speaks for and against c, in the order of their weight.
func (s selector) arguments(c candidate) (pro, con []string) {
	add := func(to *[]string, when bool, text string, args ...any) {
		if when {
			*to = append(*to, fmt.Sprintf(text, args...))
		}
	}

	add(&pro, c.inUse > 0, "its address is in use")
	add(&pro, c.published > 0, "this host has published its address")
	add(&pro, c.peers > 0, "the kernel sends to %d of %d peers through it", c.peers, len(s.facts.Peers))
	add(&pro, c.defaults > 0, "default route in the main table")

	add(&con, !c.link.Up, "it is down")
	add(&con, c.link.Up && !c.link.alive(), "it has no carrier")
	add(&con, c.link.MTU <= 0, "its MTU is %d", c.link.MTU)
	for _, f := range s.opts.Families {
		_, err := s.own(c.link, f)
		add(&con, err != nil, "it has no usable %s address", f)
	}

	add(&con, c.poor == 1, "it has only link-local addresses in a family")
	add(&con, c.defaults == 0, "no default route that is the best one")
	add(&con, !s.serves(c.link), "the kernel sends to no peer through it")
	return pro, con
}
