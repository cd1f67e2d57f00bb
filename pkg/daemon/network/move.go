// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/daemon/lastknown"
	"github.com/flanneld/flanneld/pkg/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// work keeps s up to date with the store until ctx ends. If the external interface
// changes, it starts a new session from the state that the old one leaves.
func (r *runner) work(ctx context.Context, m Store, s *session, changed <-chan underlay.Interface) error {
	for {
		to, err := r.attend(ctx, m, s, changed)
		if err != nil || ctx.Err() != nil {
			s.stop()
			return err
		}
		if s, err = r.move(ctx, m, s, to, changed); err != nil {
			return ended(ctx, err)
		}
	}
}

// attend passes the leases of other nodes to s, and the own lease to the store, until ctx
// ends or the external interface changes.
func (r *runner) attend(ctx context.Context, m subnet.Manager, s *session, changed <-chan underlay.Interface) (to underlay.Interface, err error) {
	group, ctx := errgroup.WithContext(ctx)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group.Go(func() error { return ended(ctx, m.Watch(ctx, s.syncer.Publish)) })
	if s.unpublished {
		group.Go(func() error { return ended(ctx, r.publish(ctx, m, s.begin.Config, s.begin.Own)) })
	}
	select {
	case <-ctx.Done():
	case to = <-changed:
	}
	cancel()
	return to, group.Wait()
}

// publish writes the own lease with its new addresses to the store. It returns ErrLeaseLost,
// wrapped, if the store has another key or other subnets for this node. It compares the subnets
// too, because the same key may get other subnets.
func (r *runner) publish(ctx context.Context, m subnet.Manager, cfg subnet.Config, own subnet.Lease) error {
	var published subnet.Lease
	err := retry(ctx, "cannot publish the own lease with its new address", func() (err error) {
		published, err = m.Acquire(ctx, cfg, subnet.Claim{BackendType: own.BackendType, Endpoints: own.Endpoints})
		return err
	})
	if err != nil {
		return err
	}
	had, has := own.Subnets(), published.Subnets()
	if published.Key != own.Key || !slices.Equal(has, had) {
		return fmt.Errorf("%w: for the new address the store returned %s with %v instead of %s with %v", subnet.ErrLeaseLost, published.Key, has, own.Key, had)
	}
	r.state.Update(func(now *lastknown.State) { now.Stored = nil })
	klog.FromContext(ctx).Info("own lease is up to date", "lease", own.Key)
	return nil
}

// move ends s and returns a session on another or changed external interface. The kernel
// stays unchanged in between.
func (r *runner) move(ctx context.Context, m Store, s *session, to underlay.Interface, changed <-chan underlay.Interface) (next *session, err error) {
	follow(ctx, m, s.begin.Interface, to)
	r.progress.move()
	s.leave(ctx)
	peers := s.ledger.State()
	err = retry(ctx, "the changed external interface cannot be used yet", func() (err error) {
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
	klog.FromContext(ctx).Info("the external interface has changed", "name", to.Name, "index", to.Index, "mtu", to.MTU, "addresses", describe(to))
}

// serveOn starts a session on interface to. It keeps the own subnets and backend data,
// and uses the new public addresses.
func (r *runner) serveOn(ctx context.Context, to underlay.Interface, peers subnet.LedgerState) (*session, error) {
	now, _ := r.state.Get() // the lease may have been renewed, and Former cleared, since the last session began
	now.Peers, now.Fresh = peers, nil
	be, _, err := r.catalog.New(r.env(to, now.Config))
	if err != nil {
		return nil, err
	}
	claim, err := be.Claim(ctx, subnet.Claim{BackendType: now.Own.BackendType, Endpoints: now.Own.Endpoints})
	if err != nil {
		return nil, err
	}
	if stored := now.Own; now.Stored == nil {
		now.Stored = &stored
	}
	now.Interface, now.Own.Endpoints = to, claim.Endpoints
	s, err := r.serve(ctx, be, now)
	if err != nil {
		return nil, err
	}
	s.unpublished = true
	return s, nil
}
