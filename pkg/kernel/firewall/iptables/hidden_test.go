// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
)

// noChains is a targetsFunc of a kernel without tables.
func noChains(prefix.Family, string, string) ([]nftables.Target, bool, error) { return nil, false, nil }

// TestResolve checks that plan gets the rules in the kernel from resolve if the output of
// iptables-save differs from these rules.
func TestResolve(t *testing.T) {
	const jump = `-m comment --comment "flanneld forward" -j FLANNEL-FWD`
	ours, conditional := nftables.Target{Name: "FLANNEL-FWD", Always: true}, nftables.Target{Name: "FLANNEL-FWD"}
	drop, set := nftables.Target{Name: "DROP", Always: true}, nftables.Target{Name: "DROP"}
	for name, tt := range map[string]struct {
		listed string
		kernel map[string][]nftables.Target
		want   string // the last line before COMMIT; empty if there is no change
	}{
		"as listed":              {"-A FORWARD " + jump + "\n-A FORWARD -j DROP", map[string][]nftables.Target{"FORWARD": {ours, drop}}, ""},
		"a condition not listed": {"-A FORWARD -j DROP\n-A FORWARD " + jump, map[string][]nftables.Target{"FORWARD": {set, ours}}, ""},
		"no such condition":      {"-A FORWARD -j DROP\n-A FORWARD " + jump, map[string][]nftables.Target{"FORWARD": {drop, ours}}, "-I FORWARD 1 " + jump},
		"one in a chain": {
			"-A FORWARD -j X\n-A FORWARD " + jump + "\n-A X -j DROP", map[string][]nftables.Target{"FORWARD": {{Name: "X", Always: true}, ours}, "X": {set}}, "",
		},
		"none in the chain": {
			"-A FORWARD -j X\n-A FORWARD " + jump + "\n-A X -j DROP", map[string][]nftables.Target{"FORWARD": {{Name: "X", Always: true}, ours}, "X": {drop}}, "-I FORWARD 1 " + jump,
		},
		"chains in a circle": {
			"-A FORWARD " + jump, map[string][]nftables.Target{"FORWARD": {{Name: "X", Always: true}, ours}, "X": {{Name: "X", Always: true}}}, "",
		},
		"not listed":           {"", map[string][]nftables.Target{"FORWARD": {set, ours, set}}, ""},
		"not listed, twice":    {"", map[string][]nftables.Target{"FORWARD": {set, ours, ours}}, "-A FORWARD " + jump},
		"not listed, too late": {"", map[string][]nftables.Target{"FORWARD": {set, drop, ours}}, "-I FORWARD 2 " + jump},
		"jump on a condition":  {"", map[string][]nftables.Target{"FORWARD": {conditional}}, "-A FORWARD " + jump},
		"changed in our own":   {"-A FORWARD " + jump, map[string][]nftables.Target{"FORWARD": {ours}, "FLANNEL-FWD": {set}}, ""},
		// iptables-restore removes a rule by its whole text. So a removal must not match a
		// rule of another program.
		"changed meanwhile": {
			"-A FORWARD -s 192.0.2.1 -j ACCEPT\n-A FORWARD " + jump + "\n-A FORWARD -p udp -j ACCEPT",
			map[string][]nftables.Target{"FORWARD": {ours, {Name: "ACCEPT"}, ours}}, "-A FORWARD " + jump,
		},
	} {
		p := places[firewall.Forward]
		d := parseSave("*filter\n:FLANNEL-FWD - [0:0]\n" + `-A FLANNEL-FWD -s 10.5.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d 10.5.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
` + tt.listed + "\nCOMMIT\n")
		kernel := func(_ prefix.Family, _, chain string) ([]nftables.Target, bool, error) {
			targets, exists := tt.kernel[chain]
			return targets, exists, nil
		}
		s := resolver{place: p, targets: kernel, have: d[p.table], seen: map[string]bool{}}
		if err := s.resolve(p.parent); err != nil {
			t.Fatal(err)
		}
		policy := firewalltest.Policy()
		policy.Masquerade = false
		script := plan(d, firewall.TableOf(prefix.IPv4, policy))
		if tt.want == "" && script != "" || !strings.HasSuffix(script, "\n"+tt.want+"\nCOMMIT\n") && tt.want != "" {
			t.Errorf("%s: the script is\n%s\nwant it to end with %q", name, script, tt.want)
		}
		for line := range strings.Lines(script) {
			if strings.HasPrefix(line, "-D") && line != "-D FORWARD "+jump+"\n" {
				t.Errorf("%s: deletes %s, which belongs to another program", name, line)
			}
		}
	}
}

