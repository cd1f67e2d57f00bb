// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/keeper"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/report/metrics"
)

// newRuleKeeper returns the keeper of the network's traffic rules.
func newRuleKeeper(h *keeper.Host, o options.Options, state *lastknown.Store, ready *readiness, m *metrics.Metrics) *keeper.Keeper {
	return h.Keeper(keeper.Config{
		Resync: o.Resync, LegacyResync: o.IPTablesResync,
		Report: func(_ context.Context, repaired bool, err error) {
			m.Firewall(repaired, err)
			ready.report(partRules, err)
		},
		Cleaned: func() { state.Update(func(now *lastknown.State) { now.Rules = nil }) },
	})
}

// firewallChoice returns the flavour of the firewall, and the reason for it. option is the
// value of --firewall, which may leave the choice to the configuration.
func firewallChoice(option string, now lastknown.State) keeper.Choice {
	if option != options.FirewallConfig {
		return keeper.Choice{Flavour: keeper.Flavour(option), Reason: "--firewall says so"}
	}
	c := keeper.Choice{Flavour: keeper.IPTables, Reason: "EnableNFTables is false"}
	if now.Config.NFTables {
		c = keeper.Choice{Flavour: keeper.NFTables, Reason: "EnableNFTables is true"}
	}
	if now.Recalled {
		c.Source = " in the last known configuration"
	}
	return c
}

// keepRules keeps the traffic rules of a session until ctx ends, and changes them when the session or
// the other networks need other rules. It calls tried after the first attempt to apply them.
func (n *Network) keepRules(ctx context.Context, s *session, tried func()) {
	for ctx.Err() == nil {
		now := n.last()
		policy, others := n.wantedRules(s.be, now)
		unchanged, stop := context.WithCancel(ctx)
		go func() {
			defer stop()
			select {
			case <-others:
			case <-s.rules:
			case <-unchanged.Done():
			}
		}()
		n.rules.Keep(unchanged, firewallChoice(n.opts.Firewall, now), policy, tried)
		stop()
	}
}

// guardFirst makes one attempt to write the traffic rules of the next session before its backend starts, if
// that backend opens a tunnel that the rules of the last session do not guard. Otherwise pods could send into
// the tunnel until the session writes its rules. The last session must have ended.
func (n *Network) guardFirst(ctx context.Context, last firewall.Policy, be backend.Backend, now lastknown.State) {
	var guarded []firewall.Payload
	for _, one := range last.Networks {
		guarded = append(guarded, one.Tunnels...)
	}

	policy, _ := n.wantedRules(be, now)
	opened := slices.ContainsFunc(policy.Networks, func(one firewall.Network) bool {
		return slices.ContainsFunc(one.Tunnels, func(t firewall.Payload) bool { return !slices.Contains(guarded, t) })
	})
	if opened {
		ctx, tried := context.WithCancel(ctx)
		n.rules.Keep(ctx, firewallChoice(n.opts.Firewall, now), policy, tried)
	}
}

// wantedRules returns the traffic rules of a session, and a channel that is closed when the prefixes of other
// networks change, or nil. The rules also guard the tunnels of the backends in now.Former, because the host receives
// packets from these tunnels until they are removed.
func (n *Network) wantedRules(be backend.Backend, now lastknown.State) (policy firewall.Policy, changed <-chan struct{}) {
	policy = firewall.Policy{
		Masquerade: n.opts.IPMasq, Random: !n.opts.IPMasqFullyRandomDisable, NonMasquerade: now.Config.NonMasquerade,
		Forward: n.opts.IPTablesForwardRules, Guard: n.opts.GuardTunnel, Former: now.Rules,
		Several: n.name != "",
	}
	if n.others != nil {
		var others []netip.Prefix
		others, changed = n.others()
		policy.NonMasquerade = slices.Concat(policy.NonMasquerade, others)
	}

	d := be.Describe()
	for _, f := range now.Former {
		d = d.Join(n.describe(f))
	}
	for _, one := range now.Config.Networks {
		if e, ok := now.Own.Endpoint(one.Family()); ok {
			policy.Networks = append(policy.Networks, firewall.Network{
				Network: one.Prefix, Subnet: e.Subnet, Tunnels: d.Tunnels[one.Family()],
				HostsInside: one.Prefix.Contains(e.PublicIP),
			})
		}
	}
	return policy, changed
}
