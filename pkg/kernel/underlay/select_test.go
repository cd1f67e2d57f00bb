// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

var (
	v4   = []prefix.Family{prefix.IPv4}
	v6   = []prefix.Family{prefix.IPv6}
	dual = []prefix.Family{prefix.IPv4, prefix.IPv6}
)

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

// link returns a link with addresses such as "10.0.0.1" or, with flags, "10.0.0.1
// deprecated temporary". Addresses are permanent unless they have the flag "dynamic".
func link(index int, name string, addrs ...string) Link {
	l := Link{Name: name, Index: index, MTU: 1500, Up: true, Running: true}
	for _, text := range addrs {
		words := strings.Fields(text)
		a := Addr{IP: ip(words[0]), Permanent: true}
		a.Network, _ = a.IP.Prefix(a.IP.BitLen() * 3 / 4)
		for _, w := range words[1:] {
			switch w {
			case "dynamic":
				a.Permanent = false
			case "temporary", "secondary":
				a.Temporary = true
			case "single":
				a.Network = prefix.Host(a.IP)
			case "deprecated":
				a.Deprecated = true
			case "tentative":
				a.Tentative = true
			case "duplicate":
				a.Tentative, a.Duplicate = true, true
			}
		}
		l.Addrs = append(l.Addrs, a)
	}
	return l
}

func defaultRoute(f prefix.Family, metric int, links ...int) DefaultRoute {
	return DefaultRoute{Family: f, Links: links, Metric: metric}
}

func nodeIPs(families []prefix.Family, addrs ...string) Options {
	o := Options{Families: families, Ifaces: []string{NodeIP}}
	o.NodeIPs = func() (all []netip.Addr) {
		for _, a := range addrs {
			all = append(all, ip(a))
		}
		return all
	}
	return o
}

// host returns the facts of a host with four network cards, each with several addresses of
// each family.
func host() Facts {
	return Facts{
		Links: []Link{
			link(1, "lo", "127.0.0.1", "::1"),
			link(2, "eth0", "192.168.0.2", "192.168.0.3 secondary", "192.168.0.4 deprecated",
				"fe80::2", "2001:db8::2 deprecated", "2001:db8::3 dynamic temporary", "2001:db8::4 dynamic"),
			link(3, "eth1", "169.254.3.1", "10.1.0.3 secondary", "10.1.0.2",
				"fe80::3", "fd01::4 dynamic", "fd01::3"),
			link(4, "eth2", "10.2.0.4 dynamic", "10.2.0.3 secondary", "10.2.0.2",
				"fd02::2 tentative", "fd02::3 duplicate", "fe80::4"),
			link(5, "net-10", "10.3.0.2 deprecated", "10.3.0.3 deprecated", "169.254.5.5",
				"fe80::5", "fe80::6 deprecated", "fe80::7 duplicate"),
		},
		Defaults: []DefaultRoute{defaultRoute(prefix.IPv4, 100, 2), defaultRoute(prefix.IPv6, 1024, 2)},
		Reach:    Reach{Failure: "look up route: network is unreachable"},
	}
}

func with(change func(*Facts)) Facts {
	f := host()
	change(&f)
	return f
}

func defaults(rs ...DefaultRoute) Facts {
	return with(func(f *Facts) { f.Defaults = rs })
}

func reach(link int, src string) Facts {
	return with(func(f *Facts) {
		f.Reach = Reach{Link: link}
		if src != "" {
			f.Reach.Source = ip(src)
		}
	})
}

// show returns an Interface in the form "name local[>public]... | reason".
func show(i Interface) string {
	var b strings.Builder
	b.WriteString(i.Name)
	for _, a := range i.Addrs {
		fmt.Fprintf(&b, " %s", a.Local)
		if a.Public != a.Local {
			fmt.Fprintf(&b, ">%s", a.Public)
		}
	}
	return b.String() + " | " + i.Reason
}

