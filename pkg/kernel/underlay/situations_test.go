// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// situation is a file in testdata: a host as ip -j shows it, what flanneld knows, and the choice that
// is right. A report of a wrong choice becomes one more file.
type situation struct {
	Source string // public address of a report or manual
	About  string

	Families  []string
	InUse     []netip.Addr
	Published []netip.Addr
	Pods      []netip.Prefix
	Peers     []netip.Addr
	Flags     struct {
		Iface, IfaceRegex    []string
		IfaceCanReach        string
		PublicIP, PublicIPv6 netip.Addr
	}
	Want struct {
		Interface  string
		Addresses  []netip.Addr
		MTU        int
		LastResort bool
		Error      string // part of the error if there is no choice
	}

	Sysctl []string  // name=value, before the links are created
	Addr   []ipLink  // ip -j -d addr
	Route  []ipRoute // ip -j route show table all
	Route6 []ipRoute // ip -j -6 route show table all
	Rule   []ipRule  // ip -j rule, without the rules that every host has
	Get    []ipRoute // ip -j route get for each peer, or for a stand-in, and for --iface-can-reach
}

type ipLink struct {
	Index    int    `json:"ifindex"`
	Name     string `json:"ifname"`
	Link     string // parent
	Master   string
	Flags    []string
	MTU      int
	LinkInfo struct {
		Kind string `json:"info_kind"`
	}
	Addrs []ipAddr `json:"addr_info"`
}

type ipAddr struct {
	Local, Address                                                  netip.Addr
	PrefixLen                                                       int
	Valid                                                           int `json:"valid_life_time"`
	Preferred                                                       int `json:"preferred_life_time"`
	Secondary, Dynamic, Temporary, Deprecated, Tentative, DADFailed bool
}

type ipRoute struct {
	Type, Dst, Dev, Scope, Table string
	Gateway, PrefSrc             netip.Addr
	Metric                       int
	Flags                        []string
	NextHops                     []ipRoute
	family                       prefix.Family
}

type ipRule struct {
	Priority       int
	Not            json.RawMessage // null if the rule is inverted
	Src, Table     string
	FwMark, FwMask string
}

// situations calls check for each file.
func situations(t *testing.T, check func(t *testing.T, s situation)) {
	files, err := filepath.Glob("testdata/*.json")
	if err != nil || len(files) < 40 {
		t.Fatalf("%d situations, error %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".json"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var s situation
			if err := json.Unmarshal(text, &s); err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(s.Source, "https://") || s.About == "" {
				t.Error("source or about is missing")
			}
			check(t, s)
		})
	}
}

var update = flag.Bool("update", false, "write what operators are told about the situations to testdata/told.txt")

