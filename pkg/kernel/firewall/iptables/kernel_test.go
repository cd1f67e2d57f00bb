// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

// both returns script with each line twice: first for IPv4, with IPT replaced by the
// iptables of variant v, and then for IPv6, with IPT replaced by its ip6tables.
func both(v Variant, script string) string {
	var b strings.Builder
	for line := range strings.Lines(script) {
		for _, f := range families() {
			b.WriteString(strings.ReplaceAll(line, "IPT", v.Program(f)))
		}
	}
	return b.String()
}

// impatient is an Applier that reads the rules at each call, because the suite changes them in between.
type impatient struct{ *Applier }

func (a impatient) Apply(ctx context.Context, policies ...firewall.Policy) (bool, error) {
	clear(a.trusted)
	return a.Applier.Apply(ctx, policies...)
}

func flavour(v Variant) firewalltest.Flavour {
	damage := map[string]string{
		"rule deleted":       `IPT -t nat -D FLANNEL-POSTRTG 2`,
		"mark rule deleted":  `IPT -t nat -D FLANNEL-POSTRTG 1`,
		"rule duplicated":    `IPT -t nat -I FLANNEL-POSTRTG 4 -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN`,
		"chain flushed":      `IPT -t nat -F FLANNEL-POSTRTG`,
		"forward flushed":    `IPT -F FLANNEL-FWD`,
		"foreign rule":       `IPT -t nat -I FLANNEL-POSTRTG 3 -p tcp --dport 80 -j ACCEPT`,
		"foreign look-alike": `IPT -I FLANNEL-FWD -m comment --comment "flanneld forward" -j RETURN`,
		"jump deleted":       `IPT -t nat -D POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG`,
		"jump duplicated":    `IPT -t nat -I POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG`,
		"jump without mark":  `IPT -I FORWARD -j FLANNEL-FWD`,
		"jump before kube":   "IPT -D FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD\nIPT -I FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD",
		"guard flushed":      `IPT -t mangle -F FLANNEL-GUARD-FWD`,
		"guard deleted": `IPT -t mangle -D INPUT -m comment --comment "flanneld guard" -j FLANNEL-GUARD-IN
IPT -t mangle -F FLANNEL-GUARD-IN
IPT -t mangle -X FLANNEL-GUARD-IN`,
		"guard of another port": `IPT -t mangle -A FLANNEL-GUARD-IN -s NET -p udp -m udp --dport 8473 -m comment --comment "flanneld guard" -j DROP`,
		"guard behind ACCEPT":   `IPT -t mangle -I FLANNEL-GUARD-FWD -p udp -j ACCEPT`,
		"guard's jump deleted":  `IPT -t mangle -D FORWARD -m comment --comment "flanneld guard" -j FLANNEL-GUARD-FWD`,
		"guard's jump doubled":  `IPT -t mangle -I FORWARD -m comment --comment "flanneld guard" -j FLANNEL-GUARD-FWD`,
		"jump behind REJECT":    "IPT -D FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD\nIPT -A FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD",
		"rules in wrong order": `IPT -D FLANNEL-FWD 1
IPT -A FLANNEL-FWD -s NET -m comment --comment "flanneld forward" -j ACCEPT`,
		"chain deleted": `IPT -D FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
IPT -F FLANNEL-FWD
IPT -X FLANNEL-FWD`,
		"old layout": `IPT -t nat -A POSTROUTING -s NET -d NET -j RETURN
IPT -t nat -A POSTROUTING -s NET ! -d MCAST -j MASQUERADE
IPT -t nat -A POSTROUTING ! -s NET -d POD -j RETURN
IPT -t nat -A POSTROUTING ! -s NET -d NET -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
IPT -A FORWARD -s NET -j ACCEPT
IPT -A FORWARD -d NET -m comment --comment "flanneld forward" -j ACCEPT`,
	}
	for name, script := range damage {
		damage[name] = ofNetworks(v, script)
	}
	return firewalltest.Flavour{
		New:    func() firewall.Applier { return impatient{New(v)} },
		List:   func(t testing.TB) string { return firewalltest.Shell(t, both(v, "IPT-save\n")) },
		Damage: damage,
		Foreign: both(v, `IPT -N KUBE-FORWARD
IPT -I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
IPT -t nat -N KUBE-POSTROUTING
IPT -t nat -I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
IPT -t nat -N KUBE-MARK-MASQ
IPT -t nat -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
IPT -A FORWARD -p tcp --dport 25 -m comment --comment "say \"no\" to mail" -j DROP
IPT -A FORWARD -j REJECT
IPT -t mangle -A PREROUTING -j MARK --set-mark 7
`),
	}
}

