// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/internal/wire"
)

// errOwnChanged ends a watch of this host's Node because the Node has to be read again.
var errOwnChanged = errors.New("own node has changed")

// Keep corrects this host's Node whenever it has changed: its annotations and, when the network is
// ready, the condition NetworkUnavailable. While it runs it also creates the Events of Warn. It
// returns ErrLeaseLost, wrapped, when the Node has other podCIDRs or podCIDRs that cannot be used.
// See subnet.Manager.
func (m *Manager) Keep(ctx context.Context, own subnet.Lease) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { m.events.run(ctx) })
	wg.Go(func() { m.warnPolicies(ctx) })
	if m.own.Load() == nil {
		claim := own.Claim()
		m.own.Store(&claim)
	}

	k := keeper{Manager: m}
	restores := wait.Backoff{
		Least: m.timing.restoreMin, Most: m.timing.restored,
		Share: m.timing.vary, Forget: 10 * m.timing.restored,
	}
	for {
		err := m.retry(ctx, maintaining, func() error {
			restored, err := k.round(ctx)
			if err == nil && restored {
				// Two programs that overwrite each other's changes must not do so in a tight loop.
				return restores.Wait(ctx, 0)
			}
			return err
		})
		if err != nil && !errors.Is(err, errOwnChanged) {
			return err
		}
	}
}

// keeper is the state of a Keep.
type keeper struct {
	*Manager
	missing bool    // Keep has logged that this host's Node is gone
	label   *string // value of the label Config.LocationLabel when it was read last; nil before
}

// round reads this host's Node and corrects it. If the Node needed no correction, round watches it
// until it may need one. restored means that the Node had to be written, and was not watched. round
// returns the error of await, so errOwnChanged if the Node needs a correction.
func (k *keeper) round(ctx context.Context) (restored bool, err error) {
	s, err := k.readOwn(ctx)
	if err != nil {
		return false, err
	}
	k.noteLocation(ctx, s)
	restored, err = k.ensure(ctx, s)
	if err != nil {
		return false, err
	}
	k.outage.Report(ctx, maintaining, nil)
	if restored {
		return true, nil
	}
	return false, k.await(ctx, s, func(now *ownNode) bool {
		k.noteLocation(ctx, now)
		return k.todo(now) != nil
	})
}

// noteLocation logs when the location label of this host's Node changes to another value than the one
// in use, which was read at the start.
func (k *keeper) noteLocation(ctx context.Context, s *ownNode) {
	used := k.location.Load()
	if used == nil || !s.exists {
		return
	}
	if last := cmp.Or(k.label, used); s.location != *last && s.location != *used {
		klog.FromContext(ctx).Error(nil, "the location label of this node has changed: restart flanneld to use the other location",
			"label", k.cfg.LocationLabel, "used", subnet.Shorten(*used), "now", subnet.Shorten(s.location))
	}
	k.label = &s.location
}

// todo contains the corrections that this host's Node needs.
type todo struct {
	annotate map[string]*string
	announce bool
	lost     bool
	wrong    error // why annotations are ignored; nil if none is
}

// todo returns what has to be done about this host's Node, or nil if there is nothing to do.
func (m *Manager) todo(s *ownNode) *todo {
	if !s.exists || errors.Is(s.cidrsErr, errNoPodCIDR) {
		return nil // there is nothing to correct until the Node is back and has podCIDRs
	}
	own := *m.own.Load()
	want, wrong := m.wanted(s, own)
	t := &todo{
		annotate: m.keys.Difference(s.published(), want), lost: lostPodCIDRs(own, s),
		announce: m.ready() && s.network != "False", wrong: wrong,
	}
	if len(t.annotate) == 0 && !t.announce && !t.lost && textOf(wrong) == *m.ignores.Load() {
		return nil
	}
	return t
}

// lostPodCIDRs reports whether the Node has other podCIDRs than the lease, or podCIDRs that cannot
// be used.
func lostPodCIDRs(own subnet.Claim, s *ownNode) bool {
	for _, e := range own.Endpoints {
		if cidr, ok := prefix.OfFamily(s.cidrs, e.Family()); !ok || cidr != e.Subnet {
			return true
		}
	}
	return s.cidrsErr != nil
}

// ensure corrects this host's Node, of which s is the present state. restored means that the Node had
// to be written. ensure returns subnet.ErrLeaseLost, wrapped, and creates an Event, if the Node has
// other podCIDRs than the lease, or podCIDRs that cannot be used.
func (k *keeper) ensure(ctx context.Context, s *ownNode) (restored bool, err error) {
	k.writing.Lock()
	defer k.writing.Unlock()
	name := *k.name.Load()
	log := klog.FromContext(ctx).WithValues("node", name)
	if !s.exists != k.missing {
		if k.missing = !s.exists; k.missing {
			log.Error(nil, "this host's Node is gone, waiting for it to come back")
		} else {
			log.Info("this host's Node is back")
		}
	}

	t := k.todo(s)
	switch {
	case t == nil:
		return false, nil
	case t.lost:
		k.events.sendNow(ctx, s.uid, "FlannelSubnetChanged", fmt.Sprintf("podCIDRs are %v now and were %v", s.cidrs, k.own.Load().Subnets()))
		return false, fmt.Errorf("%w: node %s has podCIDRs %v now, and had %v", subnet.ErrLeaseLost, name, s.cidrs, k.own.Load().Subnets())
	}

	k.warnIgnored(ctx, t.wrong)
	if len(t.annotate) > 0 {
		if err := k.annotate(ctx, name, t.annotate); err != nil {
			return false, err
		}
		log.Info("own annotations were changed, written again")
		restored = true
	}
	if t.announce {
		if err := k.announce(ctx, name); err != nil {
			return false, err
		}
		log.Info("condition set", "type", wire.NetworkUnavailable, "status", "False", "was", s.network)
		restored = true
	}
	return restored, nil
}

// await watches this host's Node from the revision of s, the Node as it was read before. It returns
// errOwnChanged when changed returns true for a new state of the Node, when the Node is deleted,
// and when the network becomes ready after s was read. Otherwise it returns the result of
// client.watch, which is nil if the watch has ended after the requested time.
func (m *Manager) await(ctx context.Context, s *ownNode, changed func(now *ownNode) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if m.cfg.Ready != nil && !s.ready {
		go func() {
			select {
			case <-m.cfg.Ready:
				cancel(errOwnChanged)
			case <-ctx.Done():
			}
		}()
	}

	q := query{name: *m.name.Load(), revision: s.revision}
	err := m.client.watch(ctx, m.decoder, q, func() {}, func(e wire.Event) error {
		switch e.Type {
		case wire.Bookmark:
			return nil
		case wire.Deleted:
			m.seen.Store(&ownNode{revision: e.Node.Revision, read: time.Now()})
			return errOwnChanged
		}
		now := newOwnNode(e.Node)
		now.ready = m.ready()
		m.seen.Store(now)
		if changed(now) {
			return errOwnChanged
		}
		return nil
	})
	if errors.Is(context.Cause(ctx), errOwnChanged) {
		return errOwnChanged
	}
	return err
}
