// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// Select chooses the external interface. It tries Ifaces, IfaceRegexes and CanReach in
// this order and returns the first interface that has an address in every enabled family.
// If none of them is set, it takes the interface that has a public address, or else the
// interface of the default route. If one of them is set, the default route is no
// fallback. The error is a single line with everything that was tried, the reason of each
// failure, and the interfaces of the host.
func Select(f Facts, o Options) (Interface, error) {
	c, err := choose(f, o)
	return c.Interface, err
}

// choice is the result of choose. lastResort means that an address is link-local because
// the interface has no better one, not because an option named it.
type choice struct {
	Interface
	lastResort bool
}

func choose(f Facts, o Options) (choice, error) {
	if err := o.check(); err != nil {
		return choice{}, err
	}
	s := selector{f, o}
	var failed []string
	for _, a := range s.attempts() {
		c, err := s.try(a)
		if err == nil {
			if len(failed) > 0 {
				c.Reason += " (" + strings.Join(failed, "; ") + ")"
			}
			return c, nil
		}
		failed = append(failed, fmt.Sprintf("%s: %v", a.option, err))
	}
	return choice{}, fmt.Errorf("no external interface: %s; seen: %s", strings.Join(failed, "; "), f.seen())
}

type selector struct {
	facts Facts
	opts  Options
}

// attempt is one way to find the interface.
type attempt struct {
	option string
	find   func() (found, error)
}

// found is a link, with the addresses that the option selected. The reason of the choice is
// the option, followed by note.
type found struct {
	link  Link
	addrs []netip.Addr
	note  string
}

func (s selector) attempts() []attempt {
	if !s.opts.asksForInterface() {
		return []attempt{s.automatic()}
	}
	var as []attempt
	add := func(option, value string, find func(string) (found, error)) {
		if value != "" {
			as = append(as, attempt{option + " " + value, func() (found, error) { return find(value) }})
		}
	}
	for _, v := range s.opts.Ifaces {
		add("--iface", v, s.byIface)
	}
	for _, v := range s.opts.IfaceRegexes {
		add("--iface-regex", v, s.byRegex)
	}
	add("--iface-can-reach", s.opts.CanReach, s.byReach)
	return as
}

func (s selector) try(a attempt) (choice, error) {
	w, err := a.find()
	if err != nil {
		return choice{}, err
	}
	if w.link.MTU <= 0 {
		return choice{}, fmt.Errorf("%s has MTU %d", w.link.Name, w.link.MTU)
	}
	c := choice{Interface: Interface{Name: w.link.Name, Index: w.link.Index, MTU: w.link.MTU, Reason: a.option + w.note}}
	for _, fam := range s.opts.Families {
		addr, named, err := s.address(w, fam)
		if err != nil {
			return choice{}, err
		}
		c.Addrs = append(c.Addrs, addr)
		c.lastResort = c.lastResort || !named && addr.Local.IsLinkLocalUnicast()
	}
	return c, nil
}

// address returns the address of family f on the link that was found, or an error if the
// link has none that can be used. If this host has the public address, on any interface, it
// is also the local one: peers expect packets from that address. named means that an option
// determined the local address.
func (s selector) address(w found, f prefix.Family) (a Address, named bool, err error) {
	a.Public = s.opts.public(f).addr
	if a.Public.IsValid() && len(s.facts.linksWith(a.Public)) > 0 {
		a.Local = a.Public
	} else if i := slices.IndexFunc(w.addrs, func(ip netip.Addr) bool { return prefix.FamilyOf(ip) == f }); i >= 0 {
		a.Local = w.addrs[i]
	}
	named = a.Local.IsValid()
	if !named {
		a.Local, err = w.link.own(f, s.opts.InUse)
	} else {
		err = s.ready(a.Local)
	}
	if !a.Public.IsValid() {
		a.Public = a.Local
	}
	return a, named, err
}

// ready returns an error if the interfaces that have the address cannot use it yet. An
// address named by an option may be deprecated but not tentative, because packets cannot be
// sent from a tentative address.
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

