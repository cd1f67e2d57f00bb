// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// change is another network configuration, or another claim with the same configuration, and everything
// that the network needs to use it.
type change struct {
	config subnet.Config
	same   bool // the configuration stays the present one, and only the claim changes
	iface  underlay.Interface
	be     backend.Backend // nil if the backend and the lease are not affected
	claim  subnet.Claim    // the data that the host then publishes; set only with be, and if the host keeps its subnets
	own    *subnet.Lease   // the lease that the host has taken; nil if it keeps its subnets
	taking bool            // the store may have given the host a lease, although own is nil
}

// refusedPause is the mean time after which a configuration that was refused is tried again,
// because the reason may be gone, such as an interface without an IPv6 address. It is also the
// mean time after which the network repeats a failed republish.
const refusedPause = 30 * time.Second

// awaitChange waits until the network can change to another configuration, and sends that change to
// prepared. Session s goes on meanwhile, and awaitChange publishes changes of the data in its lease. A
// configuration that cannot be used is refused, and tried again later. published is closed when the store
// has the lease of s. awaitChange returns nil when it has sent a change, or at once if s uses the last known
// state. It returns ErrLeaseLost, wrapped, if this host has lost its lease, and otherwise the error of ctx.
func (r *runner) awaitChange(ctx context.Context, m Store, s *session, published <-chan struct{}, prepared chan<- *change) error {
	if s.begin.Load().Recalled { // startup reads the configuration
		return nil
	}

	var stored <-chan struct{} // set to published while changed data waits for it; nil never receives
	var due <-chan time.Time   // receives when changed data is to be published; nil never receives
	failed := false            // the last republish has failed; only the first failure is logged
	if s.behind {
		stored = published
	}

	var withdrawn <-chan struct{} // set to published in the stage Withdrawn; nil never receives
	var step <-chan time.Time     // receives when that stage ends; nil never receives
	if s.begin.Load().Config.Stage == subnet.Withdrawn {
		withdrawn = published
	}

	for ctx.Err() == nil {
		cfg, changed := r.config.next()
		var again <-chan time.Time // nil never receives
		if cfg != nil && r.config.follow {
			last, _ := r.state.Get()
			next, err := r.prepareUnless(ctx, changed, m, s, last.Withdrawn(*cfg), published)
			if err == nil {
				prepared <- next
				return nil
			}
			if ctx.Err() != nil || errors.Is(err, subnet.ErrLeaseLost) {
				return err
			}
			pause := r.retryTime()
			if errors.Is(err, subnet.ErrNoSubnets) {
				pause = retryPause // the next Acquire waits until a subnet may be free
			}
			if !errors.Is(err, errSuperseded) {
				r.config.refuse(ctx, *cfg, err)
			}
			again = time.After(pause)
		}

		select {
		case <-ctx.Done():
		case <-changed:
		case <-again:
		case <-withdrawn:
			withdrawn = nil
			step = time.After(withdrawal)

		case <-step:
			if next := r.prepareStep(ctx, changed, m, s, published); next != nil {
				prepared <- next
				return nil
			}
			step = time.After(r.retryTime())

		case <-s.reclaim:
			next := r.prepareClaim(ctx, s)
			if next == nil {
				next = r.prepareStep(ctx, changed, m, s, published)
			}
			if next != nil {
				prepared <- next
				return nil
			}

		case <-s.republish:
			s.behind = true
			// If due is set, its pause must pass first. Otherwise a store that does not answer would get a call
			// for each change.
			if due == nil {
				stored = published // two goroutines must not write this host's lease
			}

		case <-stored:
			stored, due = nil, time.After(r.turn(s))
		case <-due:
			due = nil
			err := r.republish(ctx, m, s)
			if errors.Is(err, subnet.ErrLeaseLost) {
				return err
			}
			if err != nil && ctx.Err() == nil && !failed {
				klog.FromContext(ctx).Error(err, "cannot publish this host's lease as it is now")
			}
			failed = err != nil
			if s.behind = failed; failed {
				due = time.After(r.retryTime())
			}
		}
	}
	return ctx.Err()
}

// withdrawal is how long a host that has withdrawn the data of its next backend waits before it starts a changed one.
// Until then its peers must have read that, or their packets to a device that changes are lost.
const withdrawal = 30 * time.Second

// prepareStep returns the change to the next step toward the configuration in the store. It returns nil if there is
// none, or if this host cannot take it, which it logs.
func (r *runner) prepareStep(ctx context.Context, changed <-chan struct{}, m Store, s *session, published <-chan struct{}) *change {
	now := s.begin.Load().Config
	if now.Stage == "" || r.config.hasGivenUp() {
		return nil
	}
	c, err := r.prepareUnless(ctx, changed, m, s, now.Step(), published)
	if err != nil {
		r.config.refuse(ctx, now, err)
		return nil
	}
	return c
}

