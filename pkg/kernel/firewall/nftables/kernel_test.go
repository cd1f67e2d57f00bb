// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

func families(script string) string {
	return strings.NewReplacer("FAM", "ip", "TABLE", "ip flannel-ipv4", "NET", "10.5.0.0/16", "POD", "10.5.9.0/24").Replace(script) + "\n" +
		strings.NewReplacer("FAM", "ip6", "TABLE", "ip6 flannel-ipv6", "NET", "fd00:10:5::/48", "POD", "fd00:10:5:9::/64").Replace(script) + "\n"
}

const list = "nft list ruleset"

// listSorted returns the rules of all tables and chains, ordered by name, because nft lists
// tables and chains in the order of their creation.
func listSorted(t testing.TB) string {
	var b strings.Builder
	ruleset := firewalltest.Ruleset(t)
	for _, name := range slices.Sorted(maps.Keys(ruleset)) {
		fmt.Fprintf(&b, "%s\n%s", name, ruleset[name])
	}
	return b.String()
}

func TestKernelNftables(t *testing.T) {
	damage := map[string]string{
		"ruleset of a table flushed": `nft flush table TABLE`,
		"table deleted":              `nft delete table TABLE`,
		"chain flushed":              `nft flush chain TABLE postrtg`,
		"chain deleted":              `nft delete chain TABLE forward`,
		"foreign rule":               `nft insert rule TABLE postrtg tcp dport 80 accept`,
		"foreign rule at the end":    `nft add rule TABLE forward FAM saddr POD accept`,
		"duplicates":                 "nft add rule TABLE forward FAM saddr NET accept\nnft insert rule TABLE forward FAM daddr NET accept",
		"wrong order":                `nft insert rule TABLE postrtg FAM saddr NET FAM daddr != POD masquerade`,
		"policy":                     `nft chain TABLE forward '{ policy drop; }'`,
		"dormant":                    `nft add table TABLE '{ flags dormant; }'`,
		"dormant, chain deleted":     "nft add table TABLE '{ flags dormant; }'\nnft delete chain TABLE forward",
		"dormant, of another kind":   "nft add table TABLE '{ flags dormant; }'\nnft chain TABLE forward '{ policy drop; }'",
		"dormant and empty":          "nft delete table TABLE\nnft add table TABLE '{ flags dormant; }'",
		"chain of another kind":      "nft delete chain TABLE forward\nnft add chain TABLE forward '{ type filter hook input priority 7; }'",
		"guard deleted":              "nft delete chain TABLE guard-forward\nnft flush chain TABLE guard-input",
		"guard of another port":      `nft insert rule TABLE guard-input FAM saddr NET udp dport 8473 drop`,
		"guard with an exception":    `nft insert rule TABLE guard-forward FAM saddr POD accept`,
		"guard of another kind":      `nft chain TABLE guard-input '{ policy drop; }'`,
		"rules of the old policy":    `nft insert rule TABLE postrtg meta mark 0x00004000 return`,
	}
	for name, script := range damage {
		damage[name] = families(script)
	}
	firewalltest.Flavour{
		New:    func() firewall.Applier { return New() },
		List:   listSorted,
		Damage: damage,
		Foreign: families(`nft add table FAM kube-proxy
nft add chain FAM kube-proxy postrouting '{ type nat hook postrouting priority 100; }'
nft add rule FAM kube-proxy postrouting meta mark and 0x4000 == 0x4000 masquerade`),
	}.Run(t)
}

