// SPDX-License-Identifier: Apache-2.0

package network

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/keeper"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/subnet"
)

func TestFirewallChoice(t *testing.T) {
	session := func(nftables, recalled bool) lastknown.State {
		return lastknown.State{Config: subnet.Config{NFTables: nftables}, Recalled: recalled}
	}
	const flag, last = "--firewall says so", " in the last known configuration"
	for _, tt := range []struct {
		option string
		now    lastknown.State
		want   keeper.Choice
	}{
		{options.FirewallConfig, session(false, false), keeper.Choice{Flavour: keeper.IPTables, Reason: "EnableNFTables is false"}},
		{options.FirewallConfig, session(true, false), keeper.Choice{Flavour: keeper.NFTables, Reason: "EnableNFTables is true"}},
		{options.FirewallConfig, session(true, true), keeper.Choice{Flavour: keeper.NFTables, Reason: "EnableNFTables is true", Source: last}},
		{options.FirewallIPTables, session(true, true), keeper.Choice{Flavour: keeper.IPTables, Reason: flag}},
		{options.FirewallNFTables, session(false, false), keeper.Choice{Flavour: keeper.NFTables, Reason: flag}},
		{options.FirewallAuto, session(true, false), keeper.Choice{Flavour: keeper.Auto, Reason: flag}},
	} {
		if got := firewallChoice(tt.option, tt.now); got != tt.want {
			t.Errorf("--firewall=%s with EnableNFTables %v: %+v, want %+v", tt.option, tt.now.Config.NFTables, got, tt.want)
		}
	}
}

// TestGuardedTunnels checks that the tunnels of a former backend are guarded while its objects exist.
// Otherwise pods could send packets into them.
func TestGuardedTunnels(t *testing.T) {
	catalog, err := builtin.New(options.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p := &Network{host: &Host{}, catalog: catalog, store: silent{}, state: lastknown.NewStore(nil), opts: options.Options{GuardTunnel: true}}
	config := func(backend string) subnet.Config {
		c, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16",` + backend + `}`))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	eth0 := link(1500, "192.0.2.1")
	vxlan, ipip := firewall.Payload{Protocol: firewall.UDP, Port: 8472}, firewall.Payload{Protocol: 4}
	for _, tt := range []struct {
		name, now, former string
		want              []firewall.Payload
	}{
		{"no former backend", `"Backend":{"Type":"ipip"}`, "", []firewall.Payload{ipip}},
		{"finished", `"Backend":{"Type":"ipip"}`, `"Backend":{"Type":"vxlan"},"NextBackend":{"Type":"ipip"}`, []firewall.Payload{ipip, vxlan}},
		{"aborted", `"Backend":{"Type":"vxlan"}`, `"Backend":{"Type":"vxlan"},"NextBackend":{"Type":"ipip"}`, []firewall.Payload{vxlan, ipip}},
		{"to a backend without a tunnel", `"Backend":{"Type":"host-gw"}`, `"Backend":{"Type":"vxlan"}`, []firewall.Payload{vxlan}},
		{"a former backend of a newer version", `"Backend":{"Type":"ipip"}`, `"Backend":{"Type":"carrier-pigeon"}`, []firewall.Payload{ipip}},
	} {
		now := lastknown.State{Config: config(tt.now), Interface: eth0, Own: subnet.Lease{Endpoints: []subnet.Endpoint{{
			Subnet: netip.MustParsePrefix("10.5.1.0/24"), PublicIP: netip.MustParseAddr("192.0.2.1"),
		}}}}
		if tt.former != "" {
			now.Former = []lastknown.Former{{Config: config(tt.former), Interface: eth0}}
		}
		be, _, err := catalog.New(p.env(eth0, now.Config))
		if err != nil {
			t.Fatal(err)
		}
		policy, _ := p.wantedRules(be, now)
		if diff := cmp.Diff(tt.want, policy.Networks[0].Tunnels); diff != "" {
			t.Errorf("%s: tunnels (-want +got):\n%s", tt.name, diff)
		}
	}
}
