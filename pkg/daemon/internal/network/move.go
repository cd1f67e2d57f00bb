// SPDX-License-Identifier: Apache-2.0

package network

import (
	"cmp"
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// follow keeps the network up to date, beginning with session s, until ctx ends. It leaves the last session running. A
// session on the last known state follows only the external interface.
func (n *Network) follow(ctx context.Context, s *session) error {
	for {
		next, err := n.followUntilChange(ctx, s)
		if next == nil || err != nil {
			return err
		}
		if s, err = n.change(ctx, n.serving.Load(), next); err != nil {
			return ended(ctx, err)
		}
	}
}

// followUntilChange is follow for one configuration. It returns the change to another one, or nil if ctx has ended, or
// with an error. If the external interface changes, it ends the session. After each session that
// has ended it starts another one, which continues with the state of the ended one and lasts until ctx ends.
func (n *Network) followUntilChange(ctx context.Context, s *session) (*change, error) {
	now := n.last()
	up := &uplink{
		now: now.Interface, later: make(chan underlay.Interface, 1),
		report: func(err error) { n.ready.report(partInterface, err) },
	}
	options := n.underlayOptions(now.Config, now.PublicIPs)
	attending, stop := context.WithCancel(ctx)
	defer stop()
	group, attending := errgroup.WithContext(attending)
	group.Go(func() error {
		return n.watchUplink(attending, options, up.now, up.send, up.noteUsable)
	})
	if !now.Recalled {
		n.followStore(attending, group, now.Own)
	}

	var next *change
	var err error
	for next == nil && err == nil && attending.Err() == nil {
		s, next, err = n.attend(ctx, attending, s, up)
	}
	err = ended(attending, err)
	stop()
	return next, cmp.Or(err, group.Wait())
}

// uplink is the external interface that the network should use.
type uplink struct {
	now    underlay.Interface
	later  chan underlay.Interface // has the latest one, if that is not now
	report func(error)             // of what is wrong with it

	mu      sync.Mutex
	usable  error // why packets cannot leave by it
	refused error // why the backend does not work on the latest one
}

func (u *uplink) send(i underlay.Interface) {
	select {
	case <-u.later:
	default:
	}
	u.later <- i
}

func (u *uplink) noteUsable(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.usable = err
	u.report(cmp.Or(u.usable, u.refused))
}

func (u *uplink) noteRefused(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.refused = err
	u.report(cmp.Or(u.usable, u.refused))
}

// followStore makes group keep this host's lease own, and follow the configuration in the store, unless Manager.Watch
// does that. With --exit-on-config-change it makes group end the network when the configuration has changed.
func (n *Network) followStore(ctx context.Context, group *errgroup.Group, own subnet.Lease) {
	group.Go(func() error { return ended(ctx, n.store.Keep(ctx, own)) })
	if n.name != "" {
		group.Go(func() error {
			n.observe(ctx, own)
			return nil
		})
	}

	if w, ok := n.store.(subnet.ConfigWatcher); ok {
		group.Go(func() error {
			return ended(ctx, w.WatchConfig(ctx, func(text []byte) { n.config.apply(ctx, text) }))
		})
	}
	if n.opts.ExitOnConfigChange {
		group.Go(func() error { return n.config.exit(ctx) })
	}
}

// observe records the moment at which the store had the configuration of the network. It waits until the
// store answers, and records nothing if the store does not have the configuration.
func (n *Network) observe(ctx context.Context, own subnet.Lease) {
	seen, err := n.store.Observe(ctx, own)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		klog.FromContext(ctx).Error(err, "cannot record that the store has the network configuration: a deletion while this host is down may not be noticed")
	case seen != subnet.Observation{}:
		n.state.Update(func(now *lastknown.State) { now.Seen = seen })
	}
}