// native inserts rules at the heads of chains with nft, in both families.
func native(t *testing.T, rules ...string) {
	t.Helper()
	for _, r := range rules {
		firewalltest.Shell(t, fmt.Sprintf("nft 'insert rule ip %s'\nnft 'insert rule ip6 %[1]s'", r))
	}
}

// host moves the test into new namespaces, and creates chains of iptables with a rule of
// another program.
func host(t *testing.T) {
	t.Helper()
	firewalltest.Enter(t)
	firewalltest.Shell(t, both(NFT, "IPT -A FORWARD -p tcp --dport 25 -j DROP\nIPT -t nat -A POSTROUTING -p tcp --dport 25 -j ACCEPT\n"))
}

// listed returns what nft lists of flanneld's chains and their parents.
func listed(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	ruleset := firewalltest.Ruleset(t)
	for _, f := range []string{"ip", "ip6"} {
		for _, p := range Places() {
			chain := fmt.Sprintf("%s %s %s", f, p.Table, p.Chain)
			if rules, ok := ruleset[chain]; ok {
				fmt.Fprintf(&b, "%s\n%s", chain, rules)
			}
		}
	}
	return b.String()
}

// expectJumps fails the test unless there is one jump to each chain that
// firewalltest.Policy fills, in both families.
func expectJumps(t *testing.T) {
	t.Helper()
	text, table := listed(t), firewall.TableOf(prefix.IPv4, firewalltest.Policy())
	for _, c := range firewall.Chains() {
		if len(firewalltest.Rules(table, c)) == 0 {
			continue
		}
		if n := strings.Count(text, "jump "+places[c].chain); n != 2 {
			t.Errorf("%d jumps to %s, want one for each family:\n%s", n, places[c].chain, text)
		}
	}
}

// expectRefused fails the test unless Apply changes nothing and returns an error that names
// the table filter, which cannot be read, and a remedy.
func expectRefused(t *testing.T, a *Applier, p firewall.Policy) {
	t.Helper()
	before := listed(t)
	changed, err := a.Apply(t.Context(), p)
	if changed || err == nil || !strings.Contains(err.Error(), "table filter") || !strings.Contains(err.Error(), "EnableNFTables") {
		t.Errorf("changed %v, %v, want an error that names the table filter", changed, err)
	}
	if after := listed(t); after != before {
		t.Errorf("the rules have changed from\n%s\nto\n%s", before, after)
	}
}

const surplus = `for i in 1 2 3; do IPT -A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD; done` + "\n"

// TestKernelHidden checks that flanneld's rules are written, repaired and removed in tables
// that iptables-save does not print because of one rule. Beside some such rules, iptables
// cannot remove a jump. Apply must then fail if it has to remove a jump.
//
//stages:rest TestKernelSaveFails has one such table, and TestKernelHiddenChain such a chain
func TestKernelHidden(t *testing.T) {
	for _, r := range []string{
		"ct state { new, established } accept", "log prefix \"x\" accept", "quota over 10 bytes accept", "fib saddr type local accept",
		"meta priority 5 accept", // iptables-save fails for this rule
	} {
		stuck := strings.HasPrefix(r, "fib") || strings.HasPrefix(r, "meta") // beside these rules, iptables finds no jump to remove
		t.Run(r, func(t *testing.T) {
			host(t)
			native(t, "filter FORWARD "+r, "nat POSTROUTING "+r)
			if text := firewalltest.Shell(t, both(NFT, "IPT-save 2>/dev/null || true\n")); strings.Contains(text, "-A") {
				t.Fatalf("the tables are not hidden:\n%s", text)
			}
			before, a := listed(t), New(NFT)
			for pass := range 3 {
				if changed, err := a.Apply(t.Context(), firewalltest.Policy()); err != nil || changed != (pass == 0) {
					t.Errorf("pass %d: changed %v, %v", pass, changed, err)
				}
				expectJumps(t)
			}
			want := listed(t)
			damage := []string{"IPT -F FLANNEL-FWD\n", "IPT -t nat -D FLANNEL-POSTRTG 2\n", "IPT -I FLANNEL-FWD -p udp -j DROP\n"}
			if stuck {
				defer func() {
					expectRefused(t, a, firewalltest.Policy().Cleanup())
					firewalltest.Shell(t, both(NFT, surplus))
					expectRefused(t, a, firewalltest.Policy())
				}()
			} else {
				damage = append(damage, surplus, "IPT -D FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD\n")
			}
			for _, script := range damage {
				firewalltest.Shell(t, both(NFT, script))
				if listed(t) == want {
					t.Fatalf("%s has no effect", script)
				}
				if changed, err := a.Apply(t.Context(), firewalltest.Policy()); err != nil || !changed {
					t.Errorf("%s: changed %v, %v", script, changed, err)
				}
				if after := listed(t); after != want {
					t.Errorf("%s: rules are\n%s\nwant\n%s", script, after, want)
				}
			}
			if stuck {
				return
			}
			firewalltest.Shell(t, both(NFT, "IPT -F FLANNEL-FWD\n"))
			for _, changes := range []bool{true, false} {
				if changed, err := a.Apply(t.Context(), firewalltest.Policy().Cleanup()); err != nil || changed != changes {
					t.Errorf("cleaned up: changed %v, %v", changed, err)
				}
			}
			if after := listed(t); after != before {
				t.Errorf("rules after cleanup are\n%s\nwant\n%s", after, before)
			}
		})
	}
}

