// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/firewall/iptables"
	"github.com/flanneld/flanneld/pkg/firewall/nftables"
	"github.com/flanneld/flanneld/pkg/loop"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/repair"
	"github.com/flanneld/flanneld/pkg/wait"
)

// If another program keeps changing the rules, a session repairs them a few times without a
// pause, and then once a second, so that the repairs cost little.
const (
	repairRate  = 1 // per second
	repairBurst = 10
)

// Keep maintains the rules of p until ctx ends. The rules stay after that. Keep calls tried
// once, after the first attempt to apply them, even if that fails. It does not call tried
// if ctx ends before. A Keeper maintains one policy at a time: the caller calls Keep again
// only after the last Keep has returned.
func (k *Keeper) Keep(ctx context.Context, c Choice, p firewall.Policy, tried func()) {
	newSession(k, k.choose(ctx, c), p, tried).run(ctx)
}

// choose returns the flavour for a session, which is never Auto. It logs the flavour if the
// flavour or the reason differs from the last session.
func (k *Keeper) choose(ctx context.Context, c Choice) Flavour {
	if c.Flavour == Auto {
		c.Flavour, c.Reason = k.host.automatic()
	}
	source := c.Source
	if c.Source = ""; c != k.logged {
		k.logged = c
		klog.FromContext(ctx).Info("firewall chosen", "firewall", string(c.Flavour), "because", c.Reason+source)
	}
	k.inUse.Store(c.Flavour)
	return c.Flavour
}

// session is one call of Keep. It maintains one policy.
type session struct {
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
	repairs   *repair.Limiter
}

func newSession(k *Keeper, f Flavour, p firewall.Policy, tried func()) *session {
	return &session{
		keeper: k, flavour: f, policy: p, tried: sync.OnceFunc(tried),
		repairs: repair.New(repairRate, repairBurst, "repaired traffic rules that another program had changed", "times"),
	}
}

// run maintains the policy until ctx ends.
func (s *session) run(ctx context.Context) {
	if s.policy.Wanted() {
		s.keeper.host.warnBridges(ctx, bridgeSettings, s.policy)
	}
	period, places := s.prepare(ctx)
	if ctx.Err() != nil {
		return
	}
	defer s.rules.leave(s.keeper)
	l := loop.New(period, func(ctx context.Context) error {
		defer s.tried()
		return s.step(ctx)
	})
	var wg sync.WaitGroup
	if len(places) > 0 {
		wg.Go(func() { watch(ctx, s.keeper.host.watcher(places), places, l.Wake) })
	}
	_ = l.Run(ctx)
	wg.Wait()
}

// prepare chooses the firewall that applies the rules, and finds the other firewalls that
// may contain leftovers. It returns the resync period, and the chains whose changes the
// kernel announces. If ctx ends, it returns early, and run must not use the session.
func (s *session) prepare(ctx context.Context) (period time.Duration, places []firewall.Place) {
	period = s.keeper.config.Resync
	host, of := s.keeper.host, families(s.policy)
	var inUse map[prefix.Family]iptables.Variant
	switch wanted := s.policy.Wanted(); {
	case !wanted && s.flavour == NFTables: // there is nothing to watch
		s.rules = host.writer("nftables", of, nftables.New())
	case !wanted: // there is no need to examine the host
		s.rules = host.writer("iptables", of, iptables.New(iptables.Default))
	case s.flavour == NFTables:
		s.rules, places = host.writer("nftables", of, nftables.New()), nftables.OwnPlaces()
	default:
		programs := host.programs(ctx, of)
		if programs == nil {
			return 0, nil
		}
		s.rules = host.writer("chosen iptables", of, programs.Applier())
		inUse = s.variants(ctx, programs)
		if slices.Contains(slices.Collect(maps.Values(inUse)), iptables.Legacy) {
			period = s.keeper.config.LegacyResync * 5 / 4 // the loop has a jitter of a fifth, so this is never more often than configured
		} else {
			places = iptables.Places()
		}
	}
	s.leftovers = leftovers(s.flavour, s.policy.Cleanup(), inUse)
	return period, places
}

