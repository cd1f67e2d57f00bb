// SPDX-License-Identifier: Apache-2.0

package network

import (
	"testing"

	"github.com/flanneld/flanneld/pkg/daemon/lastknown"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/rules"
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