// ofNetworks returns script twice, for IPv4 and for IPv6. It replaces IPT by the program of
// variant v, and NET, POD and MCAST by prefixes of the family.
func ofNetworks(v Variant, script string) string {
	var b strings.Builder
	for _, names := range []*strings.Replacer{
		strings.NewReplacer("IPT", v.Program(prefix.IPv4), "NET", "10.5.0.0/16", "POD", "10.5.9.0/24", "MCAST", "224.0.0.0/4"),
		strings.NewReplacer("IPT", v.Program(prefix.IPv6), "NET", "fd00:10:5::/48", "POD", "fd00:10:5:9::/64", "MCAST", "ff00::/8"),
	} {
		b.WriteString(names.Replace(script) + "\n")
	}
	return b.String()
}

func TestKernelNFT(t *testing.T)    { flavour(NFT).Run(t) }
func TestKernelLegacy(t *testing.T) { flavour(Legacy).Run(t) }

// TestKernelGolden checks that the rules of both variants equal the text that golden
// returns.
func TestKernelGolden(t *testing.T) {
	for _, v := range []Variant{NFT, Legacy} {
		t.Run(string(v), func(t *testing.T) {
			firewalltest.Enter(t)
			if _, err := New(v).Apply(t.Context(), firewalltest.Guarded()); err != nil {
				t.Fatal(err)
			}
			for f, want := range map[prefix.Family]string{
				prefix.IPv4: golden("10.5.0.0/16", "10.5.64.0/24", "224.0.0.0/4"),
				prefix.IPv6: golden("fd00:10:5::/48", "fd00:10:5:47::/64", "ff00::/8"),
			} {
				var got []string
				for _, table := range []string{"filter", "nat", "mangle"} {
					for line := range strings.Lines(firewalltest.Shell(t, v.Program(f)+"-save -t "+table)) {
						if strings.Contains(line, "flannel") || strings.Contains(line, "FLANNEL") {
							got = append(got, strings.TrimRight(line, "\n"))
						}
					}
				}
				if diff := cmp.Diff(want, strings.Join(got, "\n")); diff != "" {
					t.Errorf("%s (-want +got):\n%s", f, diff)
				}
			}
		})
	}
}

func golden(network, subnet, multicast string) string {
	return strings.NewReplacer("NET", network, "POD", subnet, "MCAST", multicast).Replace(`:FLANNEL-FWD - [0:0]
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A FLANNEL-FWD -s NET -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d NET -m comment --comment "flanneld forward" -j ACCEPT
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s POD -d NET -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s NET -d POD -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG ! -s NET -d POD -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s NET ! -d MCAST -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s NET -d NET -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
:FLANNEL-GUARD-FWD - [0:0]
:FLANNEL-GUARD-IN - [0:0]
-A INPUT -m comment --comment "flanneld guard" -j FLANNEL-GUARD-IN
-A FORWARD -m comment --comment "flanneld guard" -j FLANNEL-GUARD-FWD
-A FLANNEL-GUARD-FWD -s POD ! -d NET -p udp -m udp --dport 8472 -m comment --comment "flanneld guard" -j DROP
-A FLANNEL-GUARD-IN -s POD ! -d NET -p udp -m udp --dport 8472 -m comment --comment "flanneld guard" -j DROP
-A FLANNEL-GUARD-IN -s NET -d POD -p udp -m udp --dport 8472 -m comment --comment "flanneld guard" -j DROP`)
}
