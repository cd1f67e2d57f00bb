// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Inspect returns the links of this host with what speaks for and against them, best first, and the
// reason why none can be chosen. It leaves out the links of pods. Networks with the same Reader share reads,
// also with Watch, so frequent calls cost little.
func Inspect(ctx context.Context, o Options) ([]Candidate, error) {
	// The default routes too, although an option may select the interface.
	g := Options{Families: o.Families, Reader: o.Reader}.shared(ctx, leastRest)
	if g.err != nil {
		return nil, g.err
	}
	return explain(o.look(g.facts), o)
}

func explain(f Facts, o Options) (all []Candidate, err error) {
	s := selector{f, o}
	chosen, err := choose(f, o)
	for _, c := range s.candidates() {
		c.Chosen = c.Name == chosen.Name
		if c.link.Kind == "veth" && c.Never != "" && !c.Chosen { // of a pod: a host has hundreds
			continue
		}
		c.For, c.Against = s.arguments(c)
		all = append(all, c.Candidate)
	}
	return all, err
}

// choice is the result of choose. If lastResort is not empty, it says why Wait should hope for a
// better choice, such as that an address is link-local although no option named it.
type choice struct {
	Interface
	lastResort string
}

// choose tries Ifaces, IfaceRegexes and CanReach in this order and returns the first interface that has
// an address in every enabled family. If none of them is set, it takes the interface that has a public
// address, or else the best candidate. The error has one line.
func choose(f Facts, o Options) (choice, error) {
	s := selector{f, o}
	var failed []string
	for _, a := range s.attempts() {
		c, err := s.complete(a)
		if err == nil {
			if len(failed) > 0 {
				c.Reason += " (" + strings.Join(failed, "; ") + ")"
			}
			return c, nil
		}
		failed = append(failed, fmt.Sprintf("%s: %v", cmp.Or(a.option, "default route"), err))
	}
	return choice{}, fmt.Errorf("no external interface: %s; seen: %s", strings.Join(failed, "; "), f.seen())
}

type selector struct {
	facts Facts
	opts  Options
}

// attempt is the result of an option that selects an interface, or of none.
type attempt struct {
	option string // its flag and value; empty for none
	found
	err error
}

// found is a link, with the addresses that the option selected. The reason of the choice is
// the option, followed by note.
type found struct {
	link       Link
	addrs      []netip.Addr
	note       string
	lastResort string
}

func (s selector) attempts() []attempt {
	if !s.opts.asksForInterface() {
		return []attempt{s.automatic()}
	}

	var as []attempt
	add := func(option string, find func(string) (found, error), values ...string) {
		for _, v := range values {
			if v != "" {
				w, err := find(v)
				as = append(as, attempt{option + " " + v, w, err})
			}
		}
	}

	add("--iface", s.byIface, s.opts.Ifaces...)
	add("--iface-regex", s.byRegex, s.opts.IfaceRegexes...)
	add("--iface-can-reach", s.byReach, s.opts.CanReach)
	return as
}

func (s selector) complete(w attempt) (choice, error) {
	if w.err != nil {
		return choice{}, w.err
	}
	if w.link.MTU <= 0 {
		return choice{}, fmt.Errorf("%s has MTU %d", w.link.Name, w.link.MTU)
	}

	c := choice{lastResort: w.lastResort, Interface: Interface{
		Name: w.link.Name, Index: w.link.Index, MTU: s.mtu(w.link),
		VRF: s.vrf(w.link), Hardware: s.hardware(w.link), Reason: w.option + w.note,
	}}

	for _, fam := range s.opts.Families {
		addr, named, err := s.address(w.found, fam)
		if err != nil {
			return choice{}, err
		}
		c.Addrs = append(c.Addrs, addr)
		if !named && addr.Local.IsLinkLocalUnicast() {
			c.lastResort = c.Name + " has only a link-local address"
		}
	}
	return c, nil
}

