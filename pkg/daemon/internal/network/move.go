// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// work keeps the network up to date with the store, beginning with session s, until attending ends
// or the network can change to another configuration. It then returns the last session, which it
// leaves running, and the change, which is nil if attending has ended. If the external interface
// changes, work ends the session and starts another one, which goes on with the state of the ended one and
// lasts until ctx ends.
func (r *runner) work(ctx, attending context.Context, m Store, s *session, changed <-chan underlay.Interface) (*session, *change, error) {
	for {
		to, next, err := r.attend(attending, m, s, changed)
		if to == nil || err != nil || attending.Err() != nil {
			return s, next, err
		}
		if s, err = r.move(ctx, attending, m, s, *to, changed); err != nil {
			return nil, nil, ended(attending, err)
		}
	}
}

// attend passes the leases of other hosts to s, and this host's lease to the store, until ctx
// ends, the external interface changes, or the network can change to another configuration.
// It returns the changed interface or the change, and nil for the other one.
func (r *runner) attend(ctx context.Context, m Store, s *session, changed <-chan underlay.Interface) (to *underlay.Interface, next *change, err error) {
	group, ctx := errgroup.WithContext(ctx)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group.Go(func() error { return ended(ctx, m.Watch(ctx, s.syncer.Publish)) })
	published := make(chan struct{})
	prepared := make(chan *change, 1)
	group.Go(func() error {
		defer close(published)
		if s.begin.Load().Stored == nil { // the store has this host's lease as it is
			return nil
		}
		return ended(ctx, r.publish(ctx, m, s))
	})

	group.Go(func() error { return ended(ctx, r.awaitChange(ctx, m, s, published, prepared)) })
	select {
	case <-ctx.Done():
	case i := <-changed:
		to = &i
	case next = <-prepared:
	}

	cancel()
	err = group.Wait()
	if to == nil {
		return nil, next, err
	}

	select {
	case c := <-prepared: // it was prepared for the former interface
		r.abandon(c, s)
	default:
	}
	return to, nil, err
}

// abandon gives up a prepared change. The network goes on with the configuration of s.
func (r *runner) abandon(c *change, s *session) {
	if c.be != nil {
		r.releaseDevices(c.be, s)
	}
	if c.own != nil { // the next session publishes the lease of s again
		r.state.Update(func(now *lastknown.State) { now.Stored = c.own })
	}
}

// move ends s and returns a session on another or changed external interface, which lasts until
// ctx ends. The kernel stays unchanged in between. move gives up when attending ends.
func (r *runner) move(ctx, attending context.Context, m Store, s *session, to underlay.Interface, changed <-chan underlay.Interface) (next *session, err error) {
	follow(ctx, m, s.begin.Load().Interface, to)
	r.progress.move()
	s.leave(ctx)
	peers := s.ledger.State()
	err = retry(attending, "the changed external interface cannot be used yet", func() (err error) {
		select {
		case newer := <-changed:
			follow(ctx, m, to, newer)
			to = newer
		default:
		}
		next, err = r.serveOn(ctx, to, peers)
		if err != nil {
			r.ready.health.Beat()
			r.ready.report(ctx, partDatapath, err)
		}
		return err
	})
	return next, err
}

// follow makes the changes that cannot wait for a session: packets from an address that
// was removed get no answer, so the store must reconnect.
func follow(ctx context.Context, m Store, from, to underlay.Interface) {
	if !slices.Equal(to.Addrs, from.Addrs) {
		m.Reconnect()
	}
	klog.FromContext(ctx).Info("the external interface has changed", "name", to.Name, "index", to.Index, "mtu", to.MTU, "addresses", describe(to), "reason", to.Reason)
}

// serveOn starts a session on interface to. It keeps this host's subnets and backend data,
// and uses the new public addresses.
func (r *runner) serveOn(ctx context.Context, to underlay.Interface, peers subnet.LedgerState) (*session, error) {
	now, _ := r.state.Get() // the lease may have been renewed, and Former cleared, since the last session began
	if now.Recalled && now.Interface.Index == 0 {
		if err := ofHost(now, to); err != nil {
			return nil, fmt.Errorf("the last known state cannot be used: %w", err)
		}
	}

	be, _, err := r.catalog.New(r.env(to, now.Config))
	if err != nil {
		return nil, err
	}
	claim, err := be.Claim(ctx, now.Own.Claim())
	if err != nil {
		return nil, err
	}
	return r.serve(ctx, be, 0, func(now *lastknown.State) {
		now.Peers = peers
		now.Fresh = nil
		if stored := now.Own; now.Stored == nil {
			now.Stored = &stored
		}
		now.Interface = to
		now.Own.NextType = claim.NextType
		now.Own.Endpoints = claim.Endpoints
	})
}