// prepareClaim returns a change to the same configuration with another claim. It returns nil if the
// claim is the same, or if it fails, which it logs.
func (r *runner) prepareClaim(ctx context.Context, s *session) *change {
	now := *s.begin.Load()
	c := &change{config: now.Config, same: true, iface: now.Interface}
	var err error
	if c.be, _, err = r.catalog.New(r.env(c.iface, c.config)); err == nil {
		c.claim, err = c.be.Claim(ctx, now.Own.Claim())
	}
	if err != nil { // the backend's network asks again
		klog.FromContext(ctx).Error(err, "cannot publish more data in this host's lease")
		return nil
	}
	if reflect.DeepEqual(c.claim, now.Own.Claim()) {
		return nil
	}
	return c
}

// errSuperseded ends the preparation of a configuration because the store has another one.
var errSuperseded = errors.New("the store has another configuration")

// prepareUnless prepares the change to cfg. It returns errSuperseded, wrapped, if changed is closed before
// the change is prepared. Before it returns an error, it releases the devices that only cfg needs, and takes
// the lease of s again if the store may have replaced that lease.
func (r *runner) prepareUnless(ctx context.Context, changed <-chan struct{}, m Store, s *session, cfg subnet.Config, published <-chan struct{}) (*change, error) {
	preparing, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		select {
		case <-changed:
			stop(errSuperseded)
		case <-preparing.Done():
		}
	}()

	c, err := r.prepareChange(preparing, m, s, cfg, published)
	if err == nil {
		return c, nil
	}
	if c != nil {
		r.releaseDevices(c.be, s)
		if c.taking { // take the lease of s again
			if err := r.publish(ctx, m, s); err != nil {
				return nil, err
			}
		}
	}
	if errors.Is(context.Cause(preparing), errSuperseded) {
		err = fmt.Errorf("%w: %w", errSuperseded, err)
	}
	return nil, err
}

// prepareChange obtains what the change to cfg needs. It changes nothing on the host. If the subnets
// of s do not fit cfg, it makes the store exchange the lease of s for one with other subnets. With an
// error it may return a change whose devices are locked.
func (r *runner) prepareChange(ctx context.Context, m Store, s *session, cfg subnet.Config, published <-chan struct{}) (c *change, err error) {
	now := *s.begin.Load()
	c = &change{config: cfg, iface: now.Interface}
	if !sameFamilies(cfg, now.Config) {
		if c.iface, err = r.chooseUplink(ctx, r.underlayOptions(cfg, now), 0); err != nil {
			return nil, err
		}
	}
	if err := r.checkRanges(ctx, cfg, now.Config, c.iface); err != nil {
		return nil, err
	}

	fits := r.fits(cfg, now.Own)
	if fits && sameForwarding(now.Config, cfg) {
		return c, nil
	}

	if c.be, _, err = r.newBackend(r.env(c.iface, cfg)); err != nil {
		return nil, err
	}
	if err := r.devices.TakeAll(c.be.Scope()); err != nil {
		return c, err
	}
	had := now.Own.Claim()
	if fits {
		c.claim, err = c.be.Claim(ctx, had)
		return c, err
	}

	select {
	case <-published: // two goroutines must not write this host's lease
	case <-ctx.Done():
		return c, ctx.Err()
	}
	if err := wait.For(ctx, r.turn(s)); err != nil {
		return c, err
	}
	own, err := claimAndAcquire(ctx, c.be, had, func(claim subnet.Claim) (subnet.Lease, error) { return m.Acquire(ctx, cfg, claim) })
	if err == nil {
		c.own = &own
		return c, nil
	}
	c.taking = !errors.Is(err, subnet.ErrNoSubnets) && !errors.Is(err, subnet.ErrUnfit)
	return c, err
}

// sameFamilies reports whether both configurations have networks of the same address families.
func sameFamilies(a, b subnet.Config) bool {
	return slices.EqualFunc(a.Networks, b.Networks, func(a, b subnet.Network) bool { return a.Family() == b.Family() })
}

// sameForwarding reports whether packets between hosts travel alike with both configurations, because
// they differ only in traffic rules, or in the subnets that are assigned to new hosts. A backend then
// need not know of the change.
func sameForwarding(from, to subnet.Config) bool {
	if !slices.Equal(from.Prefixes(), to.Prefixes()) {
		return false
	}
	to.Networks = from.Networks
	to.NFTables = from.NFTables
	to.NonMasquerade = from.NonMasquerade
	return len(subnet.Changes(from, to)) == 0
}

