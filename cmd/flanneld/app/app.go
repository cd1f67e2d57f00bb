// SPDX-License-Identifier: Apache-2.0

// Package app contains the daemon: options, start-up and lifecycle. Programs that embed
// flanneld import it.
package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/alloc"
	"github.com/flanneld/flanneld/backend/extension"
	"github.com/flanneld/flanneld/backend/hostgw"
	"github.com/flanneld/flanneld/backend/ipip"
	"github.com/flanneld/flanneld/backend/udp"
	"github.com/flanneld/flanneld/backend/vxlan"
	"github.com/flanneld/flanneld/backend/wireguard"
	"github.com/flanneld/flanneld/pkg/status"
	"github.com/flanneld/flanneld/pkg/tunnel"
	"github.com/flanneld/flanneld/pkg/version"
)

// stopTimeout limits the time that the members of the group may take to return. They have
// shorter limits of their own. The next start completes the work that they leave
// unfinished, and the data path is not affected.
const stopTimeout = 1500 * time.Millisecond

// fewCPUs is the number of CPUs up to which a second thread for packets is useless,
// because the pods need the other CPU.
const fewCPUs = 2

// backends returns the registry of all backends. commands is the state of extension in
// this process, carrier that of udp.
func backends(commands *extension.Host, carrier *udp.Host) (backend.Registry, error) {
	return backend.NewRegistry(
		backend.Entry{Type: alloc.Type, Factory: alloc.New, OneThread: true},
		backend.Entry{Type: extension.Type, Factory: commands.New},
		backend.Entry{Type: hostgw.Type, Factory: hostgw.New, OneThread: true},
		backend.Entry{Type: ipip.Type, Factory: ipip.New, OneThread: true},
		backend.Entry{Type: udp.Type, Factory: carrier.New, OneThread: runtime.NumCPU() <= fewCPUs},
		backend.Entry{Type: vxlan.Type, Factory: vxlan.New, OneThread: true},
		backend.Entry{Type: wireguard.Type, Factory: wireguard.New},
	)
}

// Main runs the daemon and returns its exit code: 0 after --help, --version, SIGINT and
// SIGTERM; 1 after an error, which it prints as one line to stderr; 3 if
// --exit-on-config-change has ended the daemon.
func Main(args, env []string, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal kills the process

	opts, err := Parse(args, env)
	switch {
	case errors.Is(err, ErrHelp):
		fmt.Fprint(stderr, Help())
		return 0
	case errors.Is(err, ErrVersion):
		fmt.Fprintln(stderr, version.String())
		return 0
	case err != nil:
		fmt.Fprintln(stderr, "flanneld:", err)
		return 1
	}
	if err := opts.SetupLogging(); err != nil {
		fmt.Fprintln(stderr, "flanneld:", err)
		return 1
	}
	log := klog.Background()
	defer klog.Flush()
	log.Info("flanneld starts", append([]any{"version", version.String()}, opts.LogValues()...)...)
	for _, w := range opts.Warnings {
		log.Error(nil, w)
	}
	if err := run(klog.NewContext(ctx, log), opts, newRuntimeFit(env)); err != nil {
		if errors.Is(err, errConfigChanged) {
			log.Info("flanneld stops, the data path stays", "reason", err)
			return exitConfigChanged
		}
		log.Error(err, "flanneld stops")
		return 1
	}
	log.Info("flanneld stopped, the data path stays")
	return 0
}

// Run runs the daemon until ctx ends, and then returns nil.
func Run(ctx context.Context, opts Options) error { return run(ctx, opts, &runtimeFit{}) }

func run(ctx context.Context, opts Options, fit *runtimeFit) error {
	commands := extension.NewHost(extension.Settings{
		Allow: opts.AllowExtensionBackend, StateDir: opts.StateDir, Name: opts.stateName() + "-commands",
	})
	carrier := udp.NewHost(udp.Settings{Check: tunnel.SourceCheck(opts.UDPSourceCheck), Persist: opts.UDPPersist})
	defer func() { _ = carrier.Close() }()
	registry, err := backends(commands, carrier)
	if err != nil {
		return err
	}
	work, cancel := context.WithCancel(ctx) // ctx itself ends when the daemon should stop
	defer cancel()
	group, members := errgroup.WithContext(work)
	d := &daemon{opts: opts, registry: registry, group: group, health: newHealth(opts),
		devices: deviceLocks{dir: opts.StateDir}, started: time.Now(), journal: status.NewJournal(journalSize),
		up: make(chan struct{}), fit: fit, config: newConfigKeeper(!opts.KubeSubnetMgr)}
	log := d.journal.Logger(klog.FromContext(ctx))
	ctx, members = klog.NewContext(ctx, log), klog.NewContext(members, log)
	if err := d.listen(ctx, members, group); err != nil {
		cancel()
		_ = group.Wait() // for listeners that are already open
		return err
	}
	fit.begin()
	group.Go(func() error { return fit.rest(members, d.up, d.written) })
	group.Go(func() error { return d.notifier.Watchdog(members, d.health) })
	group.Go(func() error { return d.run(members) })
	err = d.wait(ctx, members)
	if ctx.Err() != nil { // the daemon should stop
		commands.Shutdown(context.WithoutCancel(ctx))
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
