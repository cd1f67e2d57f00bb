// SPDX-License-Identifier: Apache-2.0

package firewall_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

// text returns a readable form of a rule, which ends with the number of its Action.
func text(r firewall.Rule) string {
	var words []string
	if r.Marked {
		words = append(words, "marked")
	}
	for i, m := range []firewall.Match{r.Src, r.Dst} {
		if m.Prefix.IsValid() {
			words = append(words, map[bool]string{true: "not "}[m.Not]+[]string{"from ", "to "}[i]+m.Prefix.String())
		}
	}
	if r.Payload != (firewall.Payload{}) {
		words = append(words, fmt.Sprintf("protocol %d port %d", r.Payload.Protocol, r.Payload.Port))
	}
	return strings.Join(append(words, fmt.Sprint(r.Action)), " ")
}

func TestRules(t *testing.T) {
	plain := firewalltest.Policy()
	plain.NonMasquerade = []netip.Prefix{
		netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32"), netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("0.0.0.0/0"),
	}
	plain.Random = false
	for f, want := range map[prefix.Family][]string{
		prefix.IPv4: {
			"marked 1", "from 10.5.64.0/24 to 10.5.0.0/16 1", "from 10.5.0.0/16 to 10.5.64.0/24 1", "not from 10.5.0.0/16 to 10.5.64.0/24 1",
			"from 10.5.0.0/16 to 192.0.2.0/24 1", "from 10.5.0.0/16 1",
			"from 10.5.0.0/16 not to 224.0.0.0/4 4", "not from 10.5.0.0/16 to 10.5.0.0/16 4",
		},
		prefix.IPv6: {
			"marked 1", "from fd00:10:5:47::/64 to fd00:10:5::/48 1", "from fd00:10:5::/48 to fd00:10:5:47::/64 1", "not from fd00:10:5::/48 to fd00:10:5:47::/64 1",
			"from fd00:10:5::/48 to 2001:db8::/32 1",
			"from fd00:10:5::/48 not to ff00::/8 4", "not from fd00:10:5::/48 to fd00:10:5::/48 4",
		},
	} {
		var got []string
		for _, r := range firewalltest.Rules(firewall.TableOf(f, plain), firewall.Postrouting) {
			got = append(got, text(r))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", f, diff)
		}
	}
	none := firewall.TableOf(prefix.IPv4, firewall.Policy{Networks: plain.Networks})
	if rules := append(firewalltest.Rules(none, firewall.Postrouting), firewalltest.Rules(none, firewall.Forward)...); rules != nil || !none.Concerns() {
		t.Errorf("rules with everything disabled: %v, want none", rules)
	}
}

