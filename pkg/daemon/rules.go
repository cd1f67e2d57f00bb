// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/firewall/iptables"
	"github.com/flanneld/flanneld/pkg/firewall/nftables"
	"github.com/flanneld/flanneld/pkg/loop"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/subnetfile"
	"github.com/flanneld/flanneld/subnet"
)

// If another program keeps changing the rules, they are repaired a few times at once, and
// then once a second, so that the repairs cost little.
const (
	repairRate  = rate.Limit(1) // per second
	repairBurst = 10
)

// repairLog is the minimum time between two log lines about repairs.
const repairLog = time.Minute

// ruleKeeper maintains the traffic rules of a session, and once removes those that other
// flavours and former networks have left.
type ruleKeeper struct {
	flavour string
	choice  *flavourChoice
	opts    options.Options
	policy  firewall.Policy
	report  func(repaired bool, err error)
	done    func() // called when no rules of former networks are left

	applier   firewall.Applier
	leftovers []leftover
	tried     chan struct{} // closed after the first attempt

	inPlace   bool // the last pass succeeded
	failing   bool // the failure is logged
	uncleaned bool // the failure to clean is logged
	cleaned   bool
	limit     *rate.Limiter
	repaired  int // number of repairs that are not logged yet
	logged    time.Time
}

func (n *network) newRuleKeeper(ctx context.Context, be backend.Backend, now lastKnown) *ruleKeeper {
	k := &ruleKeeper{
		flavour: n.host.firewall.of(ctx, n.opts.Firewall, now),
		choice:  n.host.firewall,
		opts:    n.opts,
		policy: firewall.Policy{
			Masquerade: n.opts.IPMasq, Random: !n.opts.IPMasqFullyRandomDisable,
			NonMasquerade: now.Config.NonMasquerade, Forward: n.opts.IPTablesForwardRules, Guard: n.opts.GuardTunnel, Former: now.Rules,
		},
		report: func(repaired bool, err error) {
			n.metrics.Firewall(repaired, err)
			n.ready.report(ctx, partRules, err)
		},
		done:  func() { n.state.update(func(now *lastKnown) { now.Rules = nil }) },
		tried: make(chan struct{}), limit: rate.NewLimiter(repairRate, repairBurst),
	}
	for _, one := range now.Config.Networks {
		if e, ok := now.Own.Endpoint(one.Family()); ok {
			k.policy.Networks = append(k.policy.Networks, firewall.Network{
				Network: one.Prefix, Subnet: e.Subnet, Tunnel: backend.Tunnel(be, one.Family()), HostsInside: one.Prefix.Contains(e.PublicIP),
			})
		}
	}
	return k
}

// run maintains the rules until ctx ends. They stay after that.
func (k *ruleKeeper) run(ctx context.Context) {
	var places []firewall.Place
	period := k.opts.Resync
	tried := sync.OnceFunc(func() { close(k.tried) })
	if k.policy.Wanted() {
		k.choice.warnBridges(ctx, bridgeSettings, k.policy)
	}
	if k.flavour == options.FirewallNFTables {
		k.applier, k.leftovers, places = nftables.New(), iptablesLeftovers(k.policy.Cleanup(), nil), nftables.OwnPlaces()
	} else {
		applier := iptables.New(iptables.Default)
		if k.policy.Wanted() {
			if applier = k.choice.programs(ctx, k.policy); applier == nil {
				return
			}
		}
		k.applier = applier
		inUse := k.variants(ctx, applier, tried)
		gone := k.policy.Cleanup()
		k.leftovers = append(iptablesLeftovers(gone, inUse), leftover{nftables.New(), gone})
		if slices.Contains(slices.Collect(maps.Values(inUse)), iptables.Legacy) {
			period = k.opts.IPTablesResync * 5 / 4 // the loop has a jitter of a fifth, so this is never more often than configured
		} else {
			places = iptables.Places()
		}
	}
	if !k.policy.Wanted() {
		places, period = nil, k.opts.Resync // no rules are wanted, so there is nothing to watch
	}
	l := loop.New(period, func(ctx context.Context) error {
		defer tried()
		return k.step(ctx)
	})
	var wg sync.WaitGroup
	if places != nil {
		wg.Go(func() { nftables.Watch(ctx, places, l.Wake) })
	}
	wg.Go(func() { _ = l.Run(ctx) })
	wg.Wait()
}

