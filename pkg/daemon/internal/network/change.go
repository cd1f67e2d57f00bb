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
	before lastknown.State // that of the last session, set when it has ended, or that of the last process
	config subnet.Config
	same   bool // the configuration stays the present one, and only the claim changes
	iface  underlay.Interface
	be     backend.Backend // nil if the backend and the lease are not affected
	claim  subnet.Claim    // the data that the host then publishes; set only with be, and if the host keeps its subnets
	own    *subnet.Lease   // the lease that the host has taken, as State.Stored is then; nil if it keeps its subnets
}

// refusedPause is the mean time after which a configuration that was refused is tried again,
// because the reason may be gone, such as an interface without an IPv6 address. It is also the
// mean time after which the network repeats a failed republish.
const refusedPause = 30 * time.Second

// awaitChange waits until the network can change to another configuration, and returns that change. Session s
// continues meanwhile. A configuration that cannot be used is refused, and tried again later. published is
// closed when the store has the lease of s. awaitChange returns ErrLeaseLost, wrapped, if this host has lost
// its lease, and otherwise the error of ctx.
func (n *Network) awaitChange(ctx context.Context, s *session, published <-chan struct{}) (*change, error) {
	var withdrawn <-chan struct{} // receives when the time of the stage Withdrawn begins; nil never receives
	if n.last().Config.Stage == subnet.Withdrawn && !s.hasEnded() {
		withdrawn = published
	}
	var step <-chan time.Time // receives when that time ends; nil never receives
	stepping := false         // see wanted
	for ctx.Err() == nil {
		cfg, changed := n.wanted(stepping)
		var again <-chan time.Time // nil never receives
		if rest := n.config.rest(); rest > 0 {
			again = time.After(rest)
		}
		if cfg != nil {
			next, err := n.prepareUnless(ctx, changed, s, *cfg, published)
			if err == nil {
				return next, nil
			}
			if ctx.Err() != nil || errors.Is(err, subnet.ErrLeaseLost) {
				return nil, err
			}
			pause := n.retryTime()
			if errors.Is(err, subnet.ErrNoSubnets) {
				pause = retryPause // the next Acquire waits until a subnet may be free
			}
			if !errors.Is(err, errSuperseded) {
				n.config.refuse(ctx, *cfg, err)
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
			stepping = true
		case <-s.reclaim:
			next, err := n.prepareChange(ctx, s, n.last().Config, published)
			if err == nil && !reflect.DeepEqual(next.claim, n.last().Own.Claim()) {
				return next, nil
			}
			if err != nil { // the backend's network asks again
				klog.FromContext(ctx).Error(err, "cannot publish more data in this host's lease")
			}
			stepping = true
		}
	}
	return nil, ctx.Err()
}

// wanted returns the configuration that the network should change to, and a channel that is closed when the
// result may have changed. cfg is nil if there is no such configuration. step is set if the host may make the
// next step toward the configuration in the store.
func (n *Network) wanted(step bool) (cfg *subnet.Config, changed <-chan struct{}) {
	now := n.last()
	cfg, changed = n.config.next()
	switch {
	case cfg != nil && n.config.follow:
		return new(now.Withdrawn(*cfg)), changed
	case step && now.Config.Stage != "" && n.config.rest() <= 0:
		return new(now.Config.Step()), changed
	}
	return nil, changed
}

// withdrawal is how long a host that has withdrawn the data of its next backend waits before it starts a changed one.
// Until then its peers must have read that, or their packets to a device that changes are lost.
const withdrawal = 30 * time.Second

// errSuperseded ends the preparation of a configuration because the store has another one.
var errSuperseded = errors.New("the store has another configuration")

// prepareUnless prepares the change to cfg. It returns errSuperseded, wrapped, if changed is closed before
// the change is prepared. Before it returns an error, it releases the devices that only cfg needs, and publishes the
// lease of s again if the store may have another one.
func (n *Network) prepareUnless(ctx context.Context, changed <-chan struct{}, s *session, cfg subnet.Config, published <-chan struct{}) (*change, error) {
	preparing, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		select {
		case <-changed:
			stop(errSuperseded)
		case <-preparing.Done():
		}
	}()

	c, err := n.prepareChange(preparing, s, cfg, published)
	if err == nil {
		return c, nil
	}
	n.claimOnly(s.be)
	select {
	case <-published:
		if n.last().Stored != nil {
			if err := n.publish(ctx, s); err != nil {
				return nil, err
			}
		}
	default: // it is being published
	}
	if errors.Is(context.Cause(preparing), errSuperseded) {
		err = fmt.Errorf("%w: %w", errSuperseded, err)
	}
	return nil, err
}