func TestSelect(t *testing.T) {
	ifaces := func(f []prefix.Family, values ...string) Options { return Options{Families: f, Ifaces: values} }
	regexes := func(f []prefix.Family, values ...string) Options { return Options{Families: f, IfaceRegexes: values} }
	canReach := func(f []prefix.Family, value string) Options { return Options{Families: f, CanReach: value} }
	public := func(o Options, addrs ...string) Options {
		for _, a := range addrs {
			if ip(a).Is4() {
				o.PublicIP = ip(a)
			} else {
				o.PublicIPv6 = ip(a)
			}
		}
		return o
	}
	inUse := func(o Options, addr string) Options {
		o.InUse.Addrs = []Address{{Local: ip(addr)}}
		return o
	}
	none := func(f []prefix.Family) Options { return Options{Families: f} }

	for name, tt := range map[string]struct {
		facts Facts
		opts  Options
		want  string
		fails string // the error up to "; seen:"
	}{
		// --iface with an address
		"v4 address":                      {host(), ifaces(v4, "10.1.0.2"), "eth1 10.1.0.2 | --iface 10.1.0.2", ""},
		"v4 address not the first":        {host(), ifaces(v4, "10.1.0.3"), "eth1 10.1.0.3 | --iface 10.1.0.3", ""},
		"v4 address deprecated":           {host(), ifaces(v4, "192.168.0.4"), "eth0 192.168.0.4 | --iface 192.168.0.4", ""},
		"v4 address mapped":               {host(), ifaces(v4, "::ffff:10.1.0.2"), "eth1 10.1.0.2 | --iface ::ffff:10.1.0.2", ""},
		"v4 address of loopback":          {host(), ifaces(v4, "127.0.0.1"), "lo 127.0.0.1 | --iface 127.0.0.1", ""},
		"v4 address absent":               {host(), ifaces(v4, "10.9.9.9"), "", "--iface 10.9.9.9: not assigned to any interface"},
		"v4 address in v6":                {host(), ifaces(v6, "10.1.0.2"), "", "--iface 10.1.0.2: IPv4 is not enabled"},
		"v6 address in v4":                {host(), ifaces(v4, "fd01::3"), "", "--iface fd01::3: IPv6 is not enabled"},
		"v6 address":                      {host(), ifaces(v6, "fd01::4"), "eth1 fd01::4 | --iface fd01::4", ""},
		"v6 address link-local":           {host(), ifaces(v6, "fe80::3"), "eth1 fe80::3 | --iface fe80::3", ""},
		"v6 address tentative":            {host(), ifaces(v6, "fd02::2"), "", "--iface fd02::2: eth2: address fd02::2 is still tentative"},
		"v6 address duplicate":            {host(), ifaces(v6, "fd02::3"), "", "--iface fd02::3: eth2: another host has address fd02::3 (duplicate address detection failed)"},
		"v6 address with zone":            {host(), ifaces(v6, "fe80::3%eth1"), "", "--iface fe80::3%eth1: no interface has this name"},
		"v4 address in dual":              {host(), ifaces(dual, "10.1.0.3"), "eth1 10.1.0.3 fd01::3 | --iface 10.1.0.3", ""},
		"both addresses in dual":          {host(), ifaces(dual, "10.1.0.3,fd01::4"), "eth1 10.1.0.3 fd01::4 | --iface 10.1.0.3,fd01::4", ""},
		"both addresses in v6":            {host(), ifaces(v6, "10.1.0.3,fd01::4"), "eth1 fd01::4 | --iface 10.1.0.3,fd01::4", ""},
		"both addresses apart":            {host(), ifaces(dual, "10.1.0.3,2001:db8::4"), "", "--iface 10.1.0.3,2001:db8::4: is on eth1, but --iface 2001:db8::4 is on eth0, want one interface for both"},
		"v6 address in dual":              {host(), ifaces(dual, "fd01::4"), "eth1 10.1.0.2 fd01::4 | --iface fd01::4", ""},
		"v4 address in dual lacks v6":     {host(), ifaces(dual, "127.0.0.1"), "", "--iface 127.0.0.1: lo has no usable IPv6 address"},
		"dual, public v6 there":           {host(), public(ifaces(dual, "10.1.0.2"), "fd01::4"), "eth1 10.1.0.2 fd01::4 | --iface 10.1.0.2", ""},
		"dual, public v6 elsewhere":       {host(), public(ifaces(dual, "10.1.0.2"), "2001:db8::4"), "", "--iface 10.1.0.2: is on eth1, but --public-ipv6 2001:db8::4 is on eth0, want one interface for both"},
		"dual v6, public v6 elsewhere":    {host(), public(ifaces(dual, "fd01::3"), "2001:db8::4"), "", "--iface fd01::3: is on eth1, but --public-ipv6 2001:db8::4 is on eth0, want one interface for both"},
		"dual v6, public v6 foreign":      {host(), public(ifaces(dual, "fd01::3"), "2001:db8:9::1"), "eth1 10.1.0.2 fd01::3>2001:db8:9::1 | --iface fd01::3", ""},
		"dual absent, public v6 there":    {host(), public(ifaces(dual, "10.9.9.9"), "fd01::3"), "", "--iface 10.9.9.9: not assigned to any interface"},
		"dual by name, public v6 another": {host(), public(ifaces(dual, "eth1"), "2001:db8::4"), "eth1 10.1.0.2 2001:db8::4 | --iface eth1", ""},

		"v6 only, public v6 elsewhere": {host(), public(ifaces(v6, "fd01::3"), "2001:db8::4"), "eth1 2001:db8::4 | --iface fd01::3", ""},
		"v4 only, public v6 elsewhere": {host(), public(ifaces(v4, "10.1.0.2"), "2001:db8::4"), "eth1 10.1.0.2 | --iface 10.1.0.2", ""},

		// --iface with a name: the best usable address of each family
		"name, v4 permanent first": {host(), ifaces(v4, "eth1"), "eth1 10.1.0.2 | --iface eth1", ""},
		"name, v4 order":           {host(), ifaces(v4, "eth2"), "eth2 10.2.0.2 | --iface eth2", ""},
		"name, v4 link-local":      {host(), ifaces(v4, "net-10"), "net-10 169.254.5.5 | --iface net-10", ""},
		"name, v6 not temporary":   {host(), ifaces(v6, "eth0"), "eth0 2001:db8::4 | --iface eth0", ""},
		"name, v6 permanent":       {host(), ifaces(v6, "eth1"), "eth1 fd01::3 | --iface eth1", ""},
		"name, v6 tentative":       {host(), ifaces(v6, "eth2"), "", "--iface eth2: eth2: address fd02::2 is still tentative"},
		"name, v6 link-local":      {host(), ifaces(v6, "net-10"), "net-10 fe80::5 | --iface net-10", ""},
		"name, dual":               {host(), ifaces(dual, "eth0"), "eth0 192.168.0.2 2001:db8::4 | --iface eth0", ""},
		"name, no usable address":  {host(), ifaces(v4, "lo"), "", "--iface lo: lo has no usable IPv4 address"},
		"name unknown":             {host(), ifaces(v4, "eth9"), "", "--iface eth9: no interface has this name"},
		"name, MTU 0":              {with(func(f *Facts) { f.Links[2].MTU = 0 }), ifaces(v4, "eth1"), "", "--iface eth1: eth1 has MTU 0"},
		"name, no hope in a duplicate": {with(func(f *Facts) { f.Links[1].Addrs = link(2, "", "fd00::1 duplicate", "fe80::1").Addrs }), ifaces(v6, "eth0"),
			"eth0 fe80::1 | --iface eth0", ""},
		"name, only temporary": {with(func(f *Facts) { f.Links[1].Addrs = link(2, "", "2001:db8::3 dynamic temporary").Addrs }), ifaces(v6, "eth0"),
			"eth0 2001:db8::3 | --iface eth0", ""},
		"name, temporary before link-local": {with(func(f *Facts) { f.Links[1].Addrs = link(2, "", "fe80::1", "fd00::3 dynamic temporary").Addrs }), ifaces(v6, "eth0"),
			"eth0 fd00::3 | --iface eth0", ""},
		"name, permanent temporary before dynamic": {with(func(f *Facts) { f.Links[1].Addrs = link(2, "", "10.0.0.1 dynamic", "10.0.0.2 secondary").Addrs }), ifaces(v4, "eth0"),
			"eth0 10.0.0.2 | --iface eth0", ""},
		"name, v4 link-local beside a tentative v6": {with(func(f *Facts) { f.Links[1].Addrs = link(2, "", "169.254.3.1", "fd01::4 tentative").Addrs }), ifaces(v4, "eth0"),
			"eth0 169.254.3.1 | --iface eth0", ""},
		"name, only a tentative link-local address": {with(func(f *Facts) { f.Links[1].Addrs = link(2, "", "fe80::4 tentative").Addrs }), ifaces(v6, "eth0"), "",
			"--iface eth0: eth0 has no usable IPv6 address"},
		"name, the source on another link": {with(func(f *Facts) {
			f.Links[3].Addrs = f.Links[2].Addrs
			f.Peers = []Reach{{Link: 4, Source: ip("10.1.0.3")}}
		}), ifaces(v4, "eth1"), "eth1 10.1.0.2 | --iface eth1", ""},
		"loopback, peers through an unknown link": {with(func(f *Facts) { f.Peers = []Reach{{Link: 77}} }), ifaces(v4, "127.0.0.1"), "lo 127.0.0.1 | --iface 127.0.0.1", ""},

		// several options for the interface
		"iface order": {host(), ifaces(v4, "eth2", "eth1"), "eth2 10.2.0.2 | --iface eth2", ""},
		"iface failing first": {host(), ifaces(v4, "eth9", "lo", "eth1"),
			"eth1 10.1.0.2 | --iface eth1 (--iface eth9: no interface has this name; --iface lo: lo has no usable IPv4 address)", ""},
		"iface before regex before reach": {reach(5, ""), Options{Families: v4, Ifaces: []string{"eth2"}, IfaceRegexes: []string{"eth1"}, CanReach: "10.99.0.1"},
			"eth2 10.2.0.2 | --iface eth2", ""},
		"regex before reach": {reach(5, ""), Options{Families: v4, Ifaces: []string{"x"}, IfaceRegexes: []string{"eth1"}, CanReach: "10.99.0.1"},
			"eth1 10.1.0.2 | --iface-regex eth1: name eth1 (--iface x: no interface has this name)", ""},
		"reach last": {reach(2, "192.168.0.3"), Options{Families: v4, Ifaces: []string{"x"}, IfaceRegexes: []string{"("}, CanReach: "10.99.0.1"},
			"eth0 192.168.0.3 | --iface-can-reach 10.99.0.1 (--iface x: no interface has this name; --iface-regex (: error parsing regexp: missing closing ): `(`)", ""},
		"no fallback to the default route": {host(), Options{Families: v4, Ifaces: []string{"x"}, IfaceRegexes: []string{"^y"}, CanReach: "10.99.0.1"}, "",
			"--iface x: no interface has this name; --iface-regex ^y: no IPv4 address and no interface name matches; --iface-can-reach 10.99.0.1: look up route: network is unreachable"},
		"no fallback to a public address": {host(), public(ifaces(v4, "x"), "10.1.0.2"), "", "--iface x: no interface has this name"},
		"empty values are not given": {host(), Options{Families: v4, Ifaces: []string{""}, IfaceRegexes: []string{""}},
			"eth0 192.168.0.2 | default route", ""},

		// --iface-regex
		"regex v4 address":               {host(), regexes(v4, `^10\.`), "eth1 10.1.0.2 | --iface-regex ^10\\.: address 10.1.0.2", ""},
		"regex v4 later address":         {host(), regexes(v4, `\.0\.4$`), "eth2 10.2.0.4 | --iface-regex \\.0\\.4$: address 10.2.0.4", ""},
		"regex address before name":      {host(), regexes(v4, `10`), "eth1 10.1.0.2 | --iface-regex 10: address 10.1.0.2", ""},
		"regex not deprecated":           {host(), regexes(v4, `^10\.3\.`), "", "--iface-regex ^10\\.3\\.: no IPv4 address and no interface name matches"},
		"regex name":                     {host(), regexes(v4, `^net`), "net-10 169.254.5.5 | --iface-regex ^net: name net-10", ""},
		"regex name unanchored, first":   {host(), regexes(v4, `th`), "eth0 192.168.0.2 | --iface-regex th: name eth0", ""},
		"regex name without address":     {host(), regexes(v4, `^lo$`), "", "--iface-regex ^lo$: lo has no usable IPv4 address"},
		"regex v6 address":               {host(), regexes(v6, `^fd`), "eth1 fd01::3 | --iface-regex ^fd: address fd01::3", ""},
		"regex v6 ignores v4":            {host(), regexes(v6, `^10\.`), "", "--iface-regex ^10\\.: no IPv6 address and no interface name matches"},
		"regex dual":                     {host(), regexes(dual, `^(10\.|fd)`), "eth1 10.1.0.2 fd01::3 | --iface-regex ^(10\\.|fd): address 10.1.0.2 and fd01::3", ""},
		"regex dual skips half a match":  {host(), regexes(dual, `^192\.|^10\.1|^fd01`), "eth1 10.1.0.2 fd01::3 | --iface-regex ^192\\.|^10\\.1|^fd01: address 10.1.0.2 and fd01::3", ""},
		"regex dual by one family":       {host(), regexes(dual, `^192\.`), "eth0 192.168.0.2 2001:db8::4 | --iface-regex ^192\\.: address 192.168.0.2", ""},
		"regex dual, half of two":        {host(), regexes(dual, `^192\.|^10\.1`), "eth0 192.168.0.2 2001:db8::4 | --iface-regex ^192\\.|^10\\.1: address 192.168.0.2", ""},
		"regex dual lacks a family":      {host(), regexes(dual, `^10\.2`), "", "--iface-regex ^10\\.2: eth2: address fd02::2 is still tentative"},
		"regex dual name":                {host(), regexes(dual, `1$`), "eth1 10.1.0.2 fd01::3 | --iface-regex 1$: name eth1", ""},
		"regex dual, no match":           {host(), regexes(dual, `^x`), "", "--iface-regex ^x: no interface with an IPv4 and an IPv6 address matches"},
		"regex bad":                      {host(), regexes(v4, `[`), "", "--iface-regex [: error parsing regexp: missing closing ]: `[`"},
		"regex bad, then good":           {host(), regexes(v4, `[`, `eth2`), "eth2 10.2.0.2 | --iface-regex eth2: name eth2 (--iface-regex [: error parsing regexp: missing closing ]: `[`)", ""},
		"regex order of options":         {host(), regexes(v4, `eth2`, `^192`), "eth2 10.2.0.2 | --iface-regex eth2: name eth2", ""},
		"regex address with public NAT":  {host(), public(regexes(v4, `\.0\.4$`), "1.2.3.4"), "eth2 10.2.0.4>1.2.3.4 | --iface-regex \\.0\\.4$: address 10.2.0.4", ""},
		"regex address with public here": {host(), public(regexes(v4, `^10\.2`), "10.2.0.3"), "eth2 10.2.0.3 | --iface-regex ^10\\.2: address 10.2.0.2", ""},

		// --iface-can-reach
		"reach v4":               {reach(3, "10.1.0.3"), canReach(v4, "10.99.0.1"), "eth1 10.1.0.3 | --iface-can-reach 10.99.0.1", ""},
		"reach v4, no source":    {reach(3, ""), canReach(v4, "10.99.0.1"), "eth1 10.1.0.2 | --iface-can-reach 10.99.0.1", ""},
		"reach v4 in dual":       {reach(3, "10.1.0.3"), canReach(dual, "10.99.0.1"), "eth1 10.1.0.3 fd01::3 | --iface-can-reach 10.99.0.1", ""},
		"reach v6":               {reach(3, "fd01::4"), canReach(v6, "fd99::1"), "eth1 fd01::4 | --iface-can-reach fd99::1", ""},
		"reach v6 in dual":       {reach(3, "fd01::4"), canReach(dual, "fd99::1"), "eth1 10.1.0.2 fd01::4 | --iface-can-reach fd99::1", ""},
		"reach v6 in v4":         {reach(3, "fd01::4"), canReach(v4, "fd99::1"), "eth1 10.1.0.2 | --iface-can-reach fd99::1", ""},
		"reach no address":       {host(), canReach(v4, "gateway"), "", "--iface-can-reach gateway: want an IP address"},
		"reach no route":         {host(), canReach(v4, "10.99.0.1"), "", "--iface-can-reach 10.99.0.1: look up route: network is unreachable"},
		"reach unknown link":     {reach(77, ""), canReach(v4, "10.99.0.1"), "", "--iface-can-reach 10.99.0.1: no interface with index 77"},
		"reach ourselves":        {reach(1, "10.1.0.3"), canReach(v4, "10.1.0.3"), "eth1 10.1.0.3 | --iface-can-reach 10.1.0.3 is assigned here", ""},
		"reach with public NAT":  {reach(3, "10.1.0.3"), public(canReach(v4, "10.99.0.1"), "1.2.3.4"), "eth1 10.1.0.3>1.2.3.4 | --iface-can-reach 10.99.0.1", ""},
		"reach tentative source": {reach(4, "fd02::2"), canReach(v6, "fd99::1"), "", "--iface-can-reach fd99::1: eth2: address fd02::2 is still tentative"},
		"reach tentative source alone": {with(func(f *Facts) {
			f.Links[3].Addrs = link(4, "", "fd02::2 tentative").Addrs
			f.Reach = Reach{Link: 4, Source: ip("fd02::2")}
		}), canReach(v6, "fd99::1"), "", "--iface-can-reach fd99::1: eth2: address fd02::2 is still tentative"},
		"reach, peers elsewhere": {with(func(f *Facts) {
			f.Peers = []Reach{{Link: 2}}
			f.Reach = Reach{Link: 3, Source: ip("10.1.0.3")}
		}), canReach(v4, "10.99.0.1"), "eth1 10.1.0.3 | --iface-can-reach 10.99.0.1", ""},

		// default route
		"default v4":                    {host(), none(v4), "eth0 192.168.0.2 | default route", ""},
		"default v6":                    {host(), none(v6), "eth0 2001:db8::4 | default route", ""},
		"default dual":                  {host(), none(dual), "eth0 192.168.0.2 2001:db8::4 | default route", ""},
		"default lowest metric":         {defaults(defaultRoute(prefix.IPv4, 200, 2), defaultRoute(prefix.IPv4, 100, 3)), none(v4), "eth1 10.1.0.2 | default route", ""},
		"default equal metrics":         {defaults(defaultRoute(prefix.IPv4, 100, 4), defaultRoute(prefix.IPv4, 100, 3)), none(v4), "eth2 10.2.0.2 | default route", ""},
		"default of the family":         {defaults(defaultRoute(prefix.IPv6, 1, 3), defaultRoute(prefix.IPv4, 100, 2)), none(v4), "eth0 192.168.0.2 | default route", ""},
		"default multipath":             {defaults(defaultRoute(prefix.IPv4, 500, 4), defaultRoute(prefix.IPv4, 0, 3, 2)), none(v4), "eth1 10.1.0.2 | default route", ""},
		"default multipath, down":       {with(func(f *Facts) { f.Defaults[0].Links, f.Links[2].Up = []int{3, 2}, false }), none(v4), "eth0 192.168.0.2 | default route", ""},
		"default multipath, no carrier": {with(func(f *Facts) { f.Defaults[0].Links, f.Links[2].Running = []int{3, 2}, false }), none(v4), "eth0 192.168.0.2 | default route", ""},
		"default multipath, no address": {defaults(defaultRoute(prefix.IPv4, 0, 1, 77, 2)), none(v4), "eth0 192.168.0.2 | default route", ""},
		"default multipath, none":       {defaults(defaultRoute(prefix.IPv4, 0, 1, 77)), none(v4), "", "default route: lo has no usable IPv4 address"},
		"default without a link":        {defaults(defaultRoute(prefix.IPv4, 0), defaultRoute(prefix.IPv4, 500, 4)), none(v4), "eth2 10.2.0.2 | default route", ""},
		"default without a link, no carrier": {with(func(f *Facts) {
			f.Defaults = []DefaultRoute{defaultRoute(prefix.IPv4, 0), defaultRoute(prefix.IPv4, 500, 4)}
			f.Links[3].Running = false
		}), none(v4), "eth2 10.2.0.2 | default route", ""},
		"peers, another address on lo": {with(func(f *Facts) {
			f.Defaults = nil
			f.Links[0].Addrs = link(1, "", "10.9.9.9 single").Addrs
			f.Peers = []Reach{{Link: 2, Source: ip("192.168.0.2")}}
		}), none(v4), "eth0 192.168.0.2 | route to other hosts", ""},
		"default absent":         {defaults(), none(v4), "", "default route: no IPv4 default route in the main table"},
		"default half":           {defaults(defaultRoute(prefix.IPv4, 0, 2)), none(dual), "", "default route: no IPv6 default route in the main table"},
		"default split":          {defaults(defaultRoute(prefix.IPv4, 0, 2), defaultRoute(prefix.IPv6, 0, 3)), none(dual), "", "default route: IPv4 leaves by eth0, but IPv6 leaves by eth1: want one interface for both, name it with --iface"},
		"default link gone":      {defaults(defaultRoute(prefix.IPv4, 0, 77)), none(v4), "", "default route: no IPv4 default route in the main table"},
		"default no address":     {defaults(defaultRoute(prefix.IPv4, 0, 1)), none(v4), "", "default route: lo has no usable IPv4 address"},
		"default v6 last resort": {defaults(defaultRoute(prefix.IPv6, 0, 5)), none(v6), "net-10 fe80::5 | default route", ""},

		// --public-ip without an interface option
		"public v4 here":                {host(), public(none(v4), "10.1.0.3"), "eth1 10.1.0.3 | --public-ip 10.1.0.3 is assigned here", ""},
		"public v4 NAT":                 {host(), public(none(v4), "1.2.3.4"), "eth0 192.168.0.2>1.2.3.4 | default route, --public-ip 1.2.3.4 is not assigned here", ""},
		"public v4 NAT, no route":       {defaults(), public(none(v4), "1.2.3.4"), "", "default route: no IPv4 default route in the main table"},
		"public v6 here":                {host(), public(none(v6), "fd01::4"), "eth1 fd01::4 | --public-ipv6 fd01::4 is assigned here", ""},
		"public v6 tentative":           {host(), public(none(v6), "fd02::2"), "", "--public-ipv6 fd02::2: eth2: address fd02::2 is still tentative"},
		"public v6 NAT":                 {host(), public(none(v6), "2001:db8:9::1"), "eth0 2001:db8::4>2001:db8:9::1 | default route, --public-ipv6 2001:db8:9::1 is not assigned here", ""},
		"public dual here":              {host(), public(none(dual), "10.1.0.3", "fd01::4"), "eth1 10.1.0.3 fd01::4 | --public-ip 10.1.0.3 is assigned here", ""},
		"public dual apart":             {host(), public(none(dual), "10.1.0.3", "2001:db8::4"), "", "--public-ip 10.1.0.3: is on eth1, but --public-ipv6 2001:db8::4 is on eth0, want one interface for both"},
		"public dual v4 NAT":            {host(), public(none(dual), "1.2.3.4", "fd01::4"), "eth1 10.1.0.2>1.2.3.4 fd01::4 | --public-ipv6 fd01::4 is assigned here", ""},
		"public dual both NAT":          {host(), public(none(dual), "1.2.3.4", "2001:db8:9::1"), "eth0 192.168.0.2>1.2.3.4 2001:db8::4>2001:db8:9::1 | default route, --public-ip 1.2.3.4 is not assigned here, --public-ipv6 2001:db8:9::1 is not assigned here", ""},
		"public v4 here lacks v6":       {host(), public(none(dual), "127.0.0.1"), "", "--public-ip 127.0.0.1: lo has no usable IPv6 address"},
		"public of disabled family":     {host(), public(none(v6), "10.1.0.3"), "eth0 2001:db8::4 | default route", ""},
		"public v6 in v4 has no effect": {host(), public(none(v4), "fd01::3"), "eth0 192.168.0.2 | default route", ""},

		// --public-ip with an interface option
		"iface, public NAT":            {host(), public(ifaces(v4, "eth1"), "1.2.3.4"), "eth1 10.1.0.2>1.2.3.4 | --iface eth1", ""},
		"iface, public on it":          {host(), public(ifaces(v4, "eth1"), "10.1.0.3"), "eth1 10.1.0.3 | --iface eth1", ""},
		"iface, public elsewhere":      {host(), public(ifaces(v4, "eth1"), "10.2.0.4"), "eth1 10.2.0.4 | --iface eth1", ""},
		"iface address, public NAT":    {host(), public(ifaces(v4, "10.1.0.3"), "1.2.3.4"), "eth1 10.1.0.3>1.2.3.4 | --iface 10.1.0.3", ""},
		"iface address, public local":  {host(), public(ifaces(v4, "10.1.0.3"), "10.1.0.2"), "eth1 10.1.0.2 | --iface 10.1.0.3", ""},
		"node-ip":                      {host(), nodeIPs(dual, "10.1.0.3", "fd01::4"), "eth1 10.1.0.3 fd01::4 | --iface node-ip 10.1.0.3,fd01::4", ""},
		"node-ip, not known":           {host(), nodeIPs(v4), "", "--iface node-ip: the InternalIP of the Node is not known"},
		"node-ip, never known":         {host(), Options{Families: v4, Ifaces: []string{NodeIP}}, "", "--iface node-ip: the InternalIP of the Node is not known"},
		"node-ip, not known yet":       {host(), inUse(nodeIPs(v4), "10.1.0.3"), "eth1 10.1.0.3 | --iface node-ip 10.1.0.3", ""},
		"node-ip, another than in use": {host(), inUse(nodeIPs(v4, "10.1.0.2"), "10.1.0.3"), "eth1 10.1.0.2 | --iface node-ip 10.1.0.2", ""},
		"node-ip of another host":      {host(), nodeIPs(v4, "10.99.0.1"), "", "--iface node-ip: not assigned to any interface"},
		"iface without own address":    {with(func(f *Facts) { f.Links[2].Addrs = nil }), public(ifaces(v4, "eth1"), "1.2.3.4"), "", "--iface eth1: eth1 has no usable IPv4 address"},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := choose(tt.facts, tt.opts)
			got := c.Interface
			if tt.fails != "" {
				want := "no external interface: " + tt.fails + "; seen: "
				if err == nil || !strings.HasPrefix(err.Error(), want) {
					t.Fatalf("got %s, error %v\nwant error %s...", show(got), err, want)
				}
				if strings.Contains(err.Error(), "\n") {
					t.Errorf("error of several lines: %v", err)
				}
				if diff := cmp.Diff(Interface{}, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
					t.Errorf("interface with an error (-want +got):\n%s", diff)
				}
				return
			}
			if err != nil {
				t.Fatalf("got error %v\nwant %s", err, tt.want)
			}
			if show(got) != tt.want {
				t.Errorf("\n got %s\nwant %s", show(got), tt.want)
			}
			if got.MTU != 1500 || tt.facts.Links[got.Index-1].Name != got.Name {
				t.Errorf("got index %d, MTU %d for %s", got.Index, got.MTU, got.Name)
			}
		})
	}
}

