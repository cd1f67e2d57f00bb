// SPDX-License-Identifier: Apache-2.0

package firewalltest

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// Flavour describes a flavour of the firewall to the suite. New returns an Applier for the
// tests.
type Flavour struct {
	New func() firewall.Applier
	// List returns all rules of both families. Lines that begin with # do not count.
	List func(testing.TB) string
	// Damage contains scripts, by name, that change rules. Apply must undo each of these
	// changes.
	Damage map[string]string
	// Foreign is a script that adds rules of other programs.
	Foreign string
}

// Policy returns a policy that masquerades and forwards the packets of a dual-stack
// network, without a guard.
func Policy() firewall.Policy {
	return firewall.Policy{
		Networks: []firewall.Network{
			network("10.5.0.0/16", "10.5.64.0/24"),
			network("fd00:10:5::/48", "fd00:10:5:47::/64"),
		},
		Masquerade: true, Random: true, Forward: true,
	}
}

// tunnel returns the tunnel packets that the guards of the suite drop.
func tunnel() firewall.Payload { return firewall.Payload{Protocol: firewall.UDP, Port: 8472} }

// Guarded returns Policy with a guard.
func Guarded() firewall.Policy { return guard(Policy(), tunnel(), tunnel()) }

// guard returns p with a guard. tunnels contains the tunnel packets of each of its
// networks, in their order.
func guard(p firewall.Policy, tunnels ...firewall.Payload) firewall.Policy {
	p.Guard, p.Networks = true, slices.Clone(p.Networks)
	for i := range p.Networks {
		p.Networks[i].Tunnels = tunnels[i : i+1]
	}
	return p
}

// Rules returns all rules that chain c should contain if no other daemon has rules in it.
func Rules(t firewall.Table, c firewall.Chain) []firewall.Rule {
	a := t.Arrange(c, nil)
	return slices.Concat(a.Common, a.Own)
}

func network(n, s string) firewall.Network {
	return firewall.Network{Network: netip.MustParsePrefix(n), Subnet: netip.MustParsePrefix(s)}
}

// other returns the policy of a second daemon on the same host, with another network.
func other() firewall.Policy {
	p := Policy()
	p.Networks = []firewall.Network{network("10.6.0.0/16", "10.6.1.0/24"), network("fd00:10:6::/48", "fd00:10:6:1::/64")}
	p.NonMasquerade = []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16"), netip.MustParsePrefix("192.0.2.0/24")}
	return guard(p, tunnel(), tunnel())
}