// TestKernelHiddenGuard checks that the rules of the guard, which has two chains in the table mangle, are
// written once, repaired and removed if iptables-save does not print that table.
func TestKernelHiddenGuard(t *testing.T) {
	host(t)
	firewalltest.Shell(t, both(NFT, "IPT -t mangle -A FORWARD -p tcp --dport 25 -j ACCEPT\nIPT -t mangle -A INPUT -p tcp --dport 25 -j ACCEPT\n"))
	native(t, `mangle FORWARD log prefix "x" accept`)
	before, a := listed(t), New(NFT)
	expect := func(what string, p firewall.Policy, want bool) {
		t.Helper()
		if changed, err := a.Apply(t.Context(), p); err != nil || changed != want {
			t.Errorf("%s: changed %v, %v, want changed %v", what, changed, err, want)
		}
	}
	expect("first", firewalltest.Guarded(), true)
	rules := listed(t)
	expect("second", firewalltest.Guarded(), false)
	for _, chain := range []string{"FLANNEL-GUARD-FWD", "FLANNEL-GUARD-IN"} {
		firewalltest.Shell(t, both(NFT, "IPT -t mangle -F "+chain+"\n"))
		expect(chain+" is empty", firewalltest.Guarded(), true)
		if after := listed(t); after != rules {
			t.Errorf("rules are\n%s\nwant\n%s", after, rules)
		}
	}
	expect("cleanup", firewalltest.Guarded().Cleanup(), true)
	if after := listed(t); after != before {
		t.Errorf("rules after cleanup are\n%s\nwant\n%s", after, before)
	}
}

// TestKernelSaveFails checks that Apply reads and writes the other tables if a rule in the
// table filter makes iptables-save fail for all tables. Reading must not create tables.
func TestKernelSaveFails(t *testing.T) {
	firewalltest.Enter(t)
	firewalltest.Shell(t, both(NFT, "IPT -P FORWARD ACCEPT\n"))
	native(t, "filter FORWARD meta priority 5 accept")
	a := New(NFT)
	before := firewalltest.Shell(t, "nft list ruleset")
	if changed, err := a.Apply(t.Context(), firewalltest.Policy().Cleanup()); changed || err != nil {
		t.Errorf("changed %v, %v", changed, err)
	}
	if after := firewalltest.Shell(t, "nft list ruleset"); after != before {
		t.Errorf("the rules have changed from\n%s\nto\n%s", before, after)
	}
	firewalltest.Shell(t, ofNetworks(NFT, "IPT -t nat -A POSTROUTING -s NET ! -d MCAST -j MASQUERADE"))
	for _, changes := range []bool{true, false} {
		if changed, err := a.Apply(t.Context(), firewalltest.Policy()); changed != changes || err != nil {
			t.Errorf("changed %v, %v", changed, err)
		}
	}
	expectJumps(t)
	if text := firewalltest.Shell(t, "nft list chain ip nat POSTROUTING"); strings.Contains(text, "masquerade") {
		t.Errorf("an old rule remains:\n%s", text)
	}
	if _, err := a.Apply(t.Context(), firewalltest.Policy().Cleanup()); err == nil || strings.Contains(err.Error(), "table nat") {
		t.Errorf("error %v, want one that names no other table than filter", err)
	}
}