// variants returns the variant of the iptables programs for each family. It repeats the
// question until it is answered: a wrong variant would make the cleanup remove the rules
// in use. If no rules are wanted it does not ask.
func (k *ruleKeeper) variants(ctx context.Context, a *iptables.Applier, tried func()) map[prefix.Family]iptables.Variant {
	found := map[prefix.Family]iptables.Variant{}
	if !k.policy.Wanted() {
		return found
	}
	ctx, enough := context.WithCancel(ctx)
	defer enough()
	_ = loop.New(k.opts.Resync, func(ctx context.Context) error {
		for _, n := range k.policy.Networks {
			f := prefix.FamilyOf(n.Network.Addr())
			v, err := a.Variant(ctx, f)
			if err != nil {
				_ = k.pass(ctx) // reports the same error, and applies the rules of the other family
				tried()
				return err
			}
			found[f] = v
		}
		enough()
		return nil
	}).Run(ctx)
	return found
}

func (k *ruleKeeper) step(ctx context.Context) error {
	if err := k.pass(ctx); err != nil || k.cleaned || ctx.Err() != nil {
		return err
	}
	k.policy.Former = nil // another daemon may use such a network from now on
	return k.clean(ctx)
}

// pass applies the policy and reports the result. It returns nil if ctx has ended.
func (k *ruleKeeper) pass(ctx context.Context) error {
	changed, err := k.applier.Apply(ctx, k.policy)
	if ctx.Err() != nil && err != nil && changed {
		k.choice.untold.Store(true)
	}
	if ctx.Err() != nil && (err != nil || !changed) { // a change is reported even so
		return nil
	}
	k.note(ctx, changed, err)
	return err
}

// note logs and reports the result of a pass.
func (k *ruleKeeper) note(ctx context.Context, changed bool, err error) {
	log := klog.FromContext(ctx)
	repaired := changed && k.inPlace
	switch {
	case err != nil && !k.failing:
		log.Error(err, "traffic rules are not in place, trying again", "firewall", k.flavour)
	case err == nil && !k.inPlace:
		before := k.choice.untold.Swap(false)
		log.Info("traffic rules are in place", "firewall", k.flavour, "masquerade", k.policy.Masquerade,
			"forward", k.policy.Forward, "written", changed || before)
	}
	k.failing, k.inPlace = err != nil, err == nil
	if repaired {
		k.repaired++
	}
	if now := time.Now(); k.repaired > 0 && now.Sub(k.logged) >= repairLog {
		log.Info("repaired traffic rules that another program had changed", "times", k.repaired)
		k.repaired, k.logged = 0, now
	}
	k.report(repaired, err)
	if repaired {
		_ = k.limit.Wait(ctx) // fails only if ctx ends
	}
}

// clean removes the rules that other flavours have left. Failure does not affect
// readiness, because the session's own rules are applied.
func (k *ruleKeeper) clean(ctx context.Context) error {
	log := klog.FromContext(ctx)
	for _, l := range k.leftovers {
		removed, err := l.applier.Apply(ctx, l.gone)
		if removed && (err == nil || ctx.Err() == nil) {
			log.Info("removed traffic rules that another firewall had held", "firewall in use", k.flavour)
		}
		if err != nil {
			if !k.uncleaned && ctx.Err() == nil {
				log.Error(err, "cannot remove the rules of another firewall, trying again")
			}
			k.uncleaned = true
			return err
		}
	}
	k.cleaned = true
	k.done()
	return nil
}

// leftover is a place that may contain rules and should contain none.
type leftover struct {
	applier firewall.Applier
	gone    firewall.Policy
}

// iptablesLeftovers returns the variants of iptables, without those that a family uses.
func iptablesLeftovers(gone firewall.Policy, inUse map[prefix.Family]iptables.Variant) []leftover {
	var all []leftover
	for _, v := range []iptables.Variant{iptables.Legacy, iptables.NFT} {
		if !v.Present() {
			continue
		}
		l := leftover{applier: iptables.New(v)}
		if v == iptables.NFT {
			l.applier = whereTables{l.applier}
		}
		for _, n := range gone.Former {
			if inUse[prefix.FamilyOf(n.Addr())] != v {
				l.gone.Former = append(l.gone.Former, n)
			}
		}
		all = append(all, l)
	}
	if len(all) == 0 && len(inUse) == 0 && iptables.Default.Present() {
		all = append(all, leftover{iptables.New(iptables.Default), gone})
	}
	return all
}

// whereTables applies a policy only if nftables contains a table of iptables. Otherwise
// it runs no program.
type whereTables struct{ firewall.Applier }

// Apply implements firewall.Applier.
func (w whereTables) Apply(ctx context.Context, p firewall.Policy) (bool, error) {
	for _, name := range iptables.Tables() {
		for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
			if there, err := nftables.HasTable(f, name); err == nil && there {
				return w.Applier.Apply(ctx, p)
			}
		}
	}
	return false, nil
}

