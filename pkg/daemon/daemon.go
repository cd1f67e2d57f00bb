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
	"github.com/flanneld/flanneld/pkg/dataplane/linux"
	"github.com/flanneld/flanneld/pkg/health"
	"github.com/flanneld/flanneld/pkg/metrics"
	"github.com/flanneld/flanneld/pkg/options"
	"github.com/flanneld/flanneld/pkg/rules"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/pkg/tune"
	"github.com/flanneld/flanneld/pkg/underlay"
)

// stopTimeout limits the time that the members of the group may take to return. They have
// shorter limits of their own. The next start completes the work that they leave
// unfinished, and the data path is not affected.
const stopTimeout = 1500 * time.Millisecond

// Config is what Run needs.
type Config struct {
	Options options.Options
	// Backends returns the backends that a network may use. builtin.New returns all.
	Backends BackendsFunc
	// Tuner adapts the Go runtime. If it is nil, the runtime stays as it is.
	Tuner *tune.Tuner
}

// BackendsFunc returns the backends for one network. Each network has options of its own.
type BackendsFunc func(options.Options) (backend.Catalog, error)

// host is what a daemon has once, however many networks it serves.
type host struct {
	firewall *rules.Host
	underlay *underlay.Reader
	buffers  linux.Buffers // for the kernel sockets of all networks
	journal  *status.Journal
	tuner    *tune.Tuner
	started  time.Time
}

// served is what a daemon serves: one network, or several.
type served interface {
	health.Source
	// run serves until ctx ends, and then returns nil.
	run(ctx context.Context) error
	// close releases what is left after run. The kernel stays unchanged.
	close()
	// shutdown does what must be done on the host when the daemon is told to stop.
	shutdown(ctx context.Context)
	// started is closed when the start is over. From then on stateIsWritten reports whether the
	// state files are up to date.
	started() <-chan struct{}
	stateIsWritten() bool
	// all returns the metrics of all networks.
	all() []*metrics.Metrics
	// status returns the report about a network. Without a name it returns the report about the
	// only network, or an overview of several.
	status(ctx context.Context, name string) (status.Report, error)
}

// Run runs the daemon until ctx ends, and then returns nil. The data path stays. It returns
// ErrConfigChanged, wrapped, if --exit-on-config-change has ended the daemon.
func Run(ctx context.Context, cfg Config) error {
	journal := status.NewJournal(journalSize)
	ctx = klog.NewContext(ctx, journal.Logger(klog.FromContext(ctx)))
	work, cancel := context.WithCancel(ctx) // ctx itself ends when the daemon should stop
	defer cancel()
	group, members := errgroup.WithContext(work)

	h := &host{journal: journal, tuner: cfg.Tuner, started: time.Now(), firewall: rules.NewHost(), underlay: underlay.NewReader()}
	if h.tuner == nil {
		h.tuner = &tune.Tuner{}
	}
	var s served
	var err error
	if cfg.Options.Several() {
		s, err = openFleet(h, cfg)
	} else {
		s, err = openSingle(ctx, h, cfg)
	}
	if err != nil {
		return err
	}
	if err := listen(ctx, members, group, cfg.Options, s); err != nil {
		cancel()
		_ = group.Wait() // for listeners that are already open
		s.close()
		return err
	}
	if !cfg.Options.Several() { // a hundred networks would leave holes in a heap that grows meanwhile
		h.tuner.Begin()
	}
	group.Go(func() error { return h.tuner.Rest(members, s.started(), s.stateIsWritten) })
	group.Go(func() error { return health.Notifier{}.Watchdog(members, s) })
	group.Go(func() error { return h.firewall.Run(members) })
	group.Go(func() error {
		defer s.close()
		return s.run(members)
	})
	err = waitForGroup(ctx, members, group)
	if ctx.Err() != nil { // the daemon should stop
		s.shutdown(context.WithoutCancel(ctx))
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