// address returns the address of family f on the link that was found. named means that an option
// determined the local address.
func (s selector) address(w found, f prefix.Family) (a Address, named bool, err error) {
	// If this host has the public address, on any interface, peers expect packets from there.
	a.Public = s.opts.public(f).addr
	if len(s.facts.linksWith(a.Public)) > 0 {
		a.Local = a.Public
	} else if i := slices.IndexFunc(w.addrs, func(ip netip.Addr) bool { return prefix.FamilyOf(ip) == f }); i >= 0 {
		a.Local = w.addrs[i]
	}

	named = a.Local.IsValid()
	if named {
		err = s.ready(a.Local)
	} else {
		a.Local, err = s.own(w.link, f)
	}
	if !a.Public.IsValid() {
		a.Public = a.Local
	}
	return a, named, err
}

// largestMTU is the largest MTU that an interface gives to pods: the CNI plugin refuses more.
const largestMTU = 65535

func (s selector) mtu(l Link) int {
	mtu := min(l.MTU, largestMTU)
	if !l.onlyHolds() {
		return mtu
	}

	// The links that carry the packets count.
	for _, r := range slices.Concat(s.facts.Peers, s.facts.Elsewhere) {
		if c, err := s.facts.link(r.Link); err == nil {
			mtu = min(mtu, c.MTU)
		}
	}
	return mtu
}

func (s selector) hardware(l Link) string {
	// The first other link will do if l has no address that lasts.
	for _, c := range slices.Concat([]Link{l}, s.facts.Links) {
		if !c.onlyHolds() && strings.Trim(c.Hardware, "0:") != "" {
			return c.Hardware
		}
	}
	return ""
}

func (s selector) vrf(l Link) string {
	if m, err := s.facts.link(l.Master); err == nil && m.Kind == "vrf" {
		return m.Name
	}
	return ""
}

// ready returns an error if no packets can be sent yet from an address that an option names. It may be
// deprecated.
func (s selector) ready(ip netip.Addr) error {
	var err error
	for _, l := range s.facts.linksWith(ip) {
		switch a, _ := l.addr(ip); {
		case a.Duplicate:
			err = fmt.Errorf("%s: another host has address %s (duplicate address detection failed)", l.Name, ip)
		case a.Tentative:
			err = fmt.Errorf("%s: address %s is still tentative", l.Name, ip)
		default:
			return nil
		}
	}
	return err
}

// automatic finds the interface that has the public addresses of the options, or else the best one.
func (s selector) automatic() attempt {
	var local []named
	var foreign strings.Builder
	for _, f := range s.opts.Families {
		p := s.opts.public(f)
		if !p.addr.IsValid() {
			continue
		}
		if len(s.facts.linksWith(p.addr)) > 0 {
			local = append(local, p)
		} else {
			fmt.Fprintf(&foreign, ", %s is not assigned here", p) // 1:1 NAT
		}
	}

	if len(local) == 0 {
		w, err := s.byEvidence()
		w.note += foreign.String()
		return attempt{"", w, err}
	}
	l, err := s.linkWithAll(local)
	return attempt{local[0].String(), found{link: l, note: " is assigned here"}, err}
}