// automatic returns the attempt for the case that no option selects an interface. The
// attempt finds the interface that has the public addresses of the options. If none of them
// is assigned on this host (1:1 NAT), or none is set, it finds the interface of the default
// route.
func (s selector) automatic() attempt {
	var local []named
	var foreign strings.Builder
	for _, f := range s.opts.Families {
		p := s.opts.public(f)
		switch {
		case !p.addr.IsValid():
		case len(s.facts.linksWith(p.addr)) > 0:
			local = append(local, p)
		default:
			fmt.Fprintf(&foreign, ", %s is not assigned here", p)
		}
	}
	if len(local) == 0 {
		return attempt{"default route", func() (found, error) {
			l, err := s.byDefault()
			return found{link: l, note: foreign.String()}, err
		}}
	}
	return attempt{local[0].String(), func() (found, error) {
		l, err := s.linkWithAll(local)
		return found{link: l, note: " is assigned here"}, err
	}}
}

// byIface finds an interface by its name or by one of its addresses.
func (s selector) byIface(value string) (found, error) {
	ip, err := parseAddr(value)
	if err != nil {
		i := slices.IndexFunc(s.facts.Links, func(l Link) bool { return l.Name == value })
		if i < 0 {
			return found{}, errors.New("no interface has this name")
		}
		return found{link: s.facts.Links[i]}, nil
	}
	f := prefix.FamilyOf(ip)
	if !slices.Contains(s.opts.Families, f) {
		return found{}, fmt.Errorf("%s is not enabled", f)
	}
	wants := []named{{"--iface", ip}}
	// In dual stack one interface must have both addresses, as in flannel: otherwise a
	// typing error would spread the families over two interfaces without a warning.
	if p := s.opts.public(prefix.IPv6); len(s.opts.Families) > 1 && p.addr.IsValid() && len(s.facts.linksWith(p.addr)) > 0 {
		wants = append(wants, p)
	}
	l, err := s.linkWithAll(wants)
	return found{link: l, addrs: []netip.Addr{ip}}, err
}

// parseAddr parses an address without a zone. It converts IPv4-mapped IPv6 addresses to
// IPv4.
func parseAddr(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err == nil && a.Zone() != "" {
		err = errors.New("has a zone")
	}
	return a.Unmap(), err
}

// linkWithAll returns the first link that has all the addresses. The error does not name the
// first address, because the caller puts that in front of the error.
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

// byRegex finds an interface by a regular expression. It prefers addresses over names: it
// compares names only if no interface has a matching address in every enabled family. The
// interface in use comes before all others, even if only its name matches. byRegex leaves out
// interfaces that lead to pods.
func (s selector) byRegex(expr string) (found, error) {
	re, err := regexp.Compile(expr)
	if err != nil {
		return found{}, err
	}
	links := s.inUseFirst(slices.DeleteFunc(slices.Clone(s.facts.Links), s.leadsToPods))
	if len(links) > 0 && links[0].Name == s.opts.InUse.Name {
		if w, ok := s.matches(re, links[:1]); ok {
			return w, nil
		}
	}
	if w, ok := s.matches(re, links); ok {
		return w, nil
	}
	if len(s.opts.Families) > 1 {
		return found{}, errors.New("no interface matches with both an IPv4 and an IPv6 address, nor by name")
	}
	return found{}, fmt.Errorf("no %s address and no interface name matches", s.opts.Families[0])
}

// matches returns the first link with a matching address in every enabled family, or else
// the first one with a matching name. ok is false if there is none.
func (s selector) matches(re *regexp.Regexp, links []Link) (w found, ok bool) {
	for _, l := range links {
		var hits []netip.Addr
		var texts []string
		for _, f := range s.opts.Families {
			ips := l.usable(f, s.opts.InUse)
			if i := slices.IndexFunc(ips, func(ip netip.Addr) bool { return re.MatchString(ip.String()) }); i >= 0 {
				hits, texts = append(hits, ips[i]), append(texts, ips[i].String())
			}
		}
		if len(hits) == len(s.opts.Families) {
			return found{link: l, addrs: hits, note: ": address " + strings.Join(texts, " and ")}, true
		}
	}
	for _, l := range links {
		if re.MatchString(l.Name) {
			return found{link: l, note: ": name " + l.Name}, true
		}
	}
	return found{}, false
}

// ownDevice matches the names of the devices that backends create.
var ownDevice = regexp.MustCompile(`^flannel(\d+|(-v6)?\.(\d+|ipip)|-wg(-.*)?)$`)

// leadsToPods reports whether l leads to pods instead of other hosts: flanneld's own device, or
// the bridge of the pods. Both may exist after a restart.
func (s selector) leadsToPods(l Link) bool {
	return ownDevice.MatchString(l.Name) || slices.ContainsFunc(l.Addrs, func(a Addr) bool {
		return slices.ContainsFunc(s.opts.Pods, func(p netip.Prefix) bool { return p.Contains(a.IP) })
	})
}

