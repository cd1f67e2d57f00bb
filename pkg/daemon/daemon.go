// SPDX-License-Identifier: Apache-2.0

// Package daemon is flanneld without its command line: the process, and what operators do without
// a running daemon, such as validating a configuration. Programs that embed flanneld import it.
//
// Run serves one network, by package network, or several. With several networks, fleet.go follows the configurations
// in the store, roster.go decides which of them can be used beside each other, by what each claims on this host
// (claims.go), and member.go makes one of the networks what is wanted of it, by the same package. One mutex protects
// all of that. modes.go is the change from one of these modes to the other.
package daemon

import (
	"context"
	"os"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/daemon/internal/network"
	"github.com/flanneld/flanneld/pkg/report/health"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// stopTimeout limits the time for which Run waits until its goroutines have returned. They
// have shorter limits of their own. If Run stops waiting, the next start completes the work
// that they leave unfinished, and the data path is not affected.
const stopTimeout = 1500 * time.Millisecond

// Run runs the daemon until ctx ends. Then it calls the Shutdown functions of the backends, and
// returns nil. The data path stays. Before the end of ctx, Run returns only with an error: the daemon
// cannot start or go on. The error is ErrConfigChanged, wrapped, if --exit-on-config-change has ended
// the daemon.
func Run(ctx context.Context, cfg Config) error {
	journal := status.NewJournal(journalSize)
	ctx = klog.NewContext(ctx, journal.Logger(klog.FromContext(ctx)))
	work, cancel := context.WithCancel(ctx) // ends also if Run fails, while ctx ends only when the daemon should stop
	defer cancel()
	group, members := errgroup.WithContext(work)

	protectLock(ctx)
	h := network.NewHost(journal, cfg.Tuner)
	if err := leaveOtherMode(ctx, h, cfg); err != nil {
		return err
	}

	var s served
	var err error
	if cfg.Options.Several() {
		s, err = openFleet(ctx, h, cfg)
	} else {
		s, err = network.Open(ctx, network.Config{Host: h, Options: cfg.Options, Backends: cfg.Backends})
	}
	if err != nil {
		return err
	}
	if err := listen(ctx, members, group, cfg.Options, s); err != nil {
		cancel()
		_ = group.Wait() // group serves the listeners that are already open
		s.Close()
		return err
	}
	if !cfg.Options.Several() { // the heap of a hundred networks would grow during their start, and keep holes
		h.Tuner.Begin()
	}

	group.Go(func() error { return h.Tuner.Rest(members, s.Up(), s.StateIsWritten) })
	group.Go(func() error { return health.Notifier{}.Watchdog(members, s) })
	group.Go(func() error {
		announce(members, s.Up())
		return nil
	})

	group.Go(func() error { return h.Firewall.Run(members) })
	group.Go(func() error {
		defer s.Close()
		return s.Run(members)
	})

	err = waitForGroup(ctx, members, group)
	if ctx.Err() != nil { // the daemon should stop
		s.Shutdown(context.WithoutCancel(ctx))
	}
	return err
}

// protectLock lets only root read the lock that iptables programs share: a user who can read it can hold it,
// and so keep rules away. These programs create it like that, but touch and kubelet do not.
func protectLock(ctx context.Context) {
	const lock = "/run/xtables.lock"
	info, err := os.Lstat(lock)
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm()&0o077 == 0 {
		return
	}
	if err := os.Chmod(lock, 0o600); err != nil {
		klog.FromContext(ctx).Error(err, "any user can hold the lock of iptables, and so keep rules away")
	}
}

// announce tells the log and systemd that the daemon is ready, when up is closed.
func announce(ctx context.Context, up <-chan struct{}) {
	select {
	case <-up:
	case <-ctx.Done():
		return
	}

	klog.FromContext(ctx).Info("flannel is ready")
	if err := (health.Notifier{}).Ready(ctx); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "cannot notify systemd")
	}
}

// waitForGroup waits for group, at most for stopTimeout after the end of its context members.
func waitForGroup(ctx, members context.Context, group *errgroup.Group) error {
	notified := make(chan struct{})
	context.AfterFunc(members, func() { // in the background, because systemd may not read the message at once
		defer close(notified)
		if err := (health.Notifier{}).Stopping(context.WithoutCancel(ctx)); err != nil {
			klog.FromContext(ctx).Error(err, "cannot notify systemd")
		}
	})

	done := make(chan error, 1)
	go func() {
		err := group.Wait()
		<-notified
		done <- err
	}()

	<-members.Done() // ends at the latest when all goroutines of group have returned
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