// byIface finds an interface by its name or by its addresses. value may have an IPv4 and an IPv6 address,
// as in the field status.hostIPs of a Pod.
func (s selector) byIface(value string) (found, error) {
	note := ""
	if value == NodeIP {
		if value = s.nodeIPs(); value == "" {
			return found{}, errors.New("the InternalIP of the Node is not known")
		}
		note = " " + value
	}

	var addrs []netip.Addr
	var wants []named
	var disabled error
	for text := range strings.SplitSeq(value, ",") {
		ip, err := parseAddr(text)
		if err != nil {
			i := slices.IndexFunc(s.facts.Links, func(l Link) bool { return l.Name == value })
			if i < 0 {
				return found{}, errors.New("no interface has this name")
			}
			return found{link: s.facts.Links[i]}, nil
		}
		if f := prefix.FamilyOf(ip); !slices.Contains(s.opts.Families, f) {
			disabled = fmt.Errorf("%s is not enabled", f)
			continue
		}
		addrs = append(addrs, ip)
		wants = append(wants, named{"--iface", ip})
	}
	if len(addrs) == 0 {
		return found{}, disabled
	}

	// In dual stack one interface must have both addresses, as in flannel: otherwise a
	// typing error would spread the families over two interfaces without a warning.
	if p := s.opts.public(prefix.IPv6); len(s.opts.Families) > 1 && len(s.facts.linksWith(p.addr)) > 0 {
		wants = append(wants, p)
	}
	l, err := s.linkWithAll(wants)
	return found{link: l, addrs: addrs, note: note}, err
}

// nodeIPs returns the addresses for which NodeIP stands, separated by a comma.
func (s selector) nodeIPs() string {
	var texts []string
	if s.opts.NodeIPs != nil {
		for _, a := range s.opts.NodeIPs() {
			texts = append(texts, a.String())
		}
	}
	if len(texts) == 0 { // the API server has not answered yet
		for _, a := range s.opts.InUse.Addrs {
			texts = append(texts, a.Local.String())
		}
	}
	return strings.Join(texts, ",")
}

// parseAddr refuses a zone, and converts IPv4-mapped IPv6 addresses to IPv4.
func parseAddr(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if a.Zone() != "" {
		err = errors.New("has a zone")
	}
	return a.Unmap(), err
}

// linkWithAll returns the first link that has all the addresses. The caller puts the first address in
// front of the error.
func (s selector) linkWithAll(wants []named) (Link, error) {
	for _, l := range s.facts.Links {
		if !slices.ContainsFunc(wants, func(w named) bool { _, ok := l.addr(w.addr); return !ok }) {
			return l, nil
		}
	}

	var where []string
	for _, w := range wants {
		on := s.facts.linksWith(w.addr)
		if len(on) == 0 {
			return Link{}, errors.New("not assigned to any interface")
		}
		where = append(where, w.String()+" is on "+on[0].Name)
	}
	where[0] = "is on " + s.facts.linksWith(wants[0].addr)[0].Name
	return Link{}, fmt.Errorf("%s, want one interface for both", strings.Join(where, ", but "))
}

// byRegex finds an interface by a regular expression. The one in use comes before all others, even if
// only its name matches.
func (s selector) byRegex(expr string) (found, error) {
	re, err := regexp.Compile(expr)
	if err != nil {
		return found{}, err
	}

	var best found
	least := 0 // the place of best; 0 if there is none
	for _, l := range s.facts.Links {
		if s.never(l) != "" {
			continue
		}
		w, place := s.match(re, l)
		if place > 0 && !s.isInUse(l) {
			place += mostPlaces
		}
		if place > 0 && (least == 0 || place < least) {
			best = w
			least = place
		}
	}
	if least > 0 {
		return best, nil
	}
	if len(s.opts.Families) > 1 {
		return found{}, errors.New("no interface with an IPv4 and an IPv6 address matches")
	}
	return found{}, fmt.Errorf("no %s address and no interface name matches", s.opts.Families[0])
}

const mostPlaces = 3 // number of places that match returns

// match returns what matches at a link, and its place: 1 for an address in every enabled family, 2 for one in some
// family, 3 for the name, and 0 if nothing matches.
func (s selector) match(re *regexp.Regexp, l Link) (w found, place int) {
	var hits []netip.Addr
	var texts []string
	for _, f := range s.opts.Families {
		ips := s.usable(l, f)
		if i := slices.IndexFunc(ips, func(ip netip.Addr) bool { return re.MatchString(ip.String()) }); i >= 0 {
			hits = append(hits, ips[i])
			texts = append(texts, ips[i].String())
		}
	}

	w = found{link: l, addrs: hits, note: ": address " + strings.Join(texts, " and ")}
	switch {
	case len(hits) == len(s.opts.Families):
		return w, 1
	case len(hits) > 0 && !hits[0].IsLinkLocalUnicast() && s.candidate(l).poor < 2:
		return w, 2
	case re.MatchString(l.Name):
		return found{link: l, note: ": name " + l.Name}, 3
	}
	return found{}, 0
}