// TestSelectVirtualAddress checks that Select takes a virtual address, which may move to another host,
// only if there is no other global address, or only a privacy address.
func TestSelectVirtualAddress(t *testing.T) {
	for name, tt := range map[string]struct {
		addrs []string
		want  string
	}{
		"beside DHCP":                     {[]string{"10.1.0.2 dynamic", "10.1.0.10 single"}, "10.1.0.2"},
		"beside a single one of DHCP":     {[]string{"10.1.0.10 single", "10.1.0.2 dynamic single"}, "10.1.0.2"},
		"newest of IPv6":                  {[]string{"fd01::10 single", "fd01::2"}, "fd01::2"},
		"beside a router's advertisement": {[]string{"fd01::10 single", "fd01::2 dynamic"}, "fd01::2"},
		"alone":                           {[]string{"10.1.0.2 single"}, "10.1.0.2"},
		"beside another":                  {[]string{"10.1.0.2 single", "10.1.0.10 single"}, "10.1.0.2"},
		"beside link-local":               {[]string{"fe80::2", "fd01::2 single"}, "fd01::2"},
		"beside a privacy address":        {[]string{"fd01::3 dynamic temporary", "fd01::2 single"}, "fd01::2"},
	} {
		t.Run(name, func(t *testing.T) {
			f := Facts{Links: []Link{link(1, "eth0", tt.addrs...)}}
			o := Options{Families: []prefix.Family{prefix.FamilyOf(ip(tt.want))}, Ifaces: []string{"eth0"}}
			if got, err := choose(f, o); err != nil || got.Addrs[0].Local != ip(tt.want) {
				t.Errorf("got %s, error %v; want %s", show(got.Interface), err, tt.want)
			}
		})
	}
}

