// SPDX-License-Identifier: Apache-2.0

// Package daemon is flanneld without its command line: start-up, sessions and reports, and
// what operators do without a running daemon, such as validating a configuration. Programs
// that embed flanneld import it.
//
// Run begins a network. network.go tells its life: startup.go obtains configuration, interface
// and lease, resume.go serves from the last known state meanwhile, session.go runs the backend,
// and move.go follows the store and the external interface. phase.go names the phases of this
// life.
package daemon

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/dataplane/linux"
	"github.com/flanneld/flanneld/pkg/health"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/rules"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/pkg/tune"
)

// stopTimeout limits the time that the members of the group may take to return. They have
// shorter limits of their own. The next start completes the work that they leave
// unfinished, and the data path is not affected.
const stopTimeout = 1500 * time.Millisecond

// Config is what Run needs.
type Config struct {
	Options options.Options
	// Backends returns the backends that the network may use. builtin.New returns all.
	Backends func(options.Options) (backend.Catalog, error)
	// Tuner adapts the Go runtime. If it is nil, the runtime stays as it is.
	Tuner *tune.Tuner
}

// host is what a daemon has once, however many networks it serves.
type host struct {
	kernel   dataplane.Kernel
	devices  *deviceLocks
	firewall *rules.Host
	journal  *status.Journal
	tuner    *tune.Tuner
	started  time.Time
}

// Run runs the daemon until ctx ends, and then returns nil. The data path stays. It returns
// ErrConfigChanged, wrapped, if --exit-on-config-change has ended the daemon.
func Run(ctx context.Context, cfg Config) error {
	journal := status.NewJournal(journalSize)
	ctx = klog.NewContext(ctx, journal.Logger(klog.FromContext(ctx)))
	work, cancel := context.WithCancel(ctx) // ctx itself ends when the daemon should stop
	defer cancel()
	group, members := errgroup.WithContext(work)

	kernel, err := linux.Open(linux.Options{NexthopObjects: cfg.Options.NexthopObjects == options.NexthopsAuto})
	if err != nil {
		return err
	}
	h := &host{
		kernel: kernel, devices: &deviceLocks{dir: cfg.Options.StateDir}, journal: journal, tuner: cfg.Tuner, started: time.Now(),
		firewall: rules.NewHost(),
	}
	if h.tuner == nil {
		h.tuner = &tune.Tuner{}
	}
	n, err := openNetwork(ctx, h, cfg, openStore)
	if err != nil {
		_ = kernel.Close()
		return err
	}
	closeAll := func() {
		n.close()
		_ = kernel.Close()
	}
	if err := listen(ctx, members, group, n); err != nil {
		cancel()
		_ = group.Wait() // for listeners that are already open
		closeAll()
		return err
	}
	h.tuner.Begin()
	group.Go(func() error { return h.tuner.Rest(members, n.ready.up, n.stateIsWritten) })
	group.Go(func() error { return health.Notifier{}.Watchdog(members, n.ready.health) })
	group.Go(func() error { return h.firewall.Run(members) })
	group.Go(func() error { return n.state.run(members) })
	group.Go(func() error {
		defer closeAll()
		return n.run(members)
	})
	err = waitForGroup(ctx, members, group)
	if ctx.Err() != nil && n.catalog.Shutdown != nil { // the daemon should stop
		n.catalog.Shutdown(context.WithoutCancel(ctx))
	}
	return err
}

// waitForGroup waits until the group has returned, or until stopTimeout after it was told to end.
func waitForGroup(ctx, members context.Context, group *errgroup.Group) error {
	told := make(chan struct{})
	context.AfterFunc(members, func() { // in the background, because systemd may not read the message
		defer close(told)
		if err := (health.Notifier{}).Stopping(); err != nil {
			klog.FromContext(ctx).Error(err, "cannot notify systemd")
		}
	})
	done := make(chan error, 1)
	go func() {
		err := group.Wait()
		<-told
		done <- err
	}()
	<-members.Done() // ends at the latest when all members have returned
	var err error
	select {
	case err = <-done:
	case <-time.After(stopTimeout):
		klog.FromContext(ctx).Error(nil, "not everything has ended in time", "after", stopTimeout)
		err = context.Cause(members)
	}
	if ctx.Err() != nil { // the daemon should stop, so an interruption is not a failure
		return nil
	}
	return err
}
