// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// TestDocker checks that there is a fix for each kind of Docker rule that drops packets.
func TestDocker(t *testing.T) {
	direct, forward := firewall.DockerCut{Direct: true}, firewall.DockerCut{Forward: true}
	four := Docker{Program: "iptables", Bridge: firewall.DockerBridge{Network: netip.MustParsePrefix("10.5.0.0/16"), Subnet: netip.MustParsePrefix("10.5.49.0/24"), Name: "docker0"}}
	six := Docker{Program: "ip6tables", Bridge: firewall.DockerBridge{Network: netip.MustParsePrefix("fd00:10:5::/48"), Subnet: netip.MustParsePrefix("fd00:10:5:49::/64"), Name: "docker0"}}
	with := func(d Docker, inIPTables, inNFTables firewall.DockerCut) Docker {
		d.IPTables, d.NFTables = inIPTables, inNFTables
		return d
	}
	none := firewall.DockerCut{}
	for name, tt := range map[string]struct {
		rules []Docker
		fixes []string
	}{
		"no bridge":               {},
		"all accepted":            {rules: []Docker{four}},
		"no direct routing":       {rules: []Docker{with(four, direct, none)}, fixes: []string{"allow-direct-routing"}},
		"the same in nftables":    {rules: []Docker{with(four, none, direct)}, fixes: []string{"allow-direct-routing"}},
		"published ports":         {rules: []Docker{with(four, forward, none)}, fixes: []string{"iptables -I DOCKER-USER -s 10.5.0.0/16 -d 10.5.49.0/24 -j ACCEPT"}},
		"published, in nftables":  {rules: []Docker{with(four, none, forward)}, fixes: []string{"bridge-accept-fwmark"}},
		"published ports of IPv6": {rules: []Docker{with(six, forward, none)}, fixes: []string{"ip6tables -I DOCKER-USER -s fd00:10:5::/48 -d fd00:10:5:49::/64 -j ACCEPT"}},
		"both families": {
			rules: []Docker{with(four, firewall.DockerCut{Direct: true, Forward: true}, none), with(six, firewall.DockerCut{Direct: true, Forward: true}, none)},
			fixes: []string{"allow-direct-routing", "iptables -I", "allow-direct-routing", "ip6tables -I"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(soundHost())
			h.Docker = tt.rules
			found := Examine(h)
			matches := func(f Finding, fix string) bool { return f.Serious && strings.Contains(f.Fix, fix) }
			if !slices.EqualFunc(found, tt.fixes, matches) {
				t.Errorf("found %+v, want fixes %q", found, tt.fixes)
			}
		})
	}
}
