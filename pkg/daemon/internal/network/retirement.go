// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/daemon/internal/ownership"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/linux"
	"github.com/flanneld/flanneld/subnet"
)

// owned returns the kernel objects that f can have led to.
func (p *parts) owned(f lastknown.Former) ownership.Objects {
	return ownership.In(p.env(f.Interface, f.Config), p.catalog.Registry)
}

// leftBehind returns the configurations whose objects may be in the kernel although a host with
// the present backend does not need them. last is the state before the host uses present.
func (p *parts) leftBehind(last lastknown.State, present backend.Backend) []lastknown.Former {
	all := append(slices.Clone(last.Former), lastknown.Former{Config: last.Config, Interface: last.Interface})
	now := ownership.Of(present)
	return slices.DeleteFunc(all, func(f lastknown.Former) bool { return now.Covers(p.owned(f)) })
}

// lingering is the time for which the former backend of a migration stays after all hosts have
// published that they have left it. A running daemon changes its routes before it publishes that. A
// daemon that starts with the new configuration publishes first, and its host uses the former backend
// until the daemon has read the leases of all hosts and changed the routes.
const lingering = 10 * time.Second

// retirement removes the objects of former configurations once the present one is
// applied. After a migration it waits until all other hosts have left the former backend.
type retirement struct {
	remover    ownership.Remover
	openKernel func(linux.Options) (kernel, error)
	former     []ownership.Objects
	migrated   bool // former contains the configuration of a migration
	start      chan struct{}
	begin      func() // closes start; may be called twice
	forget     func() // called when everything is removed: clears the former configurations in the state
	done       func() // called after forget, when the locks of former devices are released too
}

// remover returns the Remover of former configurations on a host that needs the objects in present.
func (p *parts) remover(present ownership.Objects) ownership.Remover {
	return ownership.Remover{Present: present, Devices: p.devices, CloseUnused: p.catalog.CloseUnused}
}

// newRetirement returns the retirement of the former configurations fs. When everything is removed, the
// retirement sends rules, because the traffic rules must guard the tunnels of fs only until then.
func (p *parts) newRetirement(fs []lastknown.Former, present backend.Backend, rules wait.Signal) *retirement {
	var former []ownership.Objects
	migrated := false
	for _, f := range fs {
		former = append(former, p.owned(f))
		migrated = migrated || f.Config.Migrates()
	}

	for _, l := range ownership.Of(present).Beyond(ownership.Objects{Leftovers: p.catalog.Leftovers}) {
		if there, err := l.Present(); there || err != nil {
			former = append(former, ownership.Objects{Leftovers: []backend.Leftover{l}})
		}
	}

	start := make(chan struct{})
	return &retirement{
		remover: p.remover(ownership.Of(present)), openKernel: p.openKernel,
		former: former, migrated: migrated,
		start: start, begin: sync.OnceFunc(func() { close(start) }),
		forget: func() { p.state.Update(func(now *lastknown.State) { now.Former = nil }) },
		done: func() {
			now, _ := p.state.Get()
			_ = p.claim(p.claimed(now, present)) // cannot be refused, because it is less than before
			p.progress.retired()
			rules.Send()
		},
	}
}

// due is called after each complete pass without an error. It lets run begin to remove objects, unless
// hosts still use the former backend of a migration.
func (r *retirement) due(p backend.Pass) {
	if !r.migrated || p.OneBackend {
		r.begin()
	}
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
	if r.migrated && wait.For(ctx, lingering) != nil {
		return
	}

	err := retry(ctx, "cannot remove the objects of the former configuration, trying again", func() error {
		// Use a separate Kernel, because the main one caches what it reads. Nexthop
		// objects are left to the main one, which may be about to use them: it deletes
		// unused ones after its next read.
		kernel, err := r.openKernel(linux.Options{})
		if err != nil {
			return err
		}
		defer func() { _ = kernel.Close() }()
		for _, f := range r.former {
			if err := r.remover.Remove(ctx, kernel, f); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return
	}
	r.forget()
	for _, f := range r.former { // only now: until then releaseDevices keeps these locks when a change is refused
		r.remover.Release(f)
	}
	r.done()
}

// retireAll removes everything that the network has on this host, and its lease in the store unless keep is set. There
// must be no session.
func (p *parts) retireAll(ctx context.Context, keep bool) error {
	last := p.past
	if now, ok := p.state.Get(); ok {
		last = now
	}

	kernel, err := p.openKernel(linux.Options{NexthopObjects: true})
	if err != nil {
		return err
	}
	defer func() { _ = kernel.Close() }()
	r := p.remover(ownership.Objects{})
	if err := r.Remove(ctx, kernel, ownership.Objects{Leftovers: p.catalog.Leftovers}); err != nil {
		return err
	}

	for _, f := range append(slices.Clone(last.Former), lastknown.Former{Config: last.Config, Interface: last.Interface}) {
		former := p.owned(f)
		if err := r.Remove(ctx, kernel, former); err != nil {
			return err
		}
		r.Release(former)
	}
	if err := p.rules.Remove(ctx, last.FormerNetworks(subnet.Config{})); err != nil {
		return err
	}
	if s, ok := p.store.(subnet.Releaser); ok && !keep {
		if err := s.Release(ctx, last.Own); err != nil {
			return fmt.Errorf("release the lease: %w", err)
		}
	}
	if err := os.Remove(p.opts.SubnetFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return p.state.Remove()
}