// change makes the network use another configuration, and returns its session. If the backend does
// not start, the network goes back to the former configuration.
func (r *runner) change(ctx context.Context, s *session, c *change) (*session, error) {
	if c.be == nil {
		r.state.Update(func(now *lastknown.State) { now.Config = c.config }) // only this field, because s goes on and may change the others
		now, _ := r.state.Get()
		now.Peers = subnet.LedgerState{}
		now.Fresh = nil
		s.begin.Store(&now)
		s.rules.Send()
		r.changed(ctx, c)
		return s, nil
	}

	pause := r.turn(s)
	r.progress.change()
	s.leave(ctx)
	before, _ := r.state.Get() // only now, because the session may have cleared Former before its end
	before.Peers = s.ledger.State()
	before.Fresh = nil
	next, err := r.serveChanged(ctx, before, c, pause)
	if err == nil {
		r.changed(ctx, c)
		return next, nil
	}
	if ctx.Err() != nil {
		return nil, err
	}
	if c.same {
		klog.FromContext(ctx).Error(err, "cannot publish more data in this host's lease")
	} else {
		r.config.giveUp(ctx, c.config, err)
	}
	return r.goBack(ctx, before, c)
}

// changed records and logs that the network uses the configuration of c from now on.
func (r *runner) changed(ctx context.Context, c *change) {
	r.config.use(c.config)
	log := klog.FromContext(ctx).WithValues("backend", c.config.BackendType, "next", c.config.NextType)
	switch {
	case c.same:
		log.Info("this host's lease gets more data")
		return
	case c.config.Stage == subnet.Finished:
		log.Info("the migration is finished: this host keeps the former backend for peers that it does not reach by the next one")
		return
	case c.config.Stage == subnet.Leaving:
		log.Info("this host sends to all peers by the next backend, and keeps the former one until all hosts do")
		return
	case c.config.Stage == subnet.Withdrawn:
		log.Info("NextBackend has changed: this host goes back to the present backend first")
		return
	}
	if more, _ := r.config.next(); more != nil {
		log.Info("the network has made a step toward the changed configuration", "networks", c.config.Prefixes())
		return
	}
	log.Info("the network uses the changed configuration", "networks", c.config.Prefixes())
}

// serveChanged starts a session with the configuration of c. before is the state that the last session
// has left. The objects of the new session exist before those that only the last session needed are
// removed. pause is the time to wait before this host's lease is published.
func (r *runner) serveChanged(ctx context.Context, before lastknown.State, c *change, pause time.Duration) (*session, error) {
	now := before
	now.Former, now.Rules = r.leftBehind(before, c.be), before.FormerNetworks(c.config)
	now.Config = c.config
	now.Interface = c.iface

	switch {
	case c.own != nil:
		now.Take(*c.own)
	case !reflect.DeepEqual(c.claim, now.Own.Claim()):
		if now.Stored == nil {
			stored := before.Own
			now.Stored = &stored
		}
		now.Own.BackendType = c.claim.BackendType
		now.Own.NextType = c.claim.NextType
		now.Own.Endpoints = c.claim.Endpoints
	}
	return r.serve(ctx, c.be, pause, func(to *lastknown.State) { *to = now })
}

// goBack starts a session from before, the state before change c, which has failed. It repeats the
// attempt until it succeeds or ctx ends.
func (r *runner) goBack(ctx context.Context, before lastknown.State, c *change) (s *session, err error) {
	if c.own != nil { // the session must take the subnets of before again
		before.Stored = c.own
	}

	err = retry(ctx, "cannot go back to the former network configuration, trying again", func() error {
		be, _, err := r.catalog.New(r.env(before.Interface, before.Config))
		if err != nil {
			return err
		}
		failed, _ := r.state.Get() // Former contains the configuration of c if the change has begun
		before.Former, before.Rules = r.leftBehind(failed, be), failed.FormerNetworks(before.Config)
		if s, err = r.serve(ctx, be, 0, func(now *lastknown.State) { *now = before }); err != nil {
			r.ready.health.Beat()
			r.ready.report(ctx, partDatapath, err)
		}
		return err
	})
	return s, err
}

// releaseDevices releases the locks of the devices of be, except for those that s uses, and those of
// former configurations, which are still to be removed.
func (r *runner) releaseDevices(be backend.Backend, s *session) {
	needed := slices.Clone(s.be.Scope().Devices)
	now, _ := r.state.Get()
	for _, f := range now.Former {
		needed = append(needed, r.owned(f).Scope.Devices...)
	}
	for _, name := range be.Scope().Devices {
		if !slices.Contains(needed, name) {
			r.devices.Release(name)
		}
	}
}