// TestKernelHiddenChain checks that Apply fails for the table filter, and still handles other
// tables, if a rule of another program makes flanneld's chain in filter unreadable.
func TestKernelHiddenChain(t *testing.T) {
	host(t)
	a := New(NFT)
	if _, err := a.Apply(t.Context(), firewalltest.Policy()); err != nil {
		t.Fatal(err)
	}
	native(t, "filter FLANNEL-FWD ct state { new } drop")
	expectRefused(t, a, firewalltest.Policy())
	want := listed(t)
	firewalltest.Shell(t, both(NFT, "IPT -t nat -F FLANNEL-POSTRTG\n")) // the other table is not affected
	if changed, err := a.Apply(t.Context(), firewalltest.Policy()); !changed || err == nil || listed(t) != want {
		t.Errorf("changed %v, %v, to\n%s\nwant\n%s", changed, err, listed(t), want)
	}
	expectRefused(t, a, firewalltest.Policy())
	if changed, err := a.Apply(t.Context(), firewalltest.Policy().Cleanup()); !changed || err == nil || strings.Contains(listed(t), "POSTRTG") {
		t.Errorf("cleaned up: changed %v, %v, to\n%s", changed, err, listed(t))
	}
	expectRefused(t, a, firewalltest.Policy().Cleanup())
}

// TestKernelBlocking checks that flanneld's jump is put before a rule that drops all
// packets, and not before a rule that drops some. iptables-save prints rules of both kinds
// as "-j DROP".
func TestKernelBlocking(t *testing.T) {
	p := firewalltest.Policy()
	p.Networks = p.Networks[:1]
	for r, blocks := range map[string]bool{
		"ip daddr @blocklist drop": false, "ip saddr { 192.0.2.1, 192.0.2.2 } drop": false, "iifname { a, b } drop": false,
		"meta l4proto { tcp, udp } drop": false, "jump some": false,
		"drop": true, "counter drop": true, "log prefix \"x\" drop": true, "reject": true, "goto every": true,
	} {
		t.Run(r, func(t *testing.T) {
			host(t)
			firewalltest.Shell(t, fmt.Sprintf(`iptables-nft -N some
				iptables-nft -N every
				iptables-nft -A every -m comment --comment x -j REJECT
				nft 'add set ip filter blocklist { type ipv4_addr; }'
				nft 'insert rule ip filter some iifname { a, b } drop'
				nft 'insert rule ip filter FORWARD %s'`, r))
			a := New(NFT)
			for pass := range 2 {
				if changed, err := a.Apply(t.Context(), p); err != nil || changed != (pass == 0) {
					t.Errorf("pass %d: changed %v, %v", pass, changed, err)
				}
			}
			chain := firewalltest.Shell(t, "nft --stateless list chain ip filter FORWARD")
			_, rules, _ := strings.Cut(chain, "policy accept;\n")
			first, _, _ := strings.Cut(rules, "\n")
			if got := strings.Contains(first, "jump FLANNEL-FWD"); got != blocks || !strings.Contains(rules, "jump FLANNEL-FWD") {
				t.Errorf("jump before the rule: %v, want %v:\n%s", got, blocks, chain)
			}
		})
	}
}

// TestKernelConditionOfLegacy checks that an operator's rules stay, although iptables-save does not print
// one of their conditions and so shows them like rules of flannel before v0.20.
func TestKernelConditionOfLegacy(t *testing.T) {
	host(t)
	rules := []string{
		"filter FORWARD ip saddr 10.5.0.0/16 ip daddr { 192.0.2.1, 192.0.2.2 } accept",
		`nat POSTROUTING oifname { "eth0", "eth1" } ip saddr 10.5.0.0/16 ip daddr 10.5.9.0/24 return`,
	}
	for _, r := range rules {
		firewalltest.Shell(t, "nft 'insert rule ip "+r+"'")
	}
	if text := firewalltest.Shell(t, "iptables-nft-save"); strings.Contains(text, "192.0.2.1") {
		t.Fatalf("iptables-save prints the condition:\n%s", text)
	}
	a := New(NFT)
	for _, p := range []firewall.Policy{firewalltest.Policy(), firewalltest.Policy().Cleanup()} {
		for _, changes := range []bool{true, false} {
			if changed, err := a.Apply(t.Context(), p); err != nil || changed != changes {
				t.Errorf("changed %v, %v", changed, err)
			}
		}
		for _, r := range rules {
			words := strings.Fields(r)
			if left := firewalltest.Shell(t, "nft list chain ip "+words[0]+" "+words[1]); !strings.Contains(left, strings.Join(words[2:], " ")) {
				t.Errorf("the operator's %q was deleted:\n%s", r, left)
			}
		}
	}
}
