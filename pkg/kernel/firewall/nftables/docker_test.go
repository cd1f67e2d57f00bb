// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

// docker29 contains the rules of Docker 29 for its bridge and one container with a published port, as far
// as they decide about forwarded packets.
const docker29 = `table ip docker-bridges {
	map filter-forward-in-jumps { type ifname : verdict; elements = { "docker0" : jump filter-forward-in__docker0 }; }
	chain filter-FORWARD { type filter hook forward priority filter; policy accept; oifname vmap @filter-forward-in-jumps; }
	chain filter-forward-in__docker0 {
		ct state established,related counter accept
		iifname "docker0" counter accept
		ip daddr 10.5.49.2 tcp dport 80 counter accept
		counter drop
	}
	chain raw-PREROUTING { type filter hook prerouting priority raw; policy accept;
		ip daddr 10.5.49.2 iifname != "docker0" counter drop
	}
}`

// TestKernelDocker checks which rules of Docker keep other hosts from containers.
func TestKernelDocker(t *testing.T) {
	firewalltest.Enter(t)
	const raw, last = `ip daddr 10.5.49.2 iifname != "docker0" counter drop`, "		counter drop"
	for name, tt := range map[string]struct {
		change []string // pairs of old and new text, which change docker29
		from   []string // interfaces; flannel.1 if empty
		want   firewall.DockerCut
	}{
		"Docker 29":              {want: firewall.DockerCut{Direct: true, Forward: true}},
		"another bridge":         {change: []string{"docker0", "docker1"}, want: firewall.DockerCut{Direct: true}},
		"direct routing allowed": {change: []string{raw, ""}, want: firewall.DockerCut{Forward: true}},
		"container of another":   {change: []string{"daddr 10.5.49.2", "daddr 172.17.0.2"}, want: firewall.DockerCut{Forward: true}},
		"device trusted":         {change: []string{raw, `ip daddr 10.5.49.2 iifname != { "docker0", "flannel.1" } counter drop`}, want: firewall.DockerCut{Forward: true}},
		"another device trusted": {change: []string{raw, `ip daddr 10.5.49.2 iifname != { "docker0", "eth1" } counter drop`}, want: firewall.DockerCut{Direct: true, Forward: true}},
		"one of two trusted":     {change: []string{raw, `ip daddr 10.5.49.2 iifname != { "docker0", "eth0" } counter drop`}, from: []string{"flannel.1", "eth0"}, want: firewall.DockerCut{Forward: true}},
		"mark accepted":          {change: []string{last, "		meta mark & 0x1 == 0x1 counter accept\n" + last}, want: firewall.DockerCut{Direct: true}},
		"all accepted":           {change: []string{last, "		counter accept"}, want: firewall.DockerCut{Direct: true}},
		"no rules":               {change: []string{docker29, ""}},
	} {
		firewalltest.Shell(t, "nft flush ruleset\nnft -f - <<'END'\n"+strings.NewReplacer(tt.change...).Replace(docker29)+"\nEND")
		from := tt.from
		if from == nil {
			from = []string{"flannel.1"}
		}
		got, err := Docker(firewall.DockerBridge{
			Network: netip.MustParsePrefix("10.5.0.0/16"), Subnet: netip.MustParsePrefix("10.5.49.0/24"), Name: "docker0", From: from,
		})
		if err != nil || got != tt.want {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, tt.want)
		}
	}
}