// TestSelectKeepsAddressInUse checks that the address in use stays although another one ranks
// higher. The other one must be taken if an option names it, or if the address in use is not
// usable any more or is only link-local.
func TestSelectKeepsAddressInUse(t *testing.T) {
	for name, tt := range map[string]struct {
		inUse string
		addrs []string // addresses of d1
		opts  Options
		reach string
		want  string
	}{
		"a better one":                {"10.1.0.2", []string{"10.1.0.2 dynamic", "10.1.0.10"}, Options{Ifaces: []string{"d1"}}, "", "10.1.0.2"},
		"a newer one":                 {"fd01::2", []string{"fd01::10", "fd01::2"}, Options{Ifaces: []string{"d1"}}, "", "fd01::2"},
		"by the default route":        {"10.1.0.2", []string{"10.1.0.10", "10.1.0.2"}, Options{}, "", "10.1.0.2"},
		"virtual itself":              {"10.1.0.10", []string{"10.1.0.2", "10.1.0.10 single"}, Options{}, "", "10.1.0.10"},
		"deprecated":                  {"10.1.0.2", []string{"10.1.0.2 deprecated", "10.1.0.10"}, Options{}, "", "10.1.0.10"},
		"tentative":                   {"fd01::2", []string{"fd01::2 tentative", "fd01::10"}, Options{}, "", "fd01::10"},
		"gone":                        {"10.1.0.2", []string{"10.1.0.10"}, Options{}, "", "10.1.0.10"},
		"link-local":                  {"fe80::2", []string{"fe80::2", "fd01::10"}, Options{}, "", "fd01::10"},
		"link-local beside another":   {"fe80::2", []string{"fe80::1", "fe80::2"}, Options{}, "", "fe80::2"},
		"another is named":            {"10.1.0.2", []string{"10.1.0.2", "10.1.0.10"}, Options{Ifaces: []string{"10.1.0.10"}}, "", "10.1.0.10"},
		"another is public":           {"10.1.0.2", []string{"10.1.0.2", "10.1.0.10"}, Options{PublicIP: ip("10.1.0.10")}, "", "10.1.0.10"},
		"both match":                  {"10.1.0.2", []string{"10.1.0.10", "10.1.0.2"}, Options{IfaceRegexes: []string{`^10\.1\.`}}, "", "10.1.0.2"},
		"only another matches":        {"10.1.0.2", []string{"10.1.0.2", "10.1.0.10"}, Options{IfaceRegexes: []string{`\.10$`}}, "", "10.1.0.10"},
		"another source":              {"fd01::2", []string{"fd01::10", "fd01::2"}, Options{CanReach: "fd99::1"}, "fd01::10", "fd01::2"},
		"another source, in use gone": {"fd01::2", []string{"fd01::9", "fd01::10"}, Options{CanReach: "fd99::1"}, "fd01::10", "fd01::10"},
		"link-local, another source":  {"fe80::2", []string{"fe80::2"}, Options{CanReach: "fd99::1"}, "fd01::10", "fd01::10"},
		"the target has come":         {"10.1.0.2", []string{"10.1.0.2", "10.1.0.10"}, Options{CanReach: "10.1.0.10"}, "", "10.1.0.2"},
	} {
		t.Run(name, func(t *testing.T) {
			family := prefix.FamilyOf(ip(tt.want))
			f := Facts{Links: []Link{link(1, "d1", tt.addrs...)}, Defaults: []DefaultRoute{defaultRoute(family, 0, 1)}}
			if tt.reach != "" {
				f.Reach = Reach{Link: 1, Source: ip(tt.reach)}
			}
			o := tt.opts
			o.Families, o.InUse = []prefix.Family{family}, onD1(1, 1500, tt.inUse)
			if got, err := choose(f, o); err != nil || got.Addrs[0].Local != ip(tt.want) {
				t.Errorf("got %s, error %v; want %s", show(got.Interface), err, tt.want)
			}
		})
	}
}

