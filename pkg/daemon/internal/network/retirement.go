// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/daemon/internal/ownership"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/linux"
	"github.com/flanneld/flanneld/subnet"
)

// leftBehind returns the configurations whose objects may be in the kernel although a host with
// the present backend does not need them. last is the state before the host uses present.
func (n *Network) leftBehind(last lastknown.State, present backend.Backend) []lastknown.Former {
	now := present.Describe()
	return slices.DeleteFunc(last.All(), func(f lastknown.Former) bool { return now.Covers(n.describe(f)) })
}

// lingering is the time for which the former backend of a migration stays after all hosts have
// published that they have left it. A running daemon changes its routes before it publishes that. A
// daemon that starts with the new configuration publishes first, and its host uses the former backend
// until the daemon has read the leases of all hosts and changed the routes.
const lingering = 10 * time.Second

// retirement is what former configurations have left, which a session removes once its own configuration is applied.
// After a migration it waits until all other hosts have left the former backend.
type retirement struct {
	former   []backend.Description
	migrated bool   // former contains the configuration of a migration
	begin    func() // begins the removal, unless it has begun
}

// newRetirement returns the retirement of the former configurations fs, and of what else is recorded to exist.
func (n *Network) newRetirement(fs []lastknown.Former, present backend.Backend) *retirement {
	r := &retirement{}
	for _, f := range fs {
		r.former = append(r.former, n.describe(f))
		r.migrated = r.migrated || f.Config.Migrates()
	}

	for _, l := range present.Describe().Beyond(backend.Description{Leftovers: n.catalog.Leftovers}) {
		if there, err := l.Present(); there || err != nil {
			r.former = append(r.former, backend.Description{Leftovers: []backend.Leftover{l}})
		}
	}
	return r
}

// due is called after each complete pass without an error. It lets the removal begin, unless hosts still use
// the former backend of a migration.
func (r *retirement) due(p backend.Pass) {
	if !r.migrated || p.OneBackend {
		r.begin()
	}
}

// remove removes the objects of former configurations on a host that needs the objects in present. Before
// that it closes tunnels that a network which has ended has left in this process, so that they carried
// packets until now.
func (n *Network) remove(
	ctx context.Context, o linux.Options, present backend.Description, former []backend.Description,
) error {
	if n.catalog.CloseUnused != nil {
		if err := n.catalog.CloseUnused(); err != nil {
			return err
		}
	}

	// Use a separate Kernel, because the main one caches what it reads.
	kernel, err := n.openKernel(o)
	if err != nil {
		return err
	}
	defer func() { _ = kernel.Close() }()
	for _, f := range former {
		if err := ownership.Remove(ctx, kernel, n.devices, present, f); err != nil {
			return err
		}
	}
	return nil
}

// retire removes what former configurations have left.
func (n *Network) retire(ctx context.Context, s *session) {
	past := s.retirement
	if len(past.former) == 0 {
		return
	}

	if past.migrated && wait.For(ctx, lingering) != nil {
		return
	}

	err := retry(ctx, "cannot remove the objects of the former configuration, trying again", func() error {
		// Nexthop objects are left to the main Kernel, which may be about to use them: it deletes
		// unused ones after its next read.
		return n.remove(ctx, linux.Options{}, s.be.Describe(), past.former)
	})
	if err != nil {
		return
	}
	n.state.Update(func(now *lastknown.State) { now.Former = nil })
	n.claimLess(s.be)
	n.progress.retired()
	s.rules.Send() // they guard the tunnels of former configurations only until then
}

// Retire removes everything that the network has on this host, and its lease in the store unless keep is set. The
// caller must not have called Run.
func (n *Network) Retire(ctx context.Context, keep bool) error {
	last := n.last()
	all := []backend.Description{{Leftovers: n.catalog.Leftovers}}
	for _, f := range last.All() {
		all = append(all, n.describe(f))
	}
	if err := n.remove(ctx, linux.Options{NexthopObjects: true}, backend.Description{}, all); err != nil {
		return err
	}
	n.devices.Keep()
	if err := n.rules.Remove(ctx, last.FormerNetworks(subnet.Config{})); err != nil {
		return err
	}
	if !keep {
		if err := n.store.Release(ctx, last.Own); err != nil {
			return fmt.Errorf("release the lease: %w", err)
		}
	}

	files := []string{n.opts.SubnetFile}
	if !keep {
		for _, d := range all {
			files = append(files, d.Kept...)
		}
	}
	for _, path := range files {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return n.state.Remove()
}