// TestSituations checks the choice from the facts in the files, and what operators are told about it.
func TestSituations(t *testing.T) {
	const file = "testdata/told.txt"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]string{}
	for section := range strings.SplitSeq(string(text), "\n\n") {
		name, lines, _ := strings.Cut(section, "\n")
		told[name] = strings.TrimSpace(lines)
	}

	var now strings.Builder
	situations(t, func(t *testing.T, s situation) {
		f := s.facts(t)
		s.check(t, f)
		lines := s.tell(f)
		_, name, _ := strings.Cut(t.Name(), "/")
		fmt.Fprintf(&now, "%s\n%s\n\n", name, lines)
		if diff := cmp.Diff(told[name], strings.TrimSpace(lines)); diff != "" && !*update {
			t.Errorf("operators are told something else; if it is right, run the test with -update (-want +got):\n%s", diff)
		}
	})
	if *update {
		if err := os.WriteFile(file, []byte(strings.TrimSpace(now.String())+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// tell returns the choice with its reason, and all candidates with what speaks for (+) and against (-) them.
func (s situation) tell(f Facts) string {
	var b strings.Builder
	c, err := choose(f, s.options())
	fmt.Fprint(&b, "    ")
	if err == nil {
		fmt.Fprintf(&b, "%s, MTU %d", show(c.Interface), c.MTU)
	} else {
		fmt.Fprint(&b, err)
	}
	if c.VRF != "" {
		fmt.Fprintf(&b, ", VRF %s", c.VRF)
	}
	if c.lastResort != "" {
		fmt.Fprintf(&b, ", last resort: %s", c.lastResort)
	}
	fmt.Fprintln(&b)

	all, _ := explain(f, s.options())
	for _, c := range all {
		fmt.Fprint(&b, "    ", c.Name, " ", c.Addresses)
		if c.Chosen {
			fmt.Fprint(&b, " chosen")
		}
		if c.Never != "" {
			fmt.Fprint(&b, " never: ", c.Never)
		}
		if len(c.For) > 0 {
			fmt.Fprint(&b, " + ", strings.Join(c.For, ", "))
		}
		if len(c.Against) > 0 {
			fmt.Fprint(&b, " - ", strings.Join(c.Against, ", "))
		}
		fmt.Fprintln(&b)
	}
	return strings.TrimRight(b.String(), "\n")
}

func (s situation) options() Options {
	o := Options{
		Ifaces: s.Flags.Iface, IfaceRegexes: s.Flags.IfaceRegex, CanReach: s.Flags.IfaceCanReach,
		PublicIP: s.Flags.PublicIP, PublicIPv6: s.Flags.PublicIPv6,
		Pods: s.Pods, Published: s.Published, InUse: Interface{Name: "before"},
		Peers: func() []netip.Addr { return s.Peers },
	}
	for _, f := range s.Families {
		o.Families = append(o.Families, map[string]prefix.Family{"IPv4": prefix.IPv4, "IPv6": prefix.IPv6}[f])
	}
	for _, a := range s.InUse {
		o.InUse.Addrs = append(o.InUse.Addrs, Address{a, a})
	}
	return o
}

func (s situation) check(t *testing.T, f Facts) {
	t.Helper()
	c, err := choose(f, s.options())
	if s.Want.Error != "" {
		if err == nil || !strings.Contains(err.Error(), s.Want.Error) {
			t.Errorf("got %s, error %v; want error %q", show(c.Interface), err, s.Want.Error)
		}
		return
	}
	var locals []netip.Addr
	for _, a := range c.Addrs {
		locals = append(locals, a.Local)
	}
	if err != nil || c.Name != s.Want.Interface || !slices.Equal(locals, s.Want.Addresses) || s.Want.MTU != 0 && c.MTU != s.Want.MTU || (c.lastResort != "") != s.Want.LastResort {
		t.Errorf("got %s with MTU %d, last resort %q, error %v; want %+v", show(c.Interface), c.MTU, c.lastResort, err, s.Want)
	}
	all, _ := explain(f, s.options())
	if i := slices.IndexFunc(all, func(c Candidate) bool { return c.Chosen }); i < 0 || all[i].Name != c.Name {
		t.Errorf("the candidates do not contain the choice: %+v", all)
	}
}

// facts returns the facts that gather reads on such a host.
func (s situation) facts(t *testing.T) Facts {
	t.Helper()
	var f Facts
	index := func(name string) int {
		if name == "" {
			return 0
		}
		i := slices.IndexFunc(s.Addr, func(l ipLink) bool { return l.Name == name })
		if i < 0 {
			t.Fatalf("no link %s", name)
		}
		return s.Addr[i].Index
	}
	for _, l := range s.Addr {
		to := Link{
			Name: l.Name, Index: l.Index, MTU: l.MTU, Kind: l.LinkInfo.Kind, Master: index(l.Master), Parent: index(l.Link),
			Up: slices.Contains(l.Flags, "UP"), Running: slices.Contains(l.Flags, "LOWER_UP"),
		}
		for _, a := range l.Addrs {
			network := netip.PrefixFrom(a.Local, a.PrefixLen).Masked()
			if a.Address.IsValid() {
				network = netip.PrefixFrom(a.Address, a.PrefixLen).Masked()
			}
			to.Addrs = append(to.Addrs, Addr{
				IP: a.Local, Network: network, Permanent: !a.Dynamic, Temporary: a.Temporary || a.Secondary,
				Deprecated: a.Deprecated, Tentative: a.Tentative, Duplicate: a.DADFailed,
			})
		}
		f.Links = append(f.Links, to)
	}
	for _, r := range s.routes() {
		if r.Dst != "default" || r.Table != "" || r.Type != "" {
			continue
		}
		d := DefaultRoute{Family: r.family, Metric: r.Metric}
		for _, hop := range r.hops() {
			d.add(index(hop.Dev))
		}
		f.Defaults = append(f.Defaults, d)
	}
	for _, r := range s.Get {
		to := netip.MustParseAddr(r.Dst)
		reach := Reach{To: to, Link: index(r.Dev), Source: r.PrefSrc}
		switch {
		case slices.Contains(s.Peers, to):
			f.Peers = append(f.Peers, reach)
		case to == elsewhere[prefix.FamilyOf(to)]:
			f.Elsewhere = append(f.Elsewhere, reach)
		default:
			f.Reach = reach
		}
	}
	return f
}

// routes returns the routes of both families.
func (s situation) routes() []ipRoute {
	all := slices.Concat(s.Route, s.Route6)
	for i := range all {
		all[i].family = prefix.IPv4
		if i >= len(s.Route) {
			all[i].family = prefix.IPv6
		}
	}
	return all
}

func (r ipRoute) hops() []ipRoute {
	if len(r.NextHops) > 0 {
		return r.NextHops
	}
	return []ipRoute{r}
}

// TestKernelSituations makes each situation in a network namespace. It expects that gather reads the
// facts that are in the file, so that the choice is the same. The kernel may lack some kinds of links, such
// as VLANs. A veth then takes their place, and the file tells what it stands for.
func TestKernelSituations(t *testing.T) {
	situations(t, func(t *testing.T, s situation) {
		k := newKernel(t)
		changed, stop, err := s.options().subscribe()
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		s.play(k)
		want := s.facts(t)
		diff := ""
		for deadline := time.After(prompt); ; {
			got := s.gather(t, want)
			diff = cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.EquateEmpty())
			if diff == "" {
				s.check(t, got)
				return
			}
			select { // carriers appear later
			case <-changed:
			case <-deadline:
				t.Fatalf("facts (-file +kernel):\n%s", diff)
			}
		}
	})
}

// gather returns the facts that gather reads, with the indexes, kinds and masters of want.
func (s situation) gather(t *testing.T, want Facts) Facts {
	t.Helper()
	f, err := gather(t.Context(), s.options())
	if err != nil {
		t.Fatal(err)
	}
	indexes := map[int]int{}
	var links []Link
	for _, l := range f.Links {
		if i := slices.IndexFunc(want.Links, func(w Link) bool { return w.Name == l.Name }); i >= 0 {
			w := want.Links[i]
			indexes[l.Index] = w.Index
			l.Index, l.Kind, l.Master, l.Parent, l.Hardware = w.Index, w.Kind, w.Master, w.Parent, ""
			links = append(links, l)
		}
	}
	slices.SortFunc(links, func(a, b Link) int { return a.Index - b.Index })
	f.Links = links
	for _, d := range f.Defaults {
		for i := range d.Links {
			d.Links[i] = indexes[d.Links[i]]
		}
	}
	f.Reach.Link = indexes[f.Reach.Link]
	for _, all := range [][]Reach{f.Peers, f.Elsewhere} {
		for i := range all {
			all[i].Link = indexes[all[i].Link]
		}
	}
	if s.options().asksForInterface() {
		f.Defaults = want.Defaults
	}
	for _, d := range f.Defaults {
		if len(d.Links) < 2 {
			continue
		}
		// The kernel takes a hop by a hash, whose key differs after each boot.
		f.Elsewhere = want.Elsewhere
		for i := range min(len(f.Peers), len(want.Peers)) {
			if slices.Contains(d.Links, f.Peers[i].Link) && slices.Contains(d.Links, want.Peers[i].Link) {
				f.Peers[i].Link = want.Peers[i].Link
			}
		}
	}
	f.Defaults = slices.DeleteFunc(f.Defaults, func(d DefaultRoute) bool { return !slices.Contains(s.options().Families, d.Family) })
	return f
}

// play creates the links, addresses, routes and rules of the situation.
func (s situation) play(k kernel) {
	k.Helper()
	for _, set := range s.Sysctl {
		name, value, _ := strings.Cut(set, "=")
		k.must(os.WriteFile("/proc/sys/"+strings.ReplaceAll(name, ".", "/"), []byte(value), 0))
	}
	k.setUp("lo")
	for _, l := range s.Addr {
		switch {
		case l.Name == "lo":
		case l.LinkInfo.Kind == "bridge":
			k.must(k.h.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: l.Name}}))
		default:
			k.must(k.h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: l.Name, MTU: l.MTU}, PeerName: l.Name + "-peer"}))
			k.setUp(l.Name + "-peer")
		}
	}
	for _, l := range s.Addr {
		if slices.ContainsFunc(s.Addr, func(m ipLink) bool { return m.Name == l.Master && m.LinkInfo.Kind == "bridge" }) {
			k.must(k.h.LinkSetMaster(k.link(l.Name), k.link(l.Master)))
		}
		if slices.Contains(l.Flags, "UP") {
			k.setUp(l.Name)
		}
		// The kernel lists the newest IPv6 address first, and the newest IPv4 address last.
		for _, a := range slices.Backward(l.Addrs) {
			if a.Local.Is6() && !a.Local.IsLoopback() {
				k.must(k.h.AddrAdd(k.link(l.Name), a.netlink()))
			}
		}
		for _, a := range l.Addrs {
			if a.Local.Is4() && !a.Local.IsLoopback() {
				k.must(k.h.AddrAdd(k.link(l.Name), a.netlink()))
			}
		}
	}
	routes := s.routes()
	slices.SortStableFunc(routes, func(a, b ipRoute) int { return truth(a.Gateway.IsValid(), b.Gateway.IsValid()) }) // routes to gateways first
	for _, r := range routes {
		k.addRoute(r.netlink(k))
	}
	for _, r := range s.Rule {
		k.must(k.h.RuleAdd(r.netlink()))
	}
	for _, l := range s.Addr {
		if slices.Contains(l.Flags, "NO-CARRIER") {
			k.must(k.h.LinkSetDown(k.link(l.Name + "-peer")))
		}
	}
}

