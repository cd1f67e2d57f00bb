// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
)

// TestClaims checks which claims of two networks clash. The clash must name what both need, whichever
// network is compared with the other.
func TestClaims(t *testing.T) {
	of := func(backend, network, device, file string, number int) claims {
		c := claims{networks: []netip.Prefix{netip.MustParsePrefix(network)}, ports: map[string][]int{backend: {number}}}
		if device != "" {
			c.names = append(c.names, "device "+device)
		}
		if file != "" {
			c.names = append(c.names, "file "+file)
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

// TestClaimsOfAMigration checks that each of the two backends has its own ports: only vxlan shares
// its port with vxlan.
func TestClaimsOfAMigration(t *testing.T) {
	catalog, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	of := func(text string) claims {
		cfg, err := subnet.ParseConfig([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		a := netip.MustParseAddr("192.0.2.1")
		eth0 := underlay.Interface{Name: "eth0", MTU: 1500, Addrs: []underlay.Address{{Local: a, Public: a}}}
		be, _, err := catalog.New(backend.Env{Network: "any", Config: cfg, Underlay: eth0})
		if err != nil {
			t.Fatal(err)
		}
		return claimsOf(cfg, be.Describe())
	}
	red := of(`{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}`)
	for name, tt := range map[string]struct{ other, want string }{
		"to vxlan":                     {`{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"},"NextBackend":{"Type":"vxlan","VNI":2}}`, ""},
		"from udp to vxlan":            {`{"Network":"10.6.0.0/16","Backend":{"Type":"udp"},"NextBackend":{"Type":"vxlan","VNI":2}}`, ""},
		"from vxlan to vxlan":          {`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":2},"NextBackend":{"Type":"vxlan","VNI":3}}`, ""},
		"from vxlan to its port":       {`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":2,"Port":1},"NextBackend":{"Type":"udp","Port":8472}}`, "8472"},
		"from the port to vxlan":       {`{"Network":"10.6.0.0/16","Backend":{"Type":"udp","Port":8472},"NextBackend":{"Type":"vxlan","VNI":2,"Port":1}}`, "8472"},
		"no migration, but with udp":   {`{"Network":"10.6.0.0/16","Backend":{"Type":"udp","Port":8472}}`, "8472"},
		"vxlan with GBP on its port":   {`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":2,"GBP":true}}`, "8472"},
		"no migration, but with vxlan": {`{"Network":"10.6.0.0/16","Backend":{"Type":"vxlan","VNI":2}}`, ""},
	} {
		other := of(tt.other)
		for _, pair := range [][2]claims{{red, other}, {other, red}} {
			if why := pair[0].clash(pair[1]); (why == "") != (tt.want == "") || !strings.Contains(why, tt.want) {
				t.Errorf("%s: clash %q, want one that names %q", name, why, tt.want)
			}
		}
	}
}