// TestSelectStaysOnALink checks that Select keeps the link in use if another one is equally good, and
// that it takes the other one if the link in use has no carrier.
func TestSelectStaysOnALink(t *testing.T) {
	facts := Facts{Links: []Link{link(1, "d1", "10.1.0.2"), link(2, "d2", "10.1.0.3")}, Defaults: []DefaultRoute{defaultRoute(prefix.IPv4, 0, 1, 2)}}
	for option, o := range map[string]Options{
		"default route": {}, "address": {IfaceRegexes: []string{`^10\.1\.`}}, "name": {IfaceRegexes: []string{"^d"}},
	} {
		for inUse, want := range map[string]string{"": "d1", "10.1.0.2": "d1", "10.1.0.3": "d2", "10.1.0.4": "d1"} {
			o.Families, o.InUse = v4, Interface{Name: "before"}
			if inUse != "" {
				o.InUse.Addrs = []Address{{Local: ip(inUse)}}
			}
			if got, err := choose(facts, o); err != nil || got.Name != want {
				t.Errorf("by %s, with %q in use: got %s, error %v; want %s", option, inUse, show(got.Interface), err, want)
			}
		}
	}
	now := Interface{Name: "d2", Addrs: []Address{{Local: ip("10.1.0.3")}}}
	byName := Options{Families: v4, IfaceRegexes: []string{"^d"}, InUse: Interface{Name: "d2"}}
	if got, err := choose(facts, byName); err != nil || got.Name != "d2" {
		t.Errorf("with another address: got %s, error %v; want d2", show(got.Interface), err)
	}
	facts.Links[1].Running = false
	for _, o := range []Options{{Families: v4, InUse: now}, byName} {
		if got, err := choose(facts, o); err != nil || got.Name != "d1" {
			t.Errorf("without carrier: got %s, error %v; want d1", show(got.Interface), err)
		}
	}
}

