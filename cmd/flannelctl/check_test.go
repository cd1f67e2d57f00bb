// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"testing"

	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/pkg/report/doctor"
)

// TestBecauseOfAnotherPeer checks that a peer that is served is not called refused because another one with the same
// subnet is, and that both have every other cause.
func TestBecauseOfAnotherPeer(t *testing.T) {
	subnet := netip.MustParsePrefix("10.5.7.0/24")
	for _, tc := range []struct {
		word   string
		served bool
		want   paths.Part
	}{{"refused", true, ""}, {"refused", false, "refused"}, {"firewall", true, "firewall"}, {"firewall", false, "firewall"}} {
		findings := []doctor.Finding{{Word: tc.word, Subnets: []netip.Prefix{subnet}}}
		if v := because(paths.Verdict{OK: tc.served}, subnet, tc.served, findings); v.Broken != tc.want {
			t.Errorf("%s, served %v: %q, want %q", tc.word, tc.served, v.Broken, tc.want)
		}
	}
}