// byReach returns the interface and the source address of the route to an address. It
// leaves out the source address if keeps reports that the one in use must stay. For an
// address of this host the kernel reports lo; byReach then returns the interface that has
// the address. This case exists because all hosts may get the same option, and one of
// them has the address. If the interface leads to pods, byReach returns an error.
func (s selector) byReach(value string) (found, error) {
	ip, err := parseAddr(value)
	if err != nil {
		return found{}, errors.New("want an IP address")
	}
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
	if s.leadsToPods(w.link) {
		return found{}, fmt.Errorf("%s leads to pods", w.link.Name)
	}
	if source.IsValid() && !s.keeps(w.link, prefix.FamilyOf(source)) {
		w.addrs = []netip.Addr{source}
	}
	return w, nil
}

// keeps reports whether the best address of l is the one in use and not link-local, so that
// byReach must not replace it: the source that the kernel reports may be a virtual address
// that was added later.
func (s selector) keeps(l Link, f prefix.Family) bool {
	ips := l.usable(f, s.opts.InUse)
	return len(ips) > 0 && s.opts.InUse.uses(ips[0]) && !ips[0].IsLinkLocalUnicast()
}

// byDefault returns the interface that the default routes of all families share, or the
// best one of several. It returns an error if they share none.
func (s selector) byDefault() (Link, error) {
	var common []Link
	for i, f := range s.opts.Families {
		links, err := s.defaultLinks(f)
		if err != nil {
			return Link{}, err
		}
		if i > 0 {
			both := slices.DeleteFunc(slices.Clone(links), func(l Link) bool {
				return !slices.ContainsFunc(common, func(c Link) bool { return c.Index == l.Index })
			})
			if len(both) == 0 {
				return Link{}, fmt.Errorf("%s leaves by %s, but %s by %s: want one interface for both, name it with --iface",
					s.opts.Families[0], linkNames(common), f, linkNames(links))
			}
			links = both
		}
		common = links
	}
	return s.best(common), nil
}

func linkNames(links []Link) string {
	names := make([]string, len(links))
	for i, l := range links {
		names[i] = l.Name
	}
	return strings.Join(names, " and ")
}

// defaultLinks returns the interfaces of the default route of family f. If there are
// several routes it takes the one with the lowest metric, because the kernel uses that
// one. flannel takes the first one of the dump, which has the lowest metric too, and
// refuses multipath routes. If there is no route, or none of its interfaces is known,
// defaultLinks returns an error.
func (s selector) defaultLinks(f prefix.Family) (links []Link, err error) {
	var route *DefaultRoute
	for i, r := range s.facts.Defaults {
		if r.Family == f && (route == nil || r.Metric < route.Metric) {
			route = &s.facts.Defaults[i]
		}
	}
	if route == nil {
		return nil, fmt.Errorf("no %s default route in the main table", f)
	}
	if len(route.Links) == 0 {
		return nil, fmt.Errorf("could not determine the interface of the %s default route, name it with --iface", f)
	}
	for _, index := range route.Links {
		l, e := s.facts.link(index)
		if e != nil {
			err = e
			continue
		}
		links = append(links, l)
	}
	if len(links) == 0 {
		return nil, err
	}
	return links, nil
}

// best returns the first link that is up, has a carrier, and has global addresses in all
// families. If there is no such link, link-local addresses are sufficient. If no link has
// these either, best returns the first link. Among equally good links it prefers the one in
// use.
func (s selector) best(links []Link) Link {
	const global, linkLocal, nothing = 0, 1, 2
	grade := func(l Link) int {
		worst := global
		for _, f := range s.opts.Families {
			ips := l.usable(f, s.opts.InUse)
			switch {
			case len(ips) == 0 || !l.Up || !l.Running:
				return nothing
			case ips[0].IsLinkLocalUnicast():
				worst = linkLocal
			}
		}
		return worst
	}
	return slices.MinFunc(s.inUseFirst(links), func(a, b Link) int { return grade(a) - grade(b) })
}

// inUseFirst returns links, with the link in use at the front if that is up and has a
// carrier. It does not change links.
func (s selector) inUseFirst(links []Link) []Link {
	i := slices.IndexFunc(links, func(l Link) bool { return l.Name == s.opts.InUse.Name && l.Up && l.Running })
	if i < 0 {
		return links
	}
	return slices.Concat(links[i:i+1], links[:i], links[i+1:])
}
