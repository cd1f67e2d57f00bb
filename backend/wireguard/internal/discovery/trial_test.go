// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"net/netip"
	"testing"
	"time"
)

// TestTrialsReachTheEndpointOfTheLease checks that the endpoint of the lease is tried within 3
// minutes, even if the device sends nothing and the candidates change.
func TestTrialsReachTheEndpointOfTheLease(t *testing.T) {
	lease := netip.MustParseAddrPort("192.168.77.2:51820")
	at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(lease.Addr(), port) }
	for name, candidates := range map[string]func(pass int) []netip.AddrPort{
		"the host has no route to one":     func(int) []netip.AddrPort { return []netip.AddrPort{at(1)} },
		"another host changes one often":   func(pass int) []netip.AddrPort { return []netip.AddrPort{at(uint16(1 + pass))} },
		"another host adds and removes it": func(pass int) []netip.AddrPort { return []netip.AddrPort{at(1), at(2)}[:1+pass%2] },
		"the order of two changes":         func(pass int) []netip.AddrPort { return []netip.AddrPort{at(1), at(2), at(1)}[pass%2:][:2] },
	} {
		t.Run(name, func(t *testing.T) {
			var search *trial
			for pass := 0; ; pass++ {
				now := time.Duration(pass) * 5 * time.Second
				if now > 3*time.Minute {
					t.Fatalf("the endpoint of the lease has not been tried for %s", now)
				}
				search = search.next(now, append([]netip.AddrPort{lease}, candidates(pass)...), 148)
				if search.endpoint() == lease {
					return
				}
			}
		})
	}
}