// byReach finds the interface and the source address of the route to an address.
func (s selector) byReach(value string) (found, error) {
	ip, err := parseAddr(value)
	if err != nil {
		return found{}, errors.New("want an IP address")
	}
	if c := s.candidates()[0]; c.inUse > 0 && c.peers > 0 {
		return found{link: c.link, note: ": address in use, route to other hosts"}, nil
	}

	// All hosts may get the same option, and one of them has the address. There the kernel reports lo.
	var w found
	source := ip
	if on := s.facts.linksWith(ip); len(on) > 0 {
		w = found{link: on[0], note: " is assigned here"}
	} else {
		r := s.facts.Reach
		if r.Failure != "" {
			return found{}, errors.New(r.Failure)
		}
		if w.link, err = s.facts.link(r.Link); err != nil {
			return found{}, err
		}
		source = r.Source
	}

	if why := s.never(w.link); why != "" {
		return found{}, fmt.Errorf("%s: %s", w.link.Name, why)
	}
	if source.IsValid() && !s.keeps(w.link, prefix.FamilyOf(source)) {
		w.addrs = []netip.Addr{source}
	}
	return w, nil
}

// keeps reports whether byReach must keep the address in use: the source that the kernel reports may be
// a virtual address that was added later.
func (s selector) keeps(l Link, f prefix.Family) bool {
	ips := s.usable(l, f)
	return len(ips) > 0 && s.opts.InUse.uses(ips[0]) && !ips[0].IsLinkLocalUnicast()
}

// isInUse accepts another name for the link in use, but needs a carrier.
func (s selector) isInUse(l Link) bool {
	return l.alive() && (l.Name == s.opts.InUse.Name || slices.ContainsFunc(l.Addrs, func(a Addr) bool { return s.opts.InUse.uses(a.IP) }))
}

// usable returns the addresses of family f on l that need no option, best first.
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

// rank returns the place of an address; the lowest is best. flannel has the same order from permanent
// on, except that it does not know virtual addresses.
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
	if a.Permanent && a.single() {
		r += 5
	} else if !a.Permanent {
		r += 4
	}
	if a.Temporary {
		r += 2
	}
	return r
}

// isSource reports whether the kernel sends packets to other hosts from IPv4 address a of l.
func (s selector) isSource(l Link, a Addr) bool {
	// For IPv6 the kernel takes the address with the most leading bits in common with the destination
	// (RFC 6724, rule 8), which may be a virtual or a privacy address.
	from := func(r Reach) bool { return r.Link == l.Index && r.Source == a.IP }
	return a.IP.Is4() && (slices.ContainsFunc(s.facts.Peers, from) || slices.ContainsFunc(s.facts.Elsewhere, from))
}

// own returns the best usable address of family f on l.
func (s selector) own(l Link, f prefix.Family) (netip.Addr, error) {
	ips := s.usable(l, f)
	if len(ips) > 0 && !ips[0].IsLinkLocalUnicast() {
		return ips[0], nil
	}

	// For a second or two after every boot the global address is tentative, and only the link-local
	// one is usable.
	for _, a := range l.Addrs {
		if prefix.FamilyOf(a.IP) == f && a.IP.IsGlobalUnicast() && a.Tentative && !a.Duplicate {
			return netip.Addr{}, fmt.Errorf("%s: address %s is still tentative", l.Name, a.IP)
		}
	}
	if len(ips) == 0 {
		return netip.Addr{}, fmt.Errorf("%s has no usable %s address", l.Name, f)
	}
	return ips[0], nil
}
