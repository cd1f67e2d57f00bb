// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/rules"
	"github.com/flanneld/flanneld/pkg/subnetfile"
	"github.com/flanneld/flanneld/subnet"
)

// newRuleKeeper returns the keeper of the network's traffic rules.
func (n *network) newRuleKeeper(h *rules.Host) *rules.Keeper {
	return h.Keeper(rules.Config{
		Resync: n.opts.Resync, LegacyResync: n.opts.IPTablesResync,
		Report: func(ctx context.Context, repaired bool, err error) {
			n.metrics.Firewall(repaired, err)
			n.ready.report(ctx, partRules, err)
		},
		Cleaned: func() { n.state.update(func(now *lastKnown) { now.Rules = nil }) },
	})
}

// firewallChoice returns the firewall that option, the value of --firewall, and the
// configuration ask for.
func firewallChoice(option string, now lastKnown) rules.Choice {
	if option != options.FirewallConfig {
		return rules.Choice{Flavour: rules.Flavour(option), Reason: "--firewall says so"}
	}
	c := rules.Choice{Flavour: rules.IPTables, Reason: "EnableNFTables is false"}
	if now.Config.NFTables {
		c = rules.Choice{Flavour: rules.NFTables, Reason: "EnableNFTables is true"}
	}
	if now.recalled {
		c.Source = " in the last known configuration"
	}
	return c
}

// keepRules keeps the traffic rules of a session until ctx ends. It calls tried after the first
// attempt to apply them.
func (n *network) keepRules(ctx context.Context, be backend.Backend, now lastKnown, tried func()) {
	choice, policy := firewallChoice(n.opts.Firewall, now), n.rulePolicy(be, now)
	if n.others == nil {
		n.rules.Keep(ctx, choice, policy, tried)
		return
	}
	for ctx.Err() == nil {
		prefixes, changed := n.others()
		present := policy
		present.NonMasquerade = slices.Concat(policy.NonMasquerade, prefixes)
		keeping, stop := context.WithCancel(ctx)
		go func() {
			defer stop()
			select {
			case <-changed:
			case <-keeping.Done():
			}
		}()
		n.rules.Keep(keeping, choice, present, tried)
		stop()
	}
}

// rulePolicy returns the traffic rules of a session.
func (n *network) rulePolicy(be backend.Backend, now lastKnown) firewall.Policy {
	p := firewall.Policy{
		Masquerade: n.opts.IPMasq, Random: !n.opts.IPMasqFullyRandomDisable, NonMasquerade: now.Config.NonMasquerade,
		Forward: n.opts.IPTablesForwardRules, Guard: n.opts.GuardTunnel, Former: now.Rules,
		Several: n.name != "",
	}
	for _, one := range now.Config.Networks {
		if e, ok := now.Own.Endpoint(one.Family()); ok {
			p.Networks = append(p.Networks, firewall.Network{
				Network: one.Prefix, Subnet: e.Subnet, Tunnel: backend.Tunnel(be, one.Family()), HostsInside: one.Prefix.Contains(e.PublicIP),
			})
		}
	}
	return p
}

// networksOfFile returns the networks in the subnet file at path, which an earlier process or
// another daemon has written.
func networksOfFile(path string) []netip.Prefix {
	var named []netip.Prefix
	previous, _ := subnetfile.Read(path) // previousSubnets reports its errors
	for _, e := range previous.Entries {
		if e.Network.IsValid() {
			named = append(named, e.Network)
		}
	}
	return named
}

// formerNetworks returns the networks for which an earlier process may have created rules,
// except for those in cfg.
func formerNetworks(last lastKnown, cfg subnet.Config) []netip.Prefix {
	all := append(slices.Clone(last.Rules), networks(last.Config)...)
	for _, f := range last.Former {
		all = append(all, networks(f.Config)...)
	}
	present := networks(cfg)
	var former []netip.Prefix
	for _, n := range all {
		if !slices.Contains(present, n) && !slices.Contains(former, n) {
			former = append(former, n)
		}
	}
	return former
}
