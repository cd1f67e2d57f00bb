// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"cmp"
	"net/netip"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/firewalltest"
)

// docker29 contains the rules of Docker 29 for its bridge and one container with a
// published port, in the form of iptables-save.
const docker29 = `*raw
:PREROUTING ACCEPT [0:0]
-A PREROUTING -d 10.5.49.2/32 ! -i docker0 -j DROP
COMMIT
*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-BRIDGE - [0:0]
:DOCKER-CT - [0:0]
:DOCKER-FORWARD - [0:0]
:DOCKER-INTERNAL - [0:0]
:DOCKER-USER - [0:0]
:FLANNEL-FWD - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A DOCKER -d 10.5.49.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER ! -i docker0 -o docker0 -j DROP
-A DOCKER-BRIDGE -o docker0 -j DOCKER
-A DOCKER-CT -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-FORWARD -j DOCKER-CT
-A DOCKER-FORWARD -j DOCKER-INTERNAL
-A DOCKER-FORWARD -j DOCKER-BRIDGE
-A DOCKER-FORWARD -i docker0 -j ACCEPT
-A FLANNEL-FWD -s 10.5.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d 10.5.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
COMMIT
`

func TestDockerCut(t *testing.T) {
	const rawDrop, user, mark = "-A PREROUTING -d 10.5.49.2/32 ! -i docker0 -j DROP\n", "-A FORWARD -j DOCKER-USER\n", "-A DOCKER-FORWARD -j DOCKER-CT\n"
	accept := func(rule string) []string { return []string{user, user + "-A DOCKER-USER " + rule + "\n"} }
	for name, tt := range map[string]struct {
		change []string // pairs of old and new text, which change docker29
		bridge string
		want   firewall.DockerCut
	}{
		"Docker 29":                {want: firewall.DockerCut{Direct: true, Forward: true}},
		"another bridge":           {bridge: "docker1", want: firewall.DockerCut{Direct: true}}, // the rule in raw drops what does not come from docker0
		"direct routing allowed":   {change: []string{rawDrop, ""}, want: firewall.DockerCut{Forward: true}},
		"accepted before":          {change: []string{rawDrop, "-A PREROUTING -s 10.0.0.0/8 -j ACCEPT\n" + rawDrop}, want: firewall.DockerCut{Forward: true}},
		"container of another":     {change: []string{rawDrop, "-A PREROUTING -d 172.17.0.2/32 ! -i docker0 -j DROP\n"}, want: firewall.DockerCut{Forward: true}},
		"device trusted":           {change: []string{rawDrop, "-A PREROUTING -d 10.5.49.2/32 -i flannel.1 -j ACCEPT\n" + rawDrop}, want: firewall.DockerCut{Forward: true}},
		"another device trusted":   {change: []string{rawDrop, "-A PREROUTING -d 10.5.49.2/32 -i eth1 -j ACCEPT\n" + rawDrop}, want: firewall.DockerCut{Direct: true, Forward: true}},
		"network accepted":         {change: accept("-s 10.5.0.0/16 -d 10.5.49.0/24 -j ACCEPT"), want: firewall.DockerCut{Direct: true}},
		"all accepted":             {change: accept(`-m comment --comment "all -o lo" -j ACCEPT`), want: firewall.DockerCut{Direct: true}},
		"part of network accepted": {change: accept("-s 10.5.1.0/24 -d 10.5.49.0/24 -j ACCEPT"), want: firewall.DockerCut{Direct: true, Forward: true}},
		"one port accepted":        {change: accept("-s 10.5.0.0/16 -p tcp -m tcp --dport 22 -j ACCEPT"), want: firewall.DockerCut{Direct: true, Forward: true}},
		"others accepted":          {change: accept("! -s 10.5.0.0/16 -j ACCEPT"), want: firewall.DockerCut{Direct: true, Forward: true}},
		"returned":                 {change: accept("-s 10.5.0.0/16 -j RETURN"), want: firewall.DockerCut{Direct: true, Forward: true}},
		"dropped by the operator":  {change: accept("-d 10.5.49.0/24 -j DROP"), want: firewall.DockerCut{Direct: true, Forward: true}},
		"mark accepted":            {change: []string{mark, "-A DOCKER-FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT\n" + mark}, want: firewall.DockerCut{Direct: true}},
		"ours before":              {change: []string{user, "-A FORWARD -j FLANNEL-FWD\n" + user}, want: firewall.DockerCut{Direct: true}},
		"unprotected gateway mode": {change: []string{rawDrop, "", "-A DOCKER ! -i docker0 -o docker0 -j DROP", "-A DOCKER ! -i docker0 -o docker0 -j ACCEPT"}},
		"Docker 20.10": {change: []string{
			rawDrop, "", "-A DOCKER ! -i docker0 -o docker0 -j DROP\n", "", "-A FORWARD -j DOCKER-FORWARD\n", "-A FORWARD -o docker0 -j DOCKER\n",
		}},
		"loop":     {change: []string{"-A DOCKER-CT -o", "-A DOCKER-CT -j DOCKER-FORWARD\n-A DOCKER-CT -o"}, want: firewall.DockerCut{Direct: true, Forward: true}},
		"no rules": {change: []string{docker29, ""}},
	} {
		b := firewall.DockerBridge{
			Network: netip.MustParsePrefix("10.5.0.0/16"), Subnet: netip.MustParsePrefix("10.5.49.0/24"),
			Name: cmp.Or(tt.bridge, "docker0"), From: []string{"flannel.1"},
		}
		if got := dockerCut(parseSave(strings.NewReplacer(tt.change...).Replace(docker29)), b); got != tt.want {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
	}
}

// TestKernelDockerSaveFails checks that Docker finds a rule in the table raw that drops packets to a
// container, although a rule in the table filter makes iptables-save fail for all tables.
func TestKernelDockerSaveFails(t *testing.T) {
	firewalltest.Enter(t)
	firewalltest.Shell(t, both(NFT, "IPT -P FORWARD ACCEPT\n"))
	firewalltest.Shell(t, "iptables-nft -t raw -A PREROUTING -d 10.5.1.2/32 ! -i docker0 -j DROP")
	native(t, "filter FORWARD meta priority 5 accept")
	b := firewall.DockerBridge{
		Network: netip.MustParsePrefix("10.5.0.0/16"), Subnet: netip.MustParsePrefix("10.5.1.0/24"), Name: "docker0", From: []string{"eth0"},
	}
	if cut, err := Docker(t.Context(), b); !cut.Direct || err != nil {
		t.Errorf("got %+v, %v, want Direct", cut, err)
	}
}
