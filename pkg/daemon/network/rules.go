// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/daemon/lastknown"
	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/rules"
)

// newRuleKeeper returns the keeper of the network's traffic rules.
func (p *parts) newRuleKeeper(h *rules.Host) *rules.Keeper {
	return h.Keeper(rules.Config{
		Resync: p.opts.Resync, LegacyResync: p.opts.IPTablesResync,
		Report: func(ctx context.Context, repaired bool, err error) {
			p.metrics.Firewall(repaired, err)
			p.ready.report(ctx, partRules, err)
		},
		Cleaned: func() { p.state.Update(func(now *lastknown.State) { now.Rules = nil }) },
	})
}

// firewallChoice returns the firewall that option, the value of --firewall, and the
// configuration ask for.
func firewallChoice(option string, now lastknown.State) rules.Choice {
	if option != options.FirewallConfig {
		return rules.Choice{Flavour: rules.Flavour(option), Reason: "--firewall says so"}
	}
	c := rules.Choice{Flavour: rules.IPTables, Reason: "EnableNFTables is false"}
	if now.Config.NFTables {
		c = rules.Choice{Flavour: rules.NFTables, Reason: "EnableNFTables is true"}
	}
	if now.Recalled {
		c.Source = " in the last known configuration"
	}
	return c
}

// keepRules keeps the traffic rules of a session until ctx ends. They follow what the session and
// the other networks need. It calls tried after the first attempt to apply them.
func (p *parts) keepRules(ctx context.Context, s *session, tried func()) {
	for ctx.Err() == nil {
		now := *s.begin.Load()
		choice, policy := firewallChoice(p.opts.Firewall, now), p.rulePolicy(s.be, now)
		var others <-chan struct{} // nil never receives
		if p.others != nil {
			var prefixes []netip.Prefix
			prefixes, others = p.others()
			policy.NonMasquerade = slices.Concat(policy.NonMasquerade, prefixes)
		}
		keeping, stop := context.WithCancel(ctx)
		go func() {
			defer stop()
			select {
			case <-others:
			case <-s.rules:
			case <-keeping.Done():
			}
		}()
		p.rules.Keep(keeping, choice, policy, tried)
		stop()
	}
}

// rulePolicy returns the traffic rules of a session.
func (p *parts) rulePolicy(be backend.Backend, now lastknown.State) firewall.Policy {
	policy := firewall.Policy{
		Masquerade: p.opts.IPMasq, Random: !p.opts.IPMasqFullyRandomDisable, NonMasquerade: now.Config.NonMasquerade,
		Forward: p.opts.IPTablesForwardRules, Guard: p.opts.GuardTunnel, Former: now.Rules,
		Several: p.name != "",
	}
	for _, one := range now.Config.Networks {
		if e, ok := now.Own.Endpoint(one.Family()); ok {
			policy.Networks = append(policy.Networks, firewall.Network{
				Network: one.Prefix, Subnet: e.Subnet, Tunnels: backend.Tunnels(be, one.Family()), HostsInside: one.Prefix.Contains(e.PublicIP),
			})
		}
	}
	return policy
}