// prepareChange obtains what the change to cfg needs. It changes nothing on the host. If the subnets
// of s do not fit cfg, it makes the store exchange the lease of s for one with other subnets. If cfg is the present
// configuration, only the claim may change. Even with an error the devices of cfg may be locked.
func (n *Network) prepareChange(ctx context.Context, s *session, cfg subnet.Config, published <-chan struct{}) (c *change, err error) {
	now := n.last()
	c = &change{config: cfg, same: len(subnet.Changes(now.Config, cfg)) == 0, iface: now.Interface}
	if unfit := s.unfit.Load(); unfit != nil && !c.same {
		c.iface = *unfit
	}
	if !sameFamilies(cfg, now.Config) {
		if c.iface, err = n.chooseUplink(ctx, n.underlayOptions(cfg, now.PublicIPs), 0); err != nil {
			return nil, err
		}
	}
	if err := n.checkRanges(ctx, cfg, now.Config, c.iface); err != nil {
		return c, err
	}

	fits := c.same || n.fits(cfg, now.Own)
	if fits && !c.same && sameForwarding(now.Config, cfg) {
		return c, nil
	}

	if c.be, _, err = n.newBackend(ctx, n.env(c.iface, cfg)); err != nil {
		return c, err
	}
	if err := n.lockFor(c.be); err != nil {
		return c, err
	}
	had := now.Own.Claim()
	if fits {
		c.claim, err = c.be.Claim(ctx, had)
		return c, err
	}

	select {
	case <-published: // otherwise keepPublished would write the present lease again
	case <-ctx.Done():
		return c, ctx.Err()
	}
	if err := wait.For(ctx, n.turn(s)); err != nil {
		return c, err
	}
	n.writing.Lock()
	defer n.writing.Unlock()
	own, err := claimAndAcquire(ctx, c.be, had, func(claim subnet.Claim) (subnet.Lease, error) { return n.store.Acquire(ctx, cfg, claim) })
	if err == nil {
		c.own = &own
		n.state.Update(func(now *lastknown.State) { now.Stored = c.own })
	} else if !errors.Is(err, subnet.ErrNoSubnets) && !errors.Is(err, subnet.ErrUnfit) {
		n.state.Update((*lastknown.State).Differ)
	}
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
// not start, change returns s, which has ended, and with it the network goes back to the former configuration.
func (n *Network) change(ctx context.Context, s *session, c *change) (*session, error) {
	if c.be == nil {
		n.state.Update(func(now *lastknown.State) { now.Config = c.config })
		s.rules.Send()
		n.changed(ctx, c)
		return s, nil
	}

	pause := n.turn(s)
	n.progress.enter(PhaseChanging)
	n.leave(ctx, s)
	c.before = n.last() // only now, because the session may have cleared Former before its end
	next, err := n.serveChanged(ctx, c)
	if err == nil {
		next.pause = pause
		n.changed(ctx, c)
		return next, nil
	}
	if ctx.Err() != nil {
		return nil, err
	}
	if c.same {
		klog.FromContext(ctx).Error(err, "cannot publish more data in this host's lease")
	} else {
		n.config.giveUp(ctx, c.config, err)
	}
	n.restore(s, c)
	return s, nil
}

// changed records and logs that the network uses the configuration of c from now on.
func (n *Network) changed(ctx context.Context, c *change) {
	n.config.use(c.config)
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
	if more, _ := n.config.next(); more != nil {
		log.Info("the network has made a step toward the changed configuration", "networks", c.config.Prefixes())
		return
	}
	log.Info("the network uses the changed configuration", "networks", c.config.Prefixes())
}

// serveChanged starts a session with the configuration of c. The objects of the new session exist before
// those that only the last session needed are removed.
func (n *Network) serveChanged(ctx context.Context, c *change) (*session, error) {
	now := c.before
	now.Former = n.leftBehind(c.before, c.be)
	now.Rules = c.before.FormerNetworks(c.config)
	now.Config = c.config
	now.Interface = c.iface

	switch {
	case c.own != nil:
		now.Take(*c.own)
	case !reflect.DeepEqual(c.claim, now.Own.Claim()):
		now.Differ()
		now.Own.BackendType = c.claim.BackendType
		now.Own.NextType = c.claim.NextType
		now.Own.Endpoints = c.claim.Endpoints
	}
	return n.serve(ctx, c.be, func(to *lastknown.State) { *to = now })
}

// restore takes c back, which has not started. s is the last session, which has ended.
func (n *Network) restore(s *session, c *change) {
	failed := n.last() // Former contains the configuration of c if c has begun
	former := n.leftBehind(failed, s.be)
	n.state.Change(func(now *lastknown.State) {
		*now = c.before
		now.Former = former
		now.Rules = failed.FormerNetworks(now.Config)
	})
	n.claimOnly(s.be)
}
