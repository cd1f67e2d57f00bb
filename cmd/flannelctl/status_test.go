// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/status"
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

// TestOverflow prints which peers need the tunnel. A list that is too long is cut.
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

// TestRelayed prints the peers that have a relay, and says what that sees.
func TestRelayed(t *testing.T) {
	var out []string
	row := func(name string, value ...any) { out = append(out, name+" "+strings.TrimSpace(fmt.Sprintln(value...))) }
	peer := func(subnet, relay string) status.Peer {
		return status.Peer{Lease: status.Lease{Subnets: []netip.Prefix{netip.MustParsePrefix(subnet)}}, Relay: relay}
	}
	printRelayed(row, []status.Peer{peer("10.5.2.0/24", ""), peer("10.5.3.0/24", "10.5.1.0-24"), peer("10.5.4.0/24", "node7")})
	want := []string{
		"relayed 10.5.3.0/24 by relay 10.5.1.0-24, which sees the plaintext of the packets",
		" 10.5.4.0/24 by relay node7, which sees the plaintext of the packets",
	}
	if !slices.Equal(out, want) {
		t.Errorf("rows %q, want %q", out, want)
	}
}