// flavourChoice decides which firewall contains the rules. It examines the host once, for
// --firewall=auto and for the variant of the iptables programs, and keeps the result
// until the daemon ends.
type flavourChoice struct {
	// background runs f independently of sessions, until the daemon ends.
	background func(f func(context.Context))

	mu          sync.Mutex
	auto        string
	why, logged string
	unfiltered  []string          // bridge settings that were warned about
	looked      chan struct{}     // closed when found is set; nil before the search
	found       *iptables.Applier // uses the programs that were found, and knows their capabilities

	// untold is set if a session has ended while it wrote rules. The next session finds
	// the result and reports it.
	untold atomic.Bool
}

// of returns the flavour for a session that begins with now. It logs the flavour if it
// differs from the last one.
func (c *flavourChoice) of(ctx context.Context, option string, now lastKnown) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	flavour, why, source := option, "--firewall says so", ""
	switch option {
	case options.FirewallAuto:
		if c.auto == "" {
			c.auto, c.why = automatic()
		}
		flavour, why = c.auto, c.why
	case options.FirewallConfig:
		flavour, why = options.FirewallIPTables, "EnableNFTables is false"
		if now.Config.NFTables {
			flavour, why = options.FirewallNFTables, "EnableNFTables is true"
		}
		if now.recalled {
			source = " in the last known configuration"
		}
	}
	if line := flavour + why; c.logged != line {
		c.logged = line
		klog.FromContext(ctx).Info("traffic rules are held by "+flavour, "because", why+source)
	}
	return flavour
}

// programs returns an Applier with the iptables programs of this host, or nil if ctx ends
// first. The search runs once. If a session ends during the search, like the one on the
// last known state when the store answers, the next session uses the result. On a busy
// host the programs that the search runs take most of the start.
func (c *flavourChoice) programs(ctx context.Context, p firewall.Policy) *iptables.Applier {
	c.mu.Lock()
	if c.looked == nil {
		looked := make(chan struct{})
		c.looked = looked
		c.background(func(ctx context.Context) {
			defer close(looked)
			c.found = lookForIPTables(ctx, p)
		})
	}
	looked := c.looked
	c.mu.Unlock()
	select {
	case <-looked:
		return c.found
	case <-ctx.Done():
		return nil
	}
}

func lookForIPTables(ctx context.Context, p firewall.Policy) *iptables.Applier {
	var families []prefix.Family
	for _, n := range p.Networks {
		families = append(families, prefix.FamilyOf(n.Network.Addr()))
	}
	v, why := iptables.Choose(ctx, families, nftables.HasTable)
	if ctx.Err() == nil && why != "" {
		klog.FromContext(ctx).Info("variant of iptables chosen", "program", v.Program(prefix.IPv4), "because", why)
	}
	a := iptables.New(v)
	for _, f := range families {
		_, _ = a.Variant(ctx, f) // the session asks again and reports an error
	}
	return a
}

// automatic chooses the flavour for --firewall=auto.
func automatic() (flavour, why string) {
	if err := nftables.Available(); err != nil {
		return options.FirewallIPTables, err.Error()
	}
	if !iptables.Default.Present() {
		return options.FirewallNFTables, "no iptables program is installed"
	}
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		if there, err := nftables.HasTable(f, "kube-proxy"); err == nil && there {
			return options.FirewallNFTables, "kube-proxy runs in nftables mode"
		}
	}
	return options.FirewallIPTables, "iptables is installed, and kube-proxy does not run in nftables mode"
}

// bridgeSettings contains the kernel's settings about whether bridged packets pass
// netfilter.
const bridgeSettings = "/proc/sys/net/bridge"

// warnBridges logs, once for each family, that packets between pods on one bridge bypass
// netfilter. Their answers then keep the address of the pod that serves a Service. This
// is so in every mode of kube-proxy, because iptables and nftables undo their translation
// only if netfilter sees the answer.
func (c *flavourChoice) warnBridges(ctx context.Context, settings string, p firewall.Policy) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range p.Networks {
		name := "bridge-nf-call-iptables"
		if n.Network.Addr().Is6() {
			name = "bridge-nf-call-ip6tables"
		}
		value, err := os.ReadFile(filepath.Join(settings, name))
		problem := map[bool]string{true: "br_netfilter is not loaded", false: "br_netfilter is switched off"}[err != nil]
		if err == nil && strings.TrimSpace(string(value)) != "0" || slices.Contains(c.unfiltered, name) {
			continue
		}
		c.unfiltered = append(c.unfiltered, name)
		klog.FromContext(ctx).Error(nil, problem+": a pod that talks to a service which is served by a pod "+
			"of the same host may get no answer; load the module br_netfilter and set this to 1", "sysctl", "net.bridge."+name)
	}
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

// formerNetworks returns the networks outside of cfg for which an earlier process may
// have created rules.
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
