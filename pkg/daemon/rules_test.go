// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/rules"
	"github.com/flanneld/flanneld/subnet"
)

func TestFormerNetworks(t *testing.T) {
	p := netip.MustParsePrefix
	config := func(prefixes ...string) (c subnet.Config) {
		for _, s := range prefixes {
			c.Networks = append(c.Networks, subnet.Network{Prefix: p(s)})
		}
		return c
	}
	last := lastKnown{
		Config: config("10.5.0.0/16", "fd00:5::/48"), Rules: []netip.Prefix{p("10.3.0.0/16"), p("10.5.0.0/16")},
		Former: []former{{Config: config("10.4.0.0/16", "10.6.0.0/16")}},
	}
	got := formerNetworks(last, config("10.6.0.0/16"))
	want := []netip.Prefix{p("10.3.0.0/16"), p("10.5.0.0/16"), p("fd00:5::/48"), p("10.4.0.0/16")}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := formerNetworks(lastKnown{}, config("10.6.0.0/16")); got != nil {
		t.Errorf("a first start: %v", got)
	}
}

func TestFirewallChoice(t *testing.T) {
	session := func(nftables, recalled bool) lastKnown {
		return lastKnown{Config: subnet.Config{NFTables: nftables}, recalled: recalled}
	}
	const flag, last = "--firewall says so", " in the last known configuration"
	for _, tt := range []struct {
		option string
		now    lastKnown
		want   rules.Choice
	}{
		{options.FirewallConfig, session(false, false), rules.Choice{Flavour: rules.IPTables, Reason: "EnableNFTables is false"}},
		{options.FirewallConfig, session(true, false), rules.Choice{Flavour: rules.NFTables, Reason: "EnableNFTables is true"}},
		{options.FirewallConfig, session(true, true), rules.Choice{Flavour: rules.NFTables, Reason: "EnableNFTables is true", Source: last}},
		{options.FirewallIPTables, session(true, true), rules.Choice{Flavour: rules.IPTables, Reason: flag}},
		{options.FirewallNFTables, session(false, false), rules.Choice{Flavour: rules.NFTables, Reason: flag}},
		{options.FirewallAuto, session(true, false), rules.Choice{Flavour: rules.Auto, Reason: flag}},
	} {
		if got := firewallChoice(tt.option, tt.now); got != tt.want {
			t.Errorf("--firewall=%s with EnableNFTables %v: %+v, want %+v", tt.option, tt.now.Config.NFTables, got, tt.want)
		}
	}
}