// expect applies p, and fails the test unless Apply succeeds and returns changed.
func expect(t *testing.T, a firewall.Applier, p firewall.Policy, changed bool) {
	t.Helper()
	got, err := a.Apply(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	if got != changed {
		t.Errorf("Apply reports changed %v, want %v", got, changed)
	}
}

// Run runs the suite.
func (f Flavour) Run(t *testing.T) {
	t.Run("damage", f.damage)
	t.Run("policies in any order", f.transitions)
	t.Run("two daemons", f.twoDaemons)
	t.Run("no residue", f.residue)
}

// listed returns the output of List without the lines that begin with #.
func (f Flavour) listed(t *testing.T) string {
	t.Helper()
	var lines []string
	for line := range strings.Lines(f.List(t)) {
		if !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

func (f Flavour) same(t *testing.T, what, want string) {
	t.Helper()
	if diff := cmp.Diff(strings.Split(want, "\n"), strings.Split(f.listed(t), "\n")); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func (f Flavour) damage(t *testing.T) {
	for _, name := range slices.Sorted(maps.Keys(f.Damage)) {
		t.Run(name, func(t *testing.T) {
			Enter(t)
			a := f.New()
			Shell(t, f.Foreign)
			expect(t, a, Guarded(), true)
			want := f.listed(t)
			expect(t, f.New(), Guarded(), false)
			Shell(t, f.Damage[name])
			if f.listed(t) == want {
				t.Fatal("the script has no effect")
			}

			expect(t, a, Guarded(), true)
			f.same(t, "after the repair", want)
			expect(t, a, Guarded(), false)
		})
	}
}

// transitions changes from each policy to each other one. The rules must be the same as
// those of the second policy on a host without rules, and an equal policy must change
// nothing.
func (f Flavour) transitions(t *testing.T) {
	Enter(t)
	but := func(change func(p *firewall.Policy)) firewall.Policy {
		p := Policy()
		change(&p)
		return p
	}
	protocols := guard(Policy(), firewall.Payload{Protocol: 4}, firewall.Payload{Protocol: 41})
	protocols.Masquerade = false
	protocols.Networks[0].HostsInside = true
	policies := []firewall.Policy{
		Policy(), Guarded(), protocols,
		but(func(p *firewall.Policy) { p.Forward = false }), but(func(p *firewall.Policy) { p.Masquerade = false }), but(func(p *firewall.Policy) { p.Random = false }),
		but(func(p *firewall.Policy) {
			p.NonMasquerade = []netip.Prefix{netip.MustParsePrefix("198.51.100.7/32"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("2001:db8::/32")}
		}),
		but(func(p *firewall.Policy) { // another subnet
			p.Networks = []firewall.Network{network("10.5.0.0/16", "10.5.7.0/24"), network("fd00:10:5::/48", "fd00:10:5:7::/64")}
		}),
		but(func(p *firewall.Policy) { // one family
			p.Networks, p.Former = p.Networks[:1], []netip.Prefix{p.Networks[1].Network}
		}),
	}
	a := f.New()

	// iptables keeps an empty table, and lists tables in the order of their creation. So
	// all tables are created before the first listing.
	expect(t, a, Guarded(), true)
	expect(t, a, Guarded().Cleanup(), true)
	want := make([]string, len(policies))
	for i, p := range policies {
		expect(t, a, p, true)
		want[i] = f.listed(t)
		expect(t, a, Policy().Cleanup(), true)
	}

	for i := range policies {
		for j := range policies {
			if _, err := a.Apply(t.Context(), policies[i]); err != nil {
				t.Fatal(err)
			}
			expect(t, f.New(), policies[j], i != j)
			f.same(t, "after another policy", want[j])
		}
	}
}

// twoDaemons checks that two daemons share the chains and leave each other's rules alone.
// When both have removed their rules, nothing of flannel may remain.
func (f Flavour) twoDaemons(t *testing.T) {
	Enter(t)
	one := f.New()
	two := f.New()
	expect(t, two, other(), true)
	alone := f.listed(t)
	expect(t, one, Guarded(), true)
	expect(t, two, other(), false)
	expect(t, one, Guarded(), false)
	both := f.listed(t)

	less := Guarded()
	less.Masquerade = false
	expect(t, one, less, true)
	expect(t, two, other(), false)
	expect(t, one, Guarded(), true)
	expect(t, two, other(), false)
	f.same(t, "masquerading off and on again", both)

	expect(t, one, Guarded().Cleanup(), true)
	f.same(t, "one daemon is cleaned up", alone)
	expect(t, two, other(), false)
	expect(t, two, other().Cleanup(), true)
	if text := f.listed(t); strings.Contains(strings.ToLower(text), "flannel") {
		t.Errorf("both daemons are cleaned up, rules left:\n%s", text)
	}
}

// residue checks that no rule of flannel remains, and other rules stay, when everything is
// disabled or the network is a former one.
func (f Flavour) residue(t *testing.T) {
	Enter(t)
	a := f.New()
	expect(t, a, Guarded().Cleanup(), false)
	Shell(t, f.Foreign)
	want := f.listed(t)
	expect(t, a, Guarded().Cleanup(), false)
	expect(t, a, Guarded(), true)
	off := Guarded()
	off.Masquerade = false
	off.Forward = false
	expect(t, a, off, true)
	f.same(t, "everything disabled", want)
	expect(t, a, Guarded(), true)
	expect(t, a, Guarded().Cleanup(), true)
	f.same(t, "former network", want)
	expect(t, a, Guarded().Cleanup(), false)
}