// attend passes the leases of other hosts to s, and this host's lease to the store, until attending ends, the external
// interface changes, or the network can change to another configuration. It returns that change. It ends s if the
// interface has changed, unless the backend does not work on the changed one. If s has ended, attend starts another
// session instead, which lasts until ctx ends, and returns that. While s uses the last known state, attend only waits
// for the interface.
func (n *Network) attend(ctx, attending context.Context, s *session, up *uplink) (present *session, next *change, err error) {
	group, working := errgroup.WithContext(attending)
	working, cancel := context.WithCancel(working)
	defer cancel()
	published := make(chan struct{})
	prepared := make(chan *change, 1)
	started := make(chan *session, 1)
	later := up.later
	follows := !n.last().Recalled
	switch {
	case s.hasEnded():
		close(published) // the lease is published when there is a session
		later = nil      // serveAgain receives it
		group.Go(func() error {
			again, err := n.serveAgain(ctx, working, s, up)
			if again != nil {
				started <- again
			}
			return ended(working, err)
		})
	case follows:
		group.Go(func() error { return ended(working, n.keepPublished(working, s, published)) })
	}
	if follows {
		group.Go(func() error { return ended(working, n.store.Watch(working, s.syncer.Publish)) })
		group.Go(func() error {
			c, err := n.awaitChange(working, s, published)
			if c != nil {
				prepared <- c
			}
			return ended(working, err)
		})
	}

	var to *underlay.Interface
	present = s
	select {
	case <-working.Done():
	case moved := <-later:
		to = &moved
	case present = <-started:
	case next = <-prepared:
	}

	cancel()
	err = group.Wait()
	if err != nil || attending.Err() != nil || next != nil {
		return present, next, err
	}
	n.claimOnly(present.be) // a change may have been prepared for the former session or interface
	if to != nil {
		n.reconnect(attending, n.last().Interface, *to)
		n.moveTo(attending, s, up, *to)
	}
	return present, nil, nil
}

// moveTo ends s, so that the next session uses the interface to, if the backend works on it.
func (n *Network) moveTo(ctx context.Context, s *session, up *uplink, to underlay.Interface) {
	if n.accept(ctx, s, up, to) {
		n.progress.enter(PhaseMoving)
		n.leave(ctx, s)
	}
}

// accept makes to the interface of the next session, and reports whether the backend works on it. Otherwise, such as
// with a small MTU, sessions stay on the one that they have: they serve peers, repair the kernel, and follow the
// configuration.
func (n *Network) accept(ctx context.Context, s *session, up *uplink, to underlay.Interface) bool {
	_, _, err := n.catalog.New(n.env(to, n.last().Config))
	up.noteRefused(err)
	if err != nil {
		klog.FromContext(ctx).Error(err, "the changed external interface cannot be used yet")
		s.unfit.Store(&to)
		return false
	}
	s.unfit.Store(nil)
	up.now = to
	return true
}

// serveAgain starts a session after one has ended because the external interface has changed, or because another
// configuration did not start. It tries until it succeeds or attending ends. The kernel stays unchanged until then. The
// session lasts until ctx ends. last is the one that has ended.
func (n *Network) serveAgain(ctx, attending context.Context, last *session, up *uplink) (next *session, err error) {
	what := "cannot go back to the former network configuration, trying again"
	if n.progress.Phase() == PhaseMoving {
		what = "the changed external interface cannot be used yet"
	}

	err = retry(attending, what, func() (err error) {
		select {
		case newer := <-up.later:
			n.reconnect(ctx, up.now, newer)
			n.accept(ctx, last, up, newer)
		default:
		}
		if next, err = n.serveOn(ctx, up.now); err != nil {
			n.ready.health.Beat()
			n.ready.report(partDatapath, err)
			return err
		}
		next.unfit.Store(last.unfit.Load())
		return nil
	})
	return next, err
}

// reconnect makes the store reconnect if an address has changed. That cannot wait for a session, because packets from
// an address that was removed get no answer.
func (n *Network) reconnect(ctx context.Context, from, to underlay.Interface) {
	if !slices.Equal(to.Addrs, from.Addrs) {
		n.store.Reconnect()
	}
	klog.FromContext(ctx).Info("the external interface has changed", "name", to.Name, "index", to.Index, "mtu", to.MTU, "addresses", describe(to), "reason", to.Reason)
}

// serveOn starts a session on interface to. It keeps this host's subnets and backend data, and uses the
// public addresses of another interface.
func (n *Network) serveOn(ctx context.Context, to underlay.Interface) (*session, error) {
	now := n.last() // the lease may have been renewed, and Former cleared, since the last session began
	if now.Recalled && now.Interface.Index == 0 {
		if err := ofHost(now, to); err != nil {
			return nil, fmt.Errorf("the last known state cannot be used: %w", err)
		}
	}

	be, _, err := n.catalog.New(n.env(to, now.Config))
	if err != nil {
		return nil, err
	}
	claim := now.Own.Claim()
	moves := !reflect.DeepEqual(to, now.Interface)
	if moves {
		if claim, err = be.Claim(ctx, claim); err != nil {
			return nil, err
		}
	}
	return n.serve(ctx, be, func(now *lastknown.State) {
		if moves {
			now.Differ()
			now.Interface = to
			now.Own.NextType = claim.NextType
			now.Own.Endpoints = claim.Endpoints
		}
	})
}
