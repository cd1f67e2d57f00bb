// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/kube/wire"
)

// errLook ends a watch of the own Node: there is something to look at.
var errLook = errors.New("own node has changed")

// Keep keeps the own Node as it should be: its annotations and, once the
// network is ready, the condition NetworkUnavailable. It returns ErrLeaseLost
// when the Node has other podCIDRs. See subnet.Manager.
func (m *Manager) Keep(ctx context.Context, own subnet.Lease) error {
	defer m.outage.Forget(keeping)
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { m.events.run(ctx) })
	wg.Go(func() { m.warnPolicies(ctx) })
	if m.own.Load() == nil {
		m.own.Store(&subnet.Claim{BackendType: own.BackendType, Endpoints: own.Endpoints})
	}
	k := keeper{Manager: m}
	b := m.backoff()
	restores := m.backoff()
	restores.Least, restores.Most = m.timing.restoreMin, m.timing.restored
	var last time.Time
	for {
		var begun time.Time
		restored, err := k.round(ctx, func() { begun = time.Now() })
		m.lasted(b, begun)
		if err == nil && restored {
			// Two programs that overwrite each other's changes must not do so in a tight loop.
			if time.Since(last) > 10*m.timing.restored {
				restores.Reset()
			}
			last = time.Now()
			err = restores.Wait(ctx, 0)
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil, errors.Is(err, errLook):
			continue
		case !passes(err) && !errors.Is(err, errRelist):
			return err
		}
		m.report(ctx, keeping, err)
		if err := b.Wait(ctx, pause(err)); err != nil {
			return err
		}
	}
}

// keeper is what Keep has said already.
type keeper struct {
	*Manager
	missing bool
}

// round reads the own Node, corrects it, and then watches it until it has to be corrected again.
// It calls alive when the server has accepted the watch. restored means that another program had
// changed the Node.
func (k *keeper) round(ctx context.Context, alive func()) (restored bool, err error) {
	s, err := k.look(ctx)
	if err != nil {
		return false, err
	}
	restored, err = k.ensure(ctx, s)
	if err != nil {
		return false, err
	}
	k.report(ctx, keeping, nil)
	if restored {
		return true, nil
	}
	return false, k.await(ctx, s, alive, func(now *self) bool { return k.todo(now) != nil })
}

// todo is what has to be done about the own Node.
type todo struct {
	annotate map[string]*string
	announce bool
	lost     bool
	wrong    error // annotations that are ignored
}

// todo returns nil if there is nothing to do.
func (m *Manager) todo(s *self) *todo {
	if !s.exists || errors.Is(s.cidrsErr, errNoPodCIDR) {
		return nil // and all comes back with the Node
	}
	own := *m.own.Load()
	want, wrong := m.wanted(s, own)
	t := &todo{
		annotate: m.keys.difference(s.published(), want), lost: lost(own, s),
		announce: m.ready() && s.network != "False", wrong: wrong,
	}
	if len(t.annotate) == 0 && !t.announce && !t.lost && textOf(wrong) == *m.ignores.Load() {
		return nil
	}
	return t
}

// lost reports whether the Node has other podCIDRs than the lease.
func lost(own subnet.Claim, s *self) bool {
	for _, e := range own.Endpoints {
		if cidr, ok := ofFamily(s.cidrs, e.Family()); !ok || cidr != e.Subnet {
			return true
		}
	}
	return s.cidrsErr != nil
}

func (m *Manager) ready() bool {
	select {
	case <-m.cfg.Ready: // nil blocks
		return true
	default:
		return false
	}
}

// ensure makes the own Node right.
func (k *keeper) ensure(ctx context.Context, s *self) (restored bool, err error) {
	k.writing.Lock()
	defer k.writing.Unlock()
	name := *k.name.Load()
	log := klog.FromContext(ctx).WithValues("node", name)
	if !s.exists != k.missing {
		if k.missing = !s.exists; k.missing {
			log.Error(nil, "the own Node is gone, waiting for it to come back")
		} else {
			log.Info("the own Node is back")
		}
	}
	t := k.todo(s)
	switch {
	case t == nil:
		return false, nil
	case t.lost:
		k.events.sendNow(ctx, s.uid, "FlannelSubnetChanged", fmt.Sprintf("podCIDRs are %v now and were %v", s.cidrs, subnets(*k.own.Load())))
		return false, fmt.Errorf("%w: node %s has podCIDRs %v now, and had %v", subnet.ErrLeaseLost, name, s.cidrs, subnets(*k.own.Load()))
	}
	k.complain(ctx, t.wrong)
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

// complain says what is wrong with the annotations of an administrator, unless that
// is what it said last.
func (m *Manager) complain(ctx context.Context, wrong error) {
	text := textOf(wrong)
	if before := m.ignores.Swap(&text); *before != text && wrong != nil {
		m.ignored(ctx, wrong)
	}
}

func textOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func subnets(c subnet.Claim) []netip.Prefix {
	var ps []netip.Prefix
	for _, e := range c.Endpoints {
		ps = append(ps, e.Subnet)
	}
	return ps
}

// await watches the own Node from s on. It returns errLook once changed says
// so of it, or once the network is ready if it was not when s was read, and nil
// when the watch has ended.
func (m *Manager) await(ctx context.Context, s *self, alive func(), changed func(now *self) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if m.cfg.Ready != nil && !s.ready {
		go func() {
			select {
			case <-m.cfg.Ready:
				cancel(errLook)
			case <-ctx.Done():
			}
		}()
	}
	err := m.client.watch(ctx, m.decoder, query{name: *m.name.Load(), revision: s.revision}, alive, func(e wire.Event) error {
		switch e.Type {
		case wire.Bookmark:
			return nil
		case wire.Deleted:
			return errLook
		}
		if changed(newSelf(e.Node, e.Node.Revision)) {
			return errLook
		}
		return nil
	})
	if errors.Is(context.Cause(ctx), errLook) {
		return errLook
	}
	return err
}