func (a ipAddr) netlink() *netlink.Addr {
	to := address(netip.PrefixFrom(a.Local, a.PrefixLen).String())
	if a.Local.Is6() {
		to.Flags = unix.IFA_F_NODAD
	}
	if a.Dynamic {
		to.ValidLft, to.PreferedLft = a.Valid, a.Preferred
	}
	return to
}

func (r ipRoute) netlink(k kernel) netlink.Route {
	to := netlink.Route{Priority: r.Metric, Table: table(r.Table)}
	to.Dst = mask(map[prefix.Family]string{prefix.IPv4: "0.0.0.0/0", prefix.IPv6: "::/0"}[r.family])
	if p, err := netip.ParsePrefix(r.Dst); err == nil {
		to.Dst = mask(p.String())
	} else if a, err := netip.ParseAddr(r.Dst); err == nil {
		to.Dst = mask(prefix.Host(a).String())
	}
	if r.PrefSrc.IsValid() {
		to.Src = r.PrefSrc.AsSlice()
	}
	for _, hop := range r.hops() {
		h := &netlink.NexthopInfo{LinkIndex: k.link(hop.Dev).Attrs().Index}
		if hop.Gateway.IsValid() {
			h.Gw = hop.Gateway.AsSlice()
		}
		to.MultiPath = append(to.MultiPath, h)
	}
	if len(to.MultiPath) == 1 {
		to.LinkIndex, to.Gw, to.MultiPath = to.MultiPath[0].LinkIndex, to.MultiPath[0].Gw, nil
		if to.Gw == nil {
			to.Scope = netlink.SCOPE_LINK
		}
	}
	return to
}

func (r ipRule) netlink() *netlink.Rule {
	to := netlink.NewRule()
	to.Priority, to.Table = r.Priority, table(r.Table)
	to.Invert = len(r.Not) > 0
	if mark, err := strconv.ParseUint(r.FwMark, 0, 32); err == nil {
		to.Mark = uint32(mark)
	}
	return to
}

// table returns the number of a table; the main one has an empty name.
func table(name string) int {
	if n, err := strconv.Atoi(name); err == nil {
		return n
	}
	return unix.RT_TABLE_MAIN
}