func TestKernelGolden(t *testing.T) {
	firewalltest.Enter(t)
	if _, err := New().Apply(t.Context(), firewalltest.Guarded()); err != nil {
		t.Fatal(err)
	}
	one := func(family, table, network, subnet, multicast string) string {
		return strings.NewReplacer("FAM", family, "TABLE", table, "NET", network, "POD", subnet, "MCAST", multicast).Replace(`table FAM TABLE {
	comment "rules for TABLE"
	chain postrtg {
		comment "chain to manage traffic masquerading by flannel"
		type nat hook postrouting priority srcnat; policy accept;
		meta mark & 0x00004000 == 0x00004000 return
		FAM saddr POD FAM daddr NET return
		FAM saddr NET FAM daddr POD return
		FAM saddr != NET FAM daddr POD return
		FAM saddr NET FAM daddr != MCAST masquerade fully-random
		FAM saddr != NET FAM daddr NET masquerade fully-random
	}

	chain forward {
		comment "chain to accept flannel traffic"
		type filter hook forward priority filter; policy accept;
		FAM saddr NET accept
		FAM daddr NET accept
	}

	chain guard-forward {
		comment "chain to keep pods from the tunnels of other hosts"
		type filter hook forward priority mangle; policy accept;
		FAM saddr POD FAM daddr != NET udp dport 8472 drop
	}

	chain guard-input {
		comment "chain to keep pods from the tunnel of this host"
		type filter hook input priority mangle; policy accept;
		FAM saddr POD FAM daddr != NET udp dport 8472 drop
		FAM saddr NET FAM daddr POD udp dport 8472 drop
	}
}
`)
	}
	want := one("ip", "flannel-ipv4", "10.5.0.0/16", "10.5.64.0/24", "224.0.0.0/4") +
		one("ip6", "flannel-ipv6", "fd00:10:5::/48", "fd00:10:5:47::/64", "ff00::/8")
	if diff := cmp.Diff(want, firewalltest.Shell(t, list)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestKernelManyRules checks that Apply writes and deletes more rules than fit the default
// buffers of a socket.
func TestKernelManyRules(t *testing.T) {
	for _, n := range []int{300, 1000} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			firewalltest.Enter(t)
			p := firewalltest.Policy()
			for i := range n {
				p.NonMasquerade = append(p.NonMasquerade, netip.PrefixFrom(netip.AddrFrom4([4]byte{172, byte(i >> 8), byte(i), 0}), 24))
			}
			for _, step := range []firewall.Policy{p, firewalltest.Policy()} {
				for _, changes := range []bool{true, false} {
					if changed, err := New().Apply(t.Context(), step); changed != changes || err != nil {
						t.Errorf("with %d exceptions: changed %v, %v", len(step.NonMasquerade), changed, err)
					}
				}
			}
		})
	}
}

// TestKernelWatchOfManyRules checks that Watch calls wake only a few times for a thousand rules that are
// written at once, however slow the machine is, and not for each of the messages that announce them.
func TestKernelWatchOfManyRules(t *testing.T) {
	firewalltest.Enter(t)
	var script strings.Builder
	script.WriteString("nft -f - <<'END'\ntable ip flannel-ipv4 {\n chain forward {\n")
	for i := range 1000 {
		fmt.Fprintf(&script, "  ip saddr 10.%d.%d.0/24 accept\n", i/250, i%250)
	}
	script.WriteString(" }\n}\nEND")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	const over = 4 * quiet // the test ends Watch after this time without a call of wake
	end := time.AfterFunc(time.Minute, cancel)
	wakes := 0
	Watch(ctx, OwnPlaces(), func() { // Watch calls it on the thread that is in the namespace
		if wakes++; wakes == 1 {
			firewalltest.Shell(t, script.String())
		}
		end.Reset(over)
	})
	if wakes < 2 || wakes > 15 {
		t.Errorf("%d wakes, want one at the begin and a few for the rules", wakes)
	}
}

// TestKernelRefused checks that Apply returns EPERM and reports no change if another
// program has reserved flanneld's table for itself.
func TestKernelRefused(t *testing.T) {
	firewalltest.Enter(t)
	owner, err := dial(prefix.IPv4)
	if err != nil {
		t.Fatal(err)
	}
	defer owner.close()
	const owned = 2 // NFT_TABLE_F_OWNER, for which x/sys/unix has no constant
	table := owner.message(unix.NFT_MSG_NEWTABLE, netlink.Create, str(unix.NFTA_TABLE_NAME, tableName(prefix.IPv4)), num(unix.NFTA_TABLE_FLAGS, owned))
	generation, err := owner.generation()
	if err := oneline.Join(err, owner.commit(generation, []netlink.Message{table})); err != nil {
		t.Fatal(err)
	}
	p := firewalltest.Policy()
	p.Networks = p.Networks[:1]
	many := p
	for i := range 1000 {
		many.NonMasquerade = append(many.NonMasquerade, netip.PrefixFrom(netip.AddrFrom4([4]byte{172, byte(i >> 8), byte(i), 0}), 24))
	}
	for _, p := range []firewall.Policy{p, many} {
		if changed, err := New().Apply(t.Context(), p); changed || !errors.Is(err, unix.EPERM) {
			t.Errorf("changed %v, %v, want no change and %v", changed, err, unix.EPERM)
		}
	}
}
