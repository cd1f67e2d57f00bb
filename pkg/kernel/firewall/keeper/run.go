// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/loop"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/iptables"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
)

// If another program keeps changing the rules, a Keep repairs them a few times without a pause,
// and then once a second, so that the repairs cost little.
const (
	repairRate  = 1 // per second
	repairBurst = 10
)

// Keep maintains the rules of p until ctx ends. The rules stay after that. Keep calls tried
// once, after the first attempt to apply them, even if the attempt fails. If ctx ends before
// an attempt, Keep may return without that call. A Keeper maintains one policy at a time:
// the caller calls Keep again only after the last Keep has returned.
func (k *Keeper) Keep(ctx context.Context, c Choice, p firewall.Policy, tried func()) {
	newRun(k, k.choose(ctx, c), p, tried).maintain(ctx)
}

// choose returns the flavour for a run, which is never Auto, and logs a change.
func (k *Keeper) choose(ctx context.Context, c Choice) Flavour {
	if c.Flavour == Auto {
		c.Flavour, c.Reason = k.host.automatic()
	}
	source := c.Source
	c.Source = ""
	if c != k.logged {
		k.logged = c
		klog.FromContext(ctx).Info("firewall chosen", "firewall", string(c.Flavour), "because", c.Reason+source)
	}
	k.inUse.Store(c.Flavour)
	return c.Flavour
}

// run is one call of Keep. It maintains one policy.
type run struct {
	keeper  *Keeper
	flavour Flavour
	policy  firewall.Policy
	tried   func() // called after each attempt; only the first call has an effect

	rules     *writer
	leftovers []leftover

	inPlace   bool // the last pass succeeded
	failing   bool // the failure is logged
	uncleaned bool // the failure to clean is logged
	cleaned   bool
	repairs   *loglimit.Repairs
}

func newRun(k *Keeper, f Flavour, p firewall.Policy, tried func()) *run {
	return &run{
		keeper: k, flavour: f, policy: p, tried: sync.OnceFunc(tried),
		repairs: loglimit.NewRepairs(repairRate, repairBurst, "repaired traffic rules that another program had changed", "times"),
	}
}

func (r *run) maintain(ctx context.Context) {
	if r.policy.Wanted() {
		r.keeper.host.warnBridges(ctx, bridgeSettings, r.policy)
	}

	period, places := r.prepare(ctx)
	if ctx.Err() != nil {
		return
	}
	defer r.rules.leave(r.keeper)

	l := loop.New(period, func(ctx context.Context) error {
		defer r.tried()
		return r.step(ctx)
	})

	var wg sync.WaitGroup
	if len(places) > 0 {
		wg.Go(func() { r.keeper.host.watch(ctx, places, l.Wake) })
	}
	_ = l.Run(ctx)
	wg.Wait()
}

// prepare chooses the firewall, and finds others with leftovers. It returns the resync period, and the
// chains whose changes the kernel announces. If ctx ends, the caller must not use r.
func (r *run) prepare(ctx context.Context) (period time.Duration, places []firewall.Place) {
	period = r.keeper.config.Resync
	host := r.keeper.host
	of := families(r.policy)
	var inUse map[prefix.Family]iptables.Variant
	switch wanted := r.policy.Wanted(); {
	case r.flavour == NFTables:
		r.rules = host.writer("nftables", of, nftables.New())
		if wanted { // otherwise there is nothing to watch
			places = nftables.OwnPlaces()
		}
	case !wanted: // there is no need to examine the host
		r.rules = host.writer("iptables", of, iptables.New(iptables.Default))
	default:
		programs := host.programs(ctx, of)
		if programs == nil {
			return 0, nil
		}
		r.rules = host.writer("chosen iptables", of, programs.Applier())
		inUse = r.variants(ctx, programs)
		if slices.Contains(slices.Collect(maps.Values(inUse)), iptables.Legacy) {
			period = r.keeper.config.LegacyResync * 5 / 4 // the loop has a jitter of a fifth, so this is never more often than configured
		} else {
			places = iptables.Places()
		}
	}
	r.leftovers = leftovers(r.flavour, r.policy.Cleanup(), inUse)
	return period, places
}

// variants returns the variant of the iptables programs for each family of the policy. It tries until it
// succeeds or ctx ends: with a wrong variant the cleanup would remove the rules in use.
func (r *run) variants(ctx context.Context, p *iptables.Programs) map[prefix.Family]iptables.Variant {
	found := map[prefix.Family]iptables.Variant{}
	var pauses wait.Backoff
	for ctx.Err() == nil {
		var err error
		for _, f := range families(r.policy) {
			if found[f], err = p.Variant(ctx, f); err != nil {
				break
			}
		}
		if err == nil {
			return found
		}

		_ = r.pass(ctx) // reports the same error, and applies the rules of the other family
		r.tried()
		_ = pauses.Wait(ctx, 0) // the loop notices the end of ctx
	}
	return nil
}

// step applies the policy, and then removes the rules in other firewalls, once in the run.
func (r *run) step(ctx context.Context) error {
	if err := r.pass(ctx); err != nil || r.cleaned || ctx.Err() != nil {
		return err
	}
	r.policy.Former = nil // another daemon may use a former network from now on
	return r.clean(ctx)
}

// pass applies the policy and reports the result.
func (r *run) pass(ctx context.Context) error {
	w := r.rules.apply(ctx, r.keeper, r.policy)
	if ctx.Err() != nil && (w.err != nil || !w.changed) { // a successful change is reported all the same
		r.keeper.unreported = r.keeper.unreported || w.changed
		return nil
	}
	r.note(ctx, w)
	return w.err
}

// note logs and reports the result of a pass, and pauses after too many repairs.
func (r *run) note(ctx context.Context, w written) {
	log := klog.FromContext(ctx)
	err := w.err
	repaired := w.changed && r.inPlace && !w.joined // a pass with a new policy writes anyway

	if err != nil && !r.failing {
		log.Error(err, "traffic rules are not in place, trying again", "firewall", string(r.flavour))
	}
	if err == nil && !r.inPlace {
		log.Info("traffic rules are in place", "firewall", string(r.flavour), "masquerade", r.policy.Masquerade,
			"forward", r.policy.Forward, "written", w.changed || r.keeper.unreported)
		r.keeper.unreported = false
	}

	r.failing = err != nil
	r.inPlace = err == nil

	r.repairs.Note(ctx, map[bool]int{true: 1}[repaired])
	r.keeper.config.Report(ctx, repaired, err)
	_ = wait.For(ctx, r.repairs.Pause()) // the loop notices the end of ctx
}

// clean removes the rules in other firewalls. A failure does not affect readiness, because the run's own
// rules are applied.
func (r *run) clean(ctx context.Context) error {
	log := klog.FromContext(ctx)
	for _, l := range r.leftovers {
		w := r.keeper.host.writer("leftovers in "+l.name, nil, l.applier)
		result := w.apply(ctx, r.keeper, l.gone)
		w.leave(r.keeper)
		if result.changed && (result.err == nil || ctx.Err() == nil) {
			log.Info("removed traffic rules from another firewall", "firewall in use", string(r.flavour))
		}
		if result.err != nil {
			if !r.uncleaned && ctx.Err() == nil {
				log.Error(result.err, "cannot remove the rules of another firewall, trying again")
			}
			r.uncleaned = true
			return result.err
		}
	}

	r.cleaned = true
	r.keeper.config.Cleaned()
	return nil
}