// TestGuard checks the rules that keep pods from the tunnels of hosts. There must be none
// without a tunnel, without Guard, or if no other rules are wanted.
func TestGuard(t *testing.T) {
	guarded := firewalltest.Guarded()
	guarded.Networks[1].Tunnels = []firewall.Payload{{Protocol: 41}}
	untunnelled, off, unguarded := firewalltest.Policy(), guarded, guarded
	untunnelled.Guard = true
	off.Masquerade, off.Forward = false, false
	unguarded.Guard = false
	inside := firewalltest.Guarded()
	inside.Networks[0].HostsInside = true
	for name, tc := range map[string]struct {
		policy firewall.Policy
		family prefix.Family
		want   []string
	}{
		"UDP": {guarded, prefix.IPv4, []string{
			"from 10.5.64.0/24 not to 10.5.0.0/16 protocol 17 port 8472 3",
			"from 10.5.64.0/24 not to 10.5.0.0/16 protocol 17 port 8472 3", "from 10.5.0.0/16 to 10.5.64.0/24 protocol 17 port 8472 3",
		}},
		"hosts inside": {inside, prefix.IPv4, []string{
			"from 10.5.64.0/24 not to 10.5.0.0/16 protocol 17 port 8472 3", "from 10.5.64.0/24 to 10.5.0.0/16 protocol 17 port 8472 3",
			"from 10.5.64.0/24 not to 10.5.0.0/16 protocol 17 port 8472 3", "from 10.5.64.0/24 to 10.5.0.0/16 protocol 17 port 8472 3",
			"from 10.5.0.0/16 to 10.5.64.0/24 protocol 17 port 8472 3",
		}},
		"IPv6 in IPv6": {guarded, prefix.IPv6, []string{
			"from fd00:10:5:47::/64 not to fd00:10:5::/48 protocol 41 port 0 3",
			"from fd00:10:5:47::/64 not to fd00:10:5::/48 protocol 41 port 0 3", "from fd00:10:5::/48 to fd00:10:5:47::/64 protocol 41 port 0 3",
		}},
		"no tunnel":      {policy: untunnelled, family: prefix.IPv4},
		"no other rules": {policy: off, family: prefix.IPv4},
		"no guard":       {policy: unguarded, family: prefix.IPv4},
	} {
		var got []string
		for _, c := range []firewall.Chain{firewall.GuardForward, firewall.GuardInput} {
			for _, r := range firewalltest.Rules(firewall.TableOf(tc.family, tc.policy), c) {
				got = append(got, text(r))
			}
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestSeveralPolicies checks the rules of two networks of one daemon. After a restart the daemon may apply
// one network before the other. It must then find that the chain with the rules of both needs no change.
func TestSeveralPolicies(t *testing.T) {
	of := func(network, subnet, other string) firewall.Policy {
		return firewall.Policy{
			Networks:   []firewall.Network{{Network: netip.MustParsePrefix(network), Subnet: netip.MustParsePrefix(subnet)}},
			Masquerade: true, Several: true, NonMasquerade: []netip.Prefix{netip.MustParsePrefix(other)},
		}
	}
	red, green := of("10.5.0.0/16", "10.5.1.0/24", "10.6.0.0/16"), of("10.6.0.0/16", "10.6.1.0/24", "10.5.0.0/16")
	both := firewalltest.Rules(firewall.TableOf(prefix.IPv4, red, green), firewall.Postrouting)
	var got []string
	for _, r := range both {
		got = append(got, text(r))
	}
	want := []string{
		"marked 1",
		"from 10.5.1.0/24 to 10.5.0.0/16 1", "from 10.5.0.0/16 to 10.5.1.0/24 1", "from 10.5.0.0/16 to 10.6.0.0/16 1",
		"from 10.6.1.0/24 to 10.6.0.0/16 1", "from 10.6.0.0/16 to 10.6.1.0/24 1", "from 10.6.0.0/16 to 10.5.0.0/16 1",
		"from 10.5.0.0/16 not to 224.0.0.0/4 4", "from 10.6.0.0/16 not to 224.0.0.0/4 4",
		"not from 10.5.0.0/16 to 10.5.1.0/24 1", "not from 10.5.0.0/16 to 10.5.0.0/16 4",
		"not from 10.6.0.0/16 to 10.6.1.0/24 1", "not from 10.6.0.0/16 to 10.6.0.0/16 4",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rules (-want +got):\n%s", diff)
	}
	var have []*firewall.Rule
	for i := range both {
		have = append(have, &both[i])
	}
	for name, p := range map[string]firewall.Policy{"red": red, "green": green} {
		if !firewall.TableOf(prefix.IPv4, p).Arrange(firewall.Postrouting, have).Exact {
			t.Errorf("a start with network %s writes the rules of both again", name)
		}
	}
}

// TestArrange checks whether Arrange finds a chain exact, and how many of its rules belong to other
// daemons. Each of these must contain the network of the other daemon.
func TestArrange(t *testing.T) {
	one := firewall.TableOf(prefix.IPv4, firewalltest.Policy())
	p := firewalltest.Policy()
	p.Networks[0] = firewall.Network{Network: netip.MustParsePrefix("10.6.0.0/16"), Subnet: netip.MustParsePrefix("10.6.1.0/24")}
	p.NonMasquerade = []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")} // the network of the first daemon
	two := firewall.TableOf(prefix.IPv4, p)
	of := func(t firewall.Table) (rules []*firewall.Rule) {
		for _, r := range firewalltest.Rules(t, firewall.Postrouting)[1:] {
			rules = append(rules, &r)
		}
		return rules
	}
	mark := firewalltest.Rules(one, firewall.Postrouting)[:1]
	ours, theirs, head := of(one), of(two), []*firewall.Rule{&mark[0]}
	chain := func(parts ...[]*firewall.Rule) (all []*firewall.Rule) {
		for _, p := range parts {
			all = append(all, p...)
		}
		return all
	}
	foreign := []*firewall.Rule{{Src: firewall.In(netip.MustParsePrefix("192.0.2.0/24")), Action: firewall.Return}}
	for name, tt := range map[string]struct {
		have   []*firewall.Rule
		exact  bool
		others int
	}{
		"exact":                {chain(head, ours), true, 0},
		"empty":                {nil, false, 0},
		"other daemon first":   {chain(head, theirs, ours), true, len(theirs)},
		"other daemon last":    {chain(head, ours, theirs), true, len(theirs)},
		"mixed":                {chain(head, ours[:2], theirs, ours[2:]), true, len(theirs)},
		"only other daemon":    {chain(head, theirs), false, len(theirs)},
		"no mark":              {chain(ours, theirs), false, len(theirs)},
		"mark later":           {chain(theirs, head, ours), false, len(theirs)},
		"mark twice":           {chain(head, head, ours), false, 0},
		"one missing":          {chain(head, ours[1:], theirs), false, len(theirs)},
		"duplicate":            {chain(head, ours, ours[:1]), false, 0},
		"order":                {chain(head, ours[1:], ours[:1]), false, 0},
		"foreign rule":         {chain(head, ours, foreign), false, 0},
		"unreadable rule":      {chain(head, ours, []*firewall.Rule{nil}), false, 0},
		"part of other daemon": {chain(head, ours, theirs[:2]), false, 0},
	} {
		a := one.Arrange(firewall.Postrouting, tt.have)
		if a.Exact != tt.exact || len(a.Others) != tt.others {
			t.Errorf("%s: exact %v with %d rules of others, want %v and %d", name, a.Exact, len(a.Others), tt.exact, tt.others)
		}
		for _, i := range a.Others {
			if !strings.Contains(text(*tt.have[i]), "10.6.") {
				t.Errorf("%s: %s counts as another daemon's", name, text(*tt.have[i]))
			}
		}
	}
}