// TestSelectSkipsPodInterfaces checks that Select does not take flanneld's device or the bridge of the
// pods, which still exist after a restart and do not lead to peers. It must take them if --iface names them.
func TestSelectSkipsPodInterfaces(t *testing.T) {
	facts := Facts{Links: []Link{
		link(1, "br-pods", "10.244.3.1", "fe80::1"),
		link(2, "eth0", "10.0.0.2", "fe80::2"),
	}}
	for i, name := range []string{"flannel.1", "flannel-v6.4096", "flannel.ipip", "flannel-v6.ipip", "flannel0", "flannel-8285", "flannel-wg", "flannel-wg-v6", "flannel-wg51820", "flannel.9"} {
		facts.Links = append(facts.Links, link(3+i, name, fmt.Sprintf("10.244.%d.0", 3+i), "fe80::1"))
	}
	last := len(facts.Links) + 1
	facts.Links = append(facts.Links, link(last, "flannel-net", "10.0.1.2", "fe80::3"))
	to := func(index int, source string) Reach { return Reach{Link: index, Source: ip(source)} }
	for name, tt := range map[string]struct {
		opts  Options
		reach Reach
		want  string // a part of the expected interface, or of the error
	}{
		"any address":        {Options{Families: v4, IfaceRegexes: []string{`.*`}}, Reach{}, "eth0 10.0.0.2 | "},
		"any in dual":        {Options{Families: dual, IfaceRegexes: []string{`.*`}}, Reach{}, "eth0 10.0.0.2 fe80::2 | "},
		"address":            {Options{Families: v4, IfaceRegexes: []string{`^10\.244\.`}}, Reach{}, "no IPv4 address and no interface name matches"},
		"name":               {Options{Families: v4, IfaceRegexes: []string{`pods|flannel`}}, Reach{}, "flannel-net 10.0.1.2 | "},
		"named":              {Options{Families: v4, Ifaces: []string{"flannel.1"}}, Reach{}, "flannel.1 10.244.3.0 | "},
		"address named":      {Options{Families: v4, Ifaces: []string{"10.244.3.1"}}, Reach{}, "br-pods 10.244.3.1 | "},
		"reach a peer's pod": {Options{Families: v4, CanReach: "10.244.9.1"}, to(3, "10.244.3.0"), "flannel.1: it is a device of flanneld"},
		"reach a pod here":   {Options{Families: v4, CanReach: "10.244.3.9"}, to(1, "10.244.3.1"), "br-pods: it leads to pods"},
		"reach our bridge":   {Options{Families: v4, CanReach: "10.244.3.1"}, to(1, "10.244.3.1"), "br-pods: it leads to pods"},
		"reach a host":       {Options{Families: v4, CanReach: "10.0.0.9"}, to(2, "10.0.0.2"), "eth0 10.0.0.2 | "},
	} {
		t.Run(name, func(t *testing.T) {
			facts, o := facts, tt.opts
			facts.Reach, o.Pods = tt.reach, []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24"), netip.MustParsePrefix("fd00:3::/64")}
			c, err := choose(facts, o)
			got := show(c.Interface)
			if err != nil {
				got = err.Error()
			}
			if !strings.Contains(got, tt.want) {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func TestRefusalListsInterfaces(t *testing.T) {
	crowd := host()
	for i := range 30 {
		crowd.Links = append(crowd.Links, link(100+i, fmt.Sprintf("veth%d", i), "fe80::100"))
	}
	crowd.Links = append(crowd.Links, link(200, "wlan0", "10.7.0.1"))
	odd := Facts{Links: []Link{
		{Name: "a", Index: 1, MTU: 1500},
		{Name: "b", Index: 2, Up: true},
		link(3, "c", "fd00::1 tentative", "fd00::2 duplicate", "fd00::3 deprecated", "10.0.0.1", "10.0.0.2", "10.0.0.3"),
	}}
	for _, tt := range []struct {
		facts Facts
		want  string
	}{
		{Facts{}, "no interfaces"},
		{Facts{Links: host().Links[:1]}, "lo (127.0.0.1 ::1)"},
		{odd, "c (fd00::1[tentative] fd00::2[duplicate] fd00::3[deprecated] 10.0.0.1 +2), a (down no address), b (no carrier MTU 0 no address)"},
		{crowd, "eth0 (192.168.0.2 192.168.0.3 192.168.0.4[deprecated] fe80::2 +3), " +
			"eth1 (169.254.3.1 10.1.0.3 10.1.0.2 fe80::3 +2), eth2 (10.2.0.4 10.2.0.3 10.2.0.2 fd02::2[tentative] +2), " +
			"net-10 (10.3.0.2[deprecated] 10.3.0.3[deprecated] 169.254.5.5 fe80::5 +2), wlan0 (10.7.0.1), " +
			"lo (127.0.0.1 ::1), veth0 (fe80::100), veth1 (fe80::100), and 28 more"},
	} {
		_, err := choose(tt.facts, Options{Families: v4, Ifaces: []string{"x"}})
		want := "no external interface: --iface x: no interface has this name; seen: " + tt.want
		if err == nil || err.Error() != want {
			t.Errorf("\n got %v\nwant %s", err, want)
		}
	}
}

func TestLastResort(t *testing.T) {
	for _, tt := range []struct {
		opts Options
		want bool
	}{
		{Options{Families: v6, Ifaces: []string{"net-10"}}, true},
		{Options{Families: v4, Ifaces: []string{"net-10"}}, true},
		{Options{Families: v6, Ifaces: []string{"fe80::5"}}, false},
		{Options{Families: v6, Ifaces: []string{"eth1"}}, false},
	} {
		c, err := choose(host(), tt.opts)
		if err != nil || (c.lastResort != "") != tt.want {
			t.Errorf("%v: last resort is %v, error %v; want %v", tt.opts.Ifaces, c.lastResort, err, tt.want)
		}
	}
}

// TestHardware expects the hardware address of the interface, and if it has none, that of the first other
// link that is no loopback or dummy, because those of dummies change with each boot.
func TestHardware(t *testing.T) {
	hosts := func(hardware ...string) (ls []Link) {
		for i, kind := range []string{"dummy", "", "tun"} {
			l := link(i+2, "", fmt.Sprintf("10.0.0.%d", i+2))
			l.Name, l.Kind, l.Hardware = fmt.Sprint("d", i), kind, hardware[i]
			ls = append(ls, l)
		}
		return append(ls, link(1, "lo"))
	}
	for _, tt := range []struct {
		links       []Link
		iface, want string
	}{
		{hosts("02::1", "02::2", "02::3"), "d1", "02::2"},
		{hosts("02::1", "02::2", "02::3"), "d2", "02::3"},
		{hosts("02::1", "02::2", "02::3"), "d0", "02::2"},
		{hosts("02::1", "00:00", "02::3"), "d1", "02::3"},
		{hosts("02::1", "", "02::3"), "d1", "02::3"},
		{hosts("02::1", "", "00:00"), "d1", ""},
	} {
		c, err := choose(Facts{Links: tt.links}, Options{Families: v4, Ifaces: []string{tt.iface}})
		if err != nil || c.Hardware != tt.want {
			t.Errorf("%+v: hardware address %q, error %v, want %q", tt, c.Hardware, err, tt.want)
		}
	}
}
