package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"k8s.io/klog/v2"

	"flanneld/backend"
	"flanneld/pkg/dataplane"
	"flanneld/pkg/dataplane/linux"
	"flanneld/pkg/state"
	"flanneld/pkg/underlay"
	"flanneld/subnet"
)

// former is what this node once ran with, and may have left in the kernel.
type former struct {
	Config    subnet.Config      `json:"config"`
	Interface underlay.Interface `json:"interface"`
}

// extent is what of the kernel a configuration may have.
type extent struct {
	scope    dataplane.Scope
	remnants []backend.Remnant
}

func extentOf(be backend.Backend) extent { return extent{be.Scope(), backend.Remnants(be)} }

// extent returns what of the kernel was f's; nothing if this version cannot
// tell.
func (d *daemon) extent(f former) extent {
	be, _, err := d.registry.New(d.env(f.Interface, f.Config))
	if err != nil {
		return extent{}
	}
	return extentOf(be)
}

// covers reports whether nothing can be of other's without being of e.
func (e extent) covers(other extent) bool {
	return e.scope.Covers(other.scope) && len(e.beyond(other)) == 0
}

// beyond returns the remnants that are other's alone.
func (e extent) beyond(other extent) []backend.Remnant {
	return slices.DeleteFunc(slices.Clone(other.remnants), func(r backend.Remnant) bool {
		return slices.ContainsFunc(e.remnants, func(own backend.Remnant) bool { return own.String() == r.String() })
	})
}

// outlived returns what a node that goes on as present has left behind, given
// what it went on from.
func (d *daemon) outlived(last lastKnown, present backend.Backend) []former {
	all := append(slices.Clone(last.Former), former{last.Config, last.Interface})
	now := extentOf(present)
	return slices.DeleteFunc(all, func(f former) bool { return now.covers(d.extent(f)) })
}

// retirement removes what former configurations have left, once the present
// one is in place.
type retirement struct {
	daemon  *daemon
	former  []former
	present extent
	due     func() // says that the present configuration is in place
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
	err := r.daemon.retry(ctx, "what the former configuration has left cannot be removed yet", func() error {
		// One of its own, because the other keeps books on what it reads. Nexthop objects
		// are left to that one: it may be about to use them, and removes what it finds
		// unused at its next read.
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

// retire removes what is left of one configuration, but for devices that another
// daemon has by now, and what belongs to them.
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

// discard removes those of the remnants that are there, and returns how many
// that were.
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

// deviceLocks keep daemons of one host from working on one device. They are in
// the state directory, and without one there are none.
type deviceLocks struct {
	dir string

	mu   sync.Mutex
	held map[string]io.Closer
}

// take takes the lock of the named device, unless it is held already. It
// returns state.ErrInUse, wrapped, if another daemon has it.
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
	if err != nil { // the state file has the same trouble, which is logged
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

// releaseAll lets go of all locks.
func (l *deviceLocks) releaseAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, lock := range l.held {
		_ = lock.Close()
	}
	l.held = nil
}