// variants returns the variant of the iptables programs for each family of the policy. It
// repeats the detection until it succeeds or ctx ends, because with a wrong variant the
// cleanup would remove the rules in use.
func (s *session) variants(ctx context.Context, p *iptables.Programs) map[prefix.Family]iptables.Variant {
	found := map[prefix.Family]iptables.Variant{}
	ctx, enough := context.WithCancel(ctx)
	defer enough()
	_ = loop.New(s.keeper.config.Resync, func(ctx context.Context) error {
		for _, f := range families(s.policy) {
			v, err := p.Variant(ctx, f)
			if err != nil {
				_ = s.pass(ctx) // reports the same error, and applies the rules of the other family
				s.tried()
				return err
			}
			found[f] = v
		}
		enough()
		return nil
	}).Run(ctx)
	return found
}

// step applies the policy. If that succeeds, it also removes the rules in other firewalls,
// until this has succeeded once in the session.
func (s *session) step(ctx context.Context) error {
	if err := s.pass(ctx); err != nil || s.cleaned || ctx.Err() != nil {
		return err
	}
	s.policy.Former = nil // another daemon may use a former network from now on
	return s.clean(ctx)
}

// pass applies the policy and reports the result. If ctx has ended, it returns nil, and
// reports only a change that has succeeded.
func (s *session) pass(ctx context.Context) error {
	w := s.rules.apply(ctx, s.keeper, s.policy)
	changed, err := w.changed, w.err
	if ctx.Err() != nil && err != nil && changed {
		s.keeper.unreported = true
	}
	if ctx.Err() != nil && (err != nil || !changed) { // a successful change is reported even after the end of ctx
		return nil
	}
	s.note(ctx, w)
	return err
}

// note logs and reports the result of a pass. If there are too many repairs, it then
// pauses.
func (s *session) note(ctx context.Context, w written) {
	log, err := klog.FromContext(ctx), w.err
	repaired := w.changed && s.inPlace && !w.joined // a pass with a new policy writes anyway
	switch {
	case err != nil && !s.failing:
		log.Error(err, "traffic rules are not in place, trying again", "firewall", string(s.flavour))
	case err == nil && !s.inPlace:
		log.Info("traffic rules are in place", "firewall", string(s.flavour), "masquerade", s.policy.Masquerade,
			"forward", s.policy.Forward, "written", w.changed || s.keeper.unreported)
		s.keeper.unreported = false
	}
	s.failing, s.inPlace = err != nil, err == nil
	n := 0
	if repaired {
		n = 1
	}
	s.repairs.Note(ctx, n)
	s.keeper.config.Report(ctx, repaired, err)
	_ = wait.For(ctx, s.repairs.Pause()) // the loop notices the end of ctx
}

// clean removes the rules in other firewalls, and stops at the first failure. A failure
// does not affect readiness, because the session's own rules are applied.
func (s *session) clean(ctx context.Context) error {
	log := klog.FromContext(ctx)
	for _, l := range s.leftovers {
		w := s.keeper.host.writer("leftovers in "+l.name, nil, l.applier)
		result := w.apply(ctx, s.keeper, l.gone)
		w.leave(s.keeper)
		removed, err := result.changed, result.err
		if removed && (err == nil || ctx.Err() == nil) {
			log.Info("removed traffic rules from another firewall", "firewall in use", string(s.flavour))
		}
		if err != nil {
			if !s.uncleaned && ctx.Err() == nil {
				log.Error(err, "cannot remove the rules of another firewall, trying again")
			}
			s.uncleaned = true
			return err
		}
	}
	s.cleaned = true
	s.keeper.config.Cleaned()
	return nil
}
