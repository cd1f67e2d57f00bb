// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/dataplane/linux"
	"github.com/flanneld/flanneld/pkg/rules"
	"github.com/flanneld/flanneld/pkg/state"
	"github.com/flanneld/flanneld/pkg/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// former is an earlier configuration and interface of this node, whose objects may still
// be in the kernel.
type former struct {
	Config    subnet.Config      `json:"config"`
	Interface underlay.Interface `json:"interface"`
}

// ownership describes which kernel objects a configuration can have led to: those in the scope of
// its backend, and others that the backend names. It tells what an earlier configuration may
// have left in the kernel.
type ownership struct {
	scope     dataplane.Scope
	leftovers []backend.Leftover
}

func ownershipOf(be backend.Backend) ownership { return ownership{be.Scope(), backend.Leftovers(be)} }

// ownershipIn returns the ownership of the configuration in env. It is empty if this version does
// not know the backend.
func ownershipIn(env backend.Env, backends backend.Registry) ownership {
	be, _, err := backends.New(env)
	if err != nil {
		return ownership{}
	}
	return ownershipOf(be)
}

// owned returns the ownership of f.
func (n *network) owned(f former) ownership {
	return ownershipIn(n.env(f.Interface, f.Config), n.catalog.Registry)
}

// covers reports whether o includes everything in other.
func (o ownership) covers(other ownership) bool {
	return o.scope.Covers(other.scope) && len(o.beyond(other)) == 0
}

// beyond returns the leftovers that only other has.
func (o ownership) beyond(other ownership) []backend.Leftover {
	return slices.DeleteFunc(slices.Clone(other.leftovers), func(l backend.Leftover) bool {
		return slices.ContainsFunc(o.leftovers, func(own backend.Leftover) bool { return own.String() == l.String() })
	})
}

// leftBehind returns the configurations whose objects may be in the kernel although a node with
// the present backend does not need them. last is the state that it started with.
func (n *network) leftBehind(last lastKnown, present backend.Backend) []former {
	all := append(slices.Clone(last.Former), former{last.Config, last.Interface})
	now := ownershipOf(present)
	return slices.DeleteFunc(all, func(f former) bool { return now.covers(n.owned(f)) })
}

// retirement removes the objects of former configurations once the present one is
// applied.
type retirement struct {
	former  []ownership
	present ownership
	devices *deviceLocks
	due     func() // reports that the present configuration is applied
	done    func() // called when everything is removed
	start   chan struct{}
}

func (n *network) newRetirement(fs []former, present backend.Backend) *retirement {
	r := &retirement{present: ownershipOf(present), devices: n.devices, start: make(chan struct{})}
	for _, f := range fs {
		r.former = append(r.former, n.owned(f))
	}
	r.due = sync.OnceFunc(func() { close(r.start) })
	r.done = func() {
		n.state.update(func(now *lastKnown) { now.Former = nil })
		n.progress.retired()
	}
	return r
}

func (r *retirement) run(ctx context.Context) {
	if len(r.former) == 0 {
		return
	}
	select {
	case <-ctx.Done():
		return
	case <-r.start:
	}
	err := retry(ctx, "cannot remove the objects of the former configuration, trying again", func() error {
		// Use a separate Kernel, because the main one caches what it reads. Nexthop
		// objects are left to the main one, which may be about to use them: it deletes
		// unused ones after its next read.
		kernel, err := linux.Open(linux.Options{})
		if err != nil {
			return err
		}
		defer func() { _ = kernel.Close() }()
		for _, f := range r.former {
			if err := r.retire(ctx, kernel, f); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		r.done()
	}
}

// retire removes the objects of one configuration, except for devices that another daemon
// uses now, with their objects.
func (r *retirement) retire(ctx context.Context, kernel dataplane.Kernel, former ownership) error {
	locks, scope := r.devices, former.scope
	scope.Devices = slices.DeleteFunc(slices.Clone(scope.Devices), func(name string) bool {
		return errors.Is(locks.take(name), state.ErrInUse)
	})
	removed, err := dataplane.Retire(ctx, kernel, scope, r.present.scope)
	if err != nil {
		return err
	}
	if len(scope.Devices) == len(former.scope.Devices) {
		n, err := discard(r.present.beyond(former))
		if removed += n; err != nil {
			return err
		}
	}
	if removed > 0 {
		klog.FromContext(ctx).Info("removed what a former configuration had left", "objects", removed,
			"devices", scope.Devices, "networks", scope.Networks)
	}
	for _, name := range scope.Devices {
		if !slices.Contains(r.present.scope.Devices, name) {
			locks.release(name)
		}
	}
	return nil
}

// retire removes everything that the network has on this host, and its lease in the store. It is not
// served any more.
func (n *network) retire(ctx context.Context) error {
	last := n.past
	if now, ok := n.state.get(); ok {
		last = now
	}
	kernel, err := linux.Open(linux.Options{NexthopObjects: true})
	if err != nil {
		return err
	}
	defer func() { _ = kernel.Close() }()
	r := &retirement{devices: n.devices}
	for _, f := range append(slices.Clone(last.Former), former{last.Config, last.Interface}) {
		if err := r.retire(ctx, kernel, n.owned(f)); err != nil {
			return err
		}
	}
	if err := rules.Remove(ctx, formerNetworks(last, subnet.Config{})); err != nil {
		return err
	}
	if s, ok := n.store.(subnet.Releaser); ok {
		if err := s.Release(ctx, last.Own); err != nil {
			return fmt.Errorf("release the lease: %w", err)
		}
	}
	if err := os.Remove(n.opts.SubnetFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return n.state.remove()
}

// discard removes the leftovers that exist, and returns their number.
func discard(leftovers []backend.Leftover) (removed int, err error) {
	for _, r := range leftovers {
		present, err := r.Present()
		if err == nil && present {
			removed++
			err = r.Remove()
		}
		if err != nil {
			return removed, fmt.Errorf("remove %s: %w", r, err)
		}
	}
	return removed, nil
}
