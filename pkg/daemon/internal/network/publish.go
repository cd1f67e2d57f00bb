// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"fmt"
	"reflect"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/subnet"
)

// publish writes this host's lease with its new addresses and data to the store. It returns
// ErrLeaseLost, wrapped, if the store has another key or other subnets for this host. It compares
// the subnets too, because the same key may get other subnets.
func (p *parts) publish(ctx context.Context, m subnet.Manager, s *session) error {
	if err := wait.For(ctx, s.pause); err != nil {
		return err
	}
	cfg := s.begin.Load().Config
	own := s.own()
	if own.NextType != "" && own.NextType != p.storedNext() {
		// When peers see this lease, they probe the way through the next backend. An earlier use of that
		// backend may have left objects for the peers, and the probes might use these. The first pass
		// removes them. If it fails, they may stay, but that must not prevent the publication.
		select {
		case <-s.compared:
		case <-ctx.Done():
			return ctx.Err()
		}
	}

	var published subnet.Lease
	err := retry(ctx, "cannot publish this host's lease as it is now", func() (err error) {
		published, err = m.Acquire(ctx, cfg, own.Claim())
		return err
	})
	if err == nil {
		err = lostTo(own, published)
	}
	if err != nil {
		return err
	}
	p.state.Update(func(now *lastknown.State) { now.Stored = nil })
	klog.FromContext(ctx).Info("this host's lease is up to date", "lease", own.Key)
	return nil
}

// storedNext returns the type of the next backend in the field Stored of the state, which is this host's lease
// as the store has it. It returns "" if Stored is nil or has no next backend.
func (p *parts) storedNext() string {
	if now, _ := p.state.Get(); now.Stored != nil {
		return now.Stored.NextType
	}
	return ""
}

// republishTimeout limits the time for publishing changed data of this host's lease. Meanwhile the network
// does not notice a changed configuration.
const republishTimeout = 30 * time.Second

// republish writes this host's lease with the data that the backend has by now, while s goes on. If the data
// has not changed, it writes nothing. In both cases it tells the backend what the store has. It returns
// ErrLeaseLost, wrapped, like publish, and an error if the backend wants another next backend.
func (p *parts) republish(ctx context.Context, m subnet.Manager, s *session) error {
	ctx, cancel := context.WithTimeout(ctx, republishTimeout)
	defer cancel()
	now := *s.begin.Load()
	claim, err := s.be.Claim(ctx, now.Own.Claim())
	if err != nil {
		return err
	}
	if claim.NextType != now.Own.NextType { // only another session can use another next backend; see backend.Reclaimer
		return fmt.Errorf("the next backend would be %q instead of %q", claim.NextType, now.Own.NextType)
	}
	if !reflect.DeepEqual(claim, now.Own.Claim()) {
		now.Own.Endpoints = claim.Endpoints
		got, err := m.Acquire(ctx, now.Config, claim)
		if err == nil {
			err = lostTo(now.Own, got)
		}
		if err != nil {
			return err
		}
		s.begin.Store(&now)
		p.state.Update(func(to *lastknown.State) { to.Own.Endpoints = claim.Endpoints })
		klog.FromContext(ctx).Info("this host's lease is up to date", "lease", now.Own.Key)
	}
	s.publisher.Published(claim)
	return nil
}
