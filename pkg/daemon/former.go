// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/dataplane/linux"
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

// extent describes which kernel objects a configuration can have led to: those in the scope of
// its backend, and others that the backend names. It tells what an earlier configuration may
// have left in the kernel.
type extent struct {
	scope    dataplane.Scope
	remnants []backend.Remnant
}

func extentOf(be backend.Backend) extent { return extent{be.Scope(), backend.Remnants(be)} }

// extent returns the part of the kernel's state that belonged to f. It is empty if this
// version does not know f's backend.
func (d *daemon) extent(f former) extent {
	be, _, err := d.registry.New(d.env(f.Interface, f.Config))
	if err != nil {
		return extent{}
	}
	return extentOf(be)
}

// covers reports whether e includes everything in other.
func (e extent) covers(other extent) bool {
	return e.scope.Covers(other.scope) && len(e.beyond(other)) == 0
}

// beyond returns the remnants that only other has.
func (e extent) beyond(other extent) []backend.Remnant {
	return slices.DeleteFunc(slices.Clone(other.remnants), func(r backend.Remnant) bool {
		return slices.ContainsFunc(e.remnants, func(own backend.Remnant) bool { return own.String() == r.String() })
	})
}

// outlived returns the configurations whose objects a node with the present backend has
// left behind. last is the state that it started with.
func (d *daemon) outlived(last lastKnown, present backend.Backend) []former {
	all := append(slices.Clone(last.Former), former{last.Config, last.Interface})
	now := extentOf(present)
	return slices.DeleteFunc(all, func(f former) bool { return now.covers(d.extent(f)) })
}

// retirement removes the objects of former configurations once the present one is
// applied.
type retirement struct {
	daemon  *daemon
	former  []former
	present extent
	due     func() // reports that the present configuration is applied
	start   chan struct{}
}

func (d *daemon) newRetirement(fs []former, present backend.Backend) *retirement {
	r := &retirement{daemon: d, former: fs, present: extentOf(present), start: make(chan struct{})}
	r.due = sync.OnceFunc(func() { close(r.start) })
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
	err := r.daemon.retry(ctx, "cannot remove the objects of the former configuration, trying again", func() error {
		// Use a separate Kernel, because the main one caches what it reads. Nexthop
		// objects are left to the main one, which may be about to use them: it deletes
		// unused ones after its next read.
		kernel, err := linux.Open(linux.Options{})
		if err != nil {
			return err
		}
		defer func() { _ = kernel.Close() }()
		for _, f := range r.former {
			if err := r.retire(ctx, kernel, r.daemon.extent(f)); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		r.daemon.record.update(func(now *lastKnown) { now.Former = nil })
	}
}

// retire removes the objects of one configuration, except for devices that another daemon
// uses now, with their objects.
func (r *retirement) retire(ctx context.Context, kernel dataplane.Kernel, former extent) error {
	locks, scope := &r.daemon.devices, former.scope
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

// discard removes the remnants that exist, and returns their number.
func discard(remnants []backend.Remnant) (removed int, err error) {
	for _, r := range remnants {
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

// deviceLocks prevents two daemons on a host from using the same device. The lock files
// are in the state directory. Without a state directory there are no locks.
type deviceLocks struct {
	dir string

	mu   sync.Mutex
	held map[string]io.Closer
}

// take takes the lock of the named device, unless this daemon has it. It returns
// state.ErrInUse, wrapped, if another daemon has it.
func (l *deviceLocks) take(name string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, held := l.held[name]; held {
		return nil
	}
	lock, err := state.Lock(l.dir, "device-"+name)
	if errors.Is(err, state.ErrInUse) {
		return fmt.Errorf("another flanneld has device %s: %w", name, err)
	}
	if err != nil { // the state file has the same problem, which is logged
		return nil
	}
	if l.held == nil {
		l.held = map[string]io.Closer{}
	}
	l.held[name] = lock
	return nil
}

func (l *deviceLocks) release(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if lock, held := l.held[name]; held {
		_ = lock.Close()
		delete(l.held, name)
	}
}

// takeAll takes the locks of all devices in scope s.
func (l *deviceLocks) takeAll(s dataplane.Scope) error {
	for _, name := range s.Devices {
		if err := l.take(name); err != nil {
			return err
		}
	}
	return nil
}

// releaseAll releases all locks.
func (l *deviceLocks) releaseAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, lock := range l.held {
		_ = lock.Close()
	}
	l.held = nil
}
