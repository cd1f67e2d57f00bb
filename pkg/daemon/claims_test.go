// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"net/netip"
	"strings"
	"testing"
)

// TestClaims compares what two networks need. A clash must name the thing, in both directions.
func TestClaims(t *testing.T) {
	of := func(backend, network, device, file string, port int) claims {
		c := claims{backend: backend, networks: []netip.Prefix{netip.MustParsePrefix(network)}, ports: []int{port}}
		if device != "" {
			c.devices = []string{device}
		}
		if file != "" {
			c.files = []string{file}
		}
		return c
	}
	red := of("vxlan", "10.5.0.0/16", "flannel.1", "", 8472)
	for name, tt := range map[string]struct {
		one, other claims
		want       string // empty: no clash
	}{
		"vxlan with one port":      {red, of("vxlan", "10.6.0.0/16", "flannel.2", "", 8472), ""},
		"one VNI":                  {red, of("vxlan", "10.6.0.0/16", "flannel.1", "", 8472), "flannel.1"},
		"part of the other":        {red, of("vxlan", "10.5.7.0/24", "flannel.2", "", 8472), "10.5.7.0/24"},
		"port of another backend":  {red, of("udp", "10.6.0.0/16", "flannel-8472", "", 8472), "8472"},
		"two udp":                  {of("udp", "10.5.0.0/16", "", "", 8285), of("udp", "10.6.0.0/16", "", "", 8285), "8285"},
		"one wireguard key file":   {of("wireguard", "10.5.0.0/16", "", "/key", 1), of("wireguard", "10.6.0.0/16", "", "/key", 2), "/key"},
		"two wireguard key files":  {of("wireguard", "10.5.0.0/16", "", "/key", 1), of("wireguard", "10.6.0.0/16", "", "/other", 2), ""},
		"devices of other backend": {red, of("wireguard", "10.6.0.0/16", "flannel-wg51820", "/key", 51820), ""},
	} {
		for _, pair := range [][2]claims{{tt.one, tt.other}, {tt.other, tt.one}} {
			if why := pair[0].clash(pair[1]); (why == "") != (tt.want == "") || !strings.Contains(why, tt.want) {
				t.Errorf("%s: clash %q, want one that names %q", name, why, tt.want)
			}
		}
	}
}
