// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"fmt"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

// TestKernelTargets checks what Targets returns for rules that nft and iptables have
// created.
func TestKernelTargets(t *testing.T) {
	always, some, hidden := Target{Name: "DROP", Always: true}, Target{Name: "DROP"}, Target{Name: "DROP", Hidden: true}
	for rule, want := range map[string]Target{
		"nft drop":                                  always,
		"nft counter drop":                          always,
		"nft log prefix x drop":                     always,
		"nft jump some":                             {Name: "some", Always: true},
		"nft counter":                               {Always: true},
		"nft IP saddr ADDR drop":                    some,
		"nft IP daddr != ADDR drop":                 some,
		"nft meta l4proto tcp drop":                 some,
		"nft meta mark and 0x4000 == 0x4000 drop":   some,
		"nft iifname eth0 oif lo drop":              some,
		"nft IP saddr ADDR tcp dport 80 drop":       hidden,
		"nft IP saddr ADDR @th,96,32 5 drop":        hidden, // has the offset of the source address in an IPv4 header, but is in the transport header
		"nft IP saddr ADDR IP dscp 5 drop":          hidden,
		"nft IP saddr ADDR IP TTL 5 drop":           hidden,
		"nft IP saddr ADDR meta priority 5 drop":    hidden,
		"nft IP saddr ADDR ct state new drop":       hidden,
		"nft oifname { a, b } drop":                 hidden,
		"iptables -j DROP":                          always,
		"iptables -g some -m comment --comment x":   {Name: "some", Always: true},
		"iptables -s ADDR ! -d ADDR -p tcp -j DROP": some,
		"iptables -i eth+ -o eth1 -j DROP":          some,
		"iptables -m mark --mark 0x4000/0x4000 -m comment --comment x -j REJECT": {Name: "REJECT"},
	} {
		t.Run(rule, func(t *testing.T) {
			firewalltest.Enter(t)
			for f, words := range map[prefix.Family]*strings.Replacer{
				prefix.IPv4: strings.NewReplacer("IP", "ip", "ADDR", "192.0.2.1", "TTL", "ttl"),
				prefix.IPv6: strings.NewReplacer("IP", "ip6", "ADDR", "2001:db8::1", "TTL", "hoplimit"),
			} {
				program, spec, _ := strings.Cut(words.Replace(rule), " ")
				add := fmt.Sprintf("nft 'add rule %s filter FORWARD %s'", words.Replace("IP"), spec)
				if program == "iptables" {
					add = words.Replace("IPtables-nft -A FORWARD ") + spec
				}
				firewalltest.Shell(t, words.Replace("IPtables-nft -N some; IPtables-nft -P FORWARD ACCEPT; ")+add)
				got, exists, err := Targets(f, "filter", "FORWARD")
				if err != nil || !exists || len(got) != 1 || got[0] != want {
					t.Errorf("%s: %+v, %v, %v, want %+v", add, got, exists, err, want)
				}
			}
		})
	}
}
