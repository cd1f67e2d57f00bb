// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/doctor"
)

// TestPodCheck checks which half of the way of a pod is called broken, and why, from what the pod reaches.
func TestPodCheck(t *testing.T) {
	const gateway, bridge, device, service = "10.5.1.1", "10.5.2.1", "10.5.2.0", "10.96.0.1:443"
	pod := netip.MustParseAddr("10.5.1.5")
	peer := paths.Path{Subnet: netip.MustParsePrefix("10.5.2.0/24"), PublicIP: netip.MustParseAddr("192.0.2.2")}
	down := doctor.Finding{Word: "bridge", Problem: "cni0 is down", Fix: "ip link set cni0 up"}
	drops := doctor.Finding{Word: "firewall", Problem: "nft drops", Fix: "accept", Subnets: []netip.Prefix{peer.Subnet}}
	for _, tc := range []struct {
		name     string
		findings []doctor.Finding
		answer   []string // targets that do
		want     []string // of each leg its result and the advice
		err      string
	}{
		{"all answer", nil, []string{gateway, bridge, device, service}, []string{"ok ", "ok ", "ok "}, "<nil>"},
		{"packets in the other direction are dropped", []doctor.Finding{drops}, []string{gateway, bridge, device, service},
			[]string{"ok ", "firewall nft drops; fix: accept", "ok "}, "1 of 3 ways of a pod are broken: outside"},
		{"the gateway is silent, and packets pass", nil, []string{bridge, device},
			[]string{"unknown it does not answer, but packets pass through it", "ok ", "network no answer"}, "1 of 3 ways of a pod are broken: target"},
		{"nothing passes the gateway", []doctor.Finding{down}, nil, []string{
			"bridge cni0 is down; fix: ip link set cni0 up",
			"unknown not known, because packets do not reach the gateway", "unknown not known, because packets do not reach the gateway",
		}, "1 of 3 ways of a pod are broken: gateway"},
		{"the peer has no bridge", nil, []string{gateway, device, service}, []string{
			"ok ", "unknown 10.5.2.0 answers, 10.5.2.1 does not: no pods have a bridge there yet, or a firewall there drops packets to it", "ok ",
		}, "<nil>"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			answers := map[string]reach{}
			for _, to := range []string{gateway, bridge, device, service} {
				answers[to] = reach{to, paths.Verdict{Broken: paths.Tunnel, Advice: "no answer"}}
			}
			for _, to := range tc.answer {
				answers[to] = reach{to, paths.Verdict{OK: true}}
			}
			c := podCheck{findings: tc.findings, legs: []leg{
				{From: pod, Half: toGateway, reach: reach{To: gateway}},
				{From: pod, Half: outside, reach: reach{To: bridge}, path: peer, end: netip.MustParseAddr(device)},
				{From: pod, Half: toTarget, reach: reach{To: service}},
			}}
			if err := c.judge(t.Context(), answers); err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, l := range c.legs {
				got = append(got, l.Result()+" "+l.Advice)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("legs differ (-want +got):\n%s", diff)
			}
			text := "<nil>"
			if err := c.print(io.Discard, output{format: "table"}); err != nil {
				text = err.Error()
			}
			if text != tc.err {
				t.Errorf("error %s, want %s", text, tc.err)
			}
		})
	}
}
