// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/report/status"
)

func TestFirewall(t *testing.T) {
	for want, f := range map[string]status.Firewall{
		"no rules asked for": {},
		"nftables":           {Kind: "nftables"},
		"iptables: no lock":  {Kind: "iptables", Error: "no lock"},
		"not up yet":         {Error: "not up yet"},
	} {
		if got := firewall(f); got != want {
			t.Errorf("%+v: %q, want %q", f, got, want)
		}
	}
}

// TestOverflow checks that the status names the peers that need the tunnel, but at most ten unless all
// are requested.
func TestOverflow(t *testing.T) {
	var peers []status.Peer
	for n := range byte(15) {
		p := status.Peer{Backend: "vxlan", Waiting: "no route to it"}
		if n < 3 {
			p.Backend, p.Waiting = "aws-vpc", ""
		}
		p.Subnets = []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, n, 0}), 24)}
		peers = append(peers, p)
	}
	for _, all := range []bool{false, true} {
		var out []string
		row := func(name string, value ...any) { out = append(out, name+" "+strings.TrimSpace(fmt.Sprintln(value...))) }
		printOverflow(row, status.Overflow{Tunnel: "vxlan", ByCloud: 3, ByTunnel: 12, Problem: "the quota is used up"}, peers, all)
		want := map[bool]int{false: 2 + 10 + 1, true: 2 + 12}[all]
		if len(out) != want || out[0] != "overflow sends to 3 peers by the cloud, to 12 by vxlan" || out[1] != " the quota is used up" || out[2] != " 10.5.3.0/24 by vxlan: no route to it" {
			t.Errorf("all %v: %d rows, want %d:\n%s", all, len(out), want, strings.Join(out, "\n"))
		}
	}
}

// TestLocation checks that the status shows the location of a host, and why it sends to some peers by
// wireguard. During a migration it must not list these peers there, because the reason in Waiting is
// then about the next backend.
func TestLocation(t *testing.T) {
	r := status.Report{
		Network: status.Network{Location: &status.Location{Name: "east", Inside: "host-gw", Between: "wireguard", ByInside: 1, ByBetween: 2}},
		Peers:   []status.Peer{{Backend: "wireguard", Waiting: "no route to it"}},
	}
	r.Peers[0].Subnets = []netip.Prefix{netip.MustParsePrefix("10.5.2.0/24")}
	const row, peer = "location\teast: sends to 1 peer by host-gw, to 2 by wireguard\n", "\t10.5.2.0/24 by wireguard: no route to it\n"
	var out strings.Builder
	printStatus(&out, r, nil, false)
	if !strings.Contains(out.String(), row+peer) {
		t.Errorf("no %q in\n%s", row+peer, out.String())
	}
	out.Reset()
	r.Network.NextBackendType, r.Network.Location.Name = "vxlan", ""
	printStatus(&out, r, nil, false)
	if !strings.Contains(out.String(), "location\tnone: sends") || strings.Contains(out.String(), peer) {
		t.Errorf("during a migration:\n%s", out.String())
	}
}

// TestNoClaimAboutClearText checks that during a migration to wireguard flannelctl says that no packet
// leaves in clear text, but not if the host sends to a peer at its location by another backend.
func TestNoClaimAboutClearText(t *testing.T) {
	for clear, want := range map[int]bool{0: true, 1: false} {
		var out strings.Builder
		m := migration{From: "vxlan", To: "wireguard", Phases: map[string]int{}}
		m.addHost(status.Report{Network: status.Network{NextBackendType: "wireguard", Location: &status.Location{ByInside: clear}}})
		m.print(&out)
		if got := strings.Contains(out.String(), "no packet to a peer leaves this host in clear text"); got != want {
			t.Errorf("with %d peers inside it says so: %v, want %v\n%s", clear, got, want, out.String())
		}
	}
}
