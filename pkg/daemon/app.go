// SPDX-License-Identifier: Apache-2.0

// Package daemon is flanneld without its command line: start-up, sessions and reports, and
// what operators do without a running daemon, such as validating a configuration. Programs
// that embed flanneld import it.
package daemon

import (
	"context"
	"time"

	"github.com/flanneld/flanneld/subnet"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/options"
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

// Run runs the daemon until ctx ends, and then returns nil. The data path stays. It returns
// ErrConfigChanged, wrapped, if --exit-on-config-change has ended the daemon.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Tuner == nil {
		cfg.Tuner = &tune.Tuner{}
	}
	backends, err := cfg.Backends(cfg.Options)
	if err != nil {
		return err
	}
	if backends.Close != nil {
		defer backends.Close()
	}
	work, cancel := context.WithCancel(ctx) // ctx itself ends when the daemon should stop
	defer cancel()
	group, members := errgroup.WithContext(work)
	d := &daemon{opts: cfg.Options, registry: backends.Registry, group: group, health: newHealth(cfg.Options),
		devices: deviceLocks{dir: cfg.Options.StateDir}, started: time.Now(), journal: status.NewJournal(journalSize),
		up: make(chan struct{}), tuner: cfg.Tuner, config: newConfigKeeper(func(text []byte) (subnet.Config, error) {
			now, _, err := ValidateConfig(text, !cfg.Options.KubeSubnetMgr, backends.Registry)
			return now, err
		})}
	log := d.journal.Logger(klog.FromContext(ctx))
	ctx, members = klog.NewContext(ctx, log), klog.NewContext(members, log)
	if err := d.listen(ctx, members, group); err != nil {
		cancel()
		_ = group.Wait() // for listeners that are already open
		return err
	}
	d.tuner.Begin()
	group.Go(func() error { return d.tuner.Rest(members, d.up, d.written) })
	group.Go(func() error { return d.notifier.Watchdog(members, d.health) })
	group.Go(func() error { return d.run(members) })
	err = d.wait(ctx, members)
	if ctx.Err() != nil && backends.Shutdown != nil { // the daemon should stop
		backends.Shutdown(context.WithoutCancel(ctx))
	}
	return err
}

// wait waits until the group has returned, or until stopTimeout after it was told to end.
func (d *daemon) wait(ctx, members context.Context) error {
	told := make(chan struct{})
	context.AfterFunc(members, func() { // in the background, because systemd may not read the message
		defer close(told)
		if err := d.notifier.Stopping(); err != nil {
			klog.FromContext(ctx).Error(err, "cannot notify systemd")
		}
	})
	done := make(chan error, 1)
	go func() {
		err := d.group.Wait()
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
