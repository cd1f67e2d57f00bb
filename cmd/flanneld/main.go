// SPDX-License-Identifier: Apache-2.0

// Command flanneld gives this host a subnet of a flat network and keeps the
// kernel's routes to the subnets of all other hosts.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend/builtin"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/tune"
	"github.com/flanneld/flanneld/pkg/base/version"
	"github.com/flanneld/flanneld/pkg/daemon"
	"github.com/flanneld/flanneld/pkg/options"
)

// The exit codes.
const (
	exitOK            = 0
	exitError         = 1 // after one line that says why
	exitConfigChanged = 3 // --exit-on-config-change has ended the daemon because the configuration has changed
)

func main() { os.Exit(run(os.Args[1:], os.Environ(), os.Stderr)) }

// run runs the daemon until SIGINT, SIGTERM or an error, and returns its exit code. With --help or
// --version it only prints.
func run(args, env []string, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // stop catching signals, so that a second one kills the process

	opts, err := options.Parse(args, env)
	switch {
	case errors.Is(err, options.ErrHelp):
		fmt.Fprint(stderr, options.Help())
		return exitOK
	case errors.Is(err, options.ErrVersion):
		fmt.Fprintln(stderr, version.String())
		return exitOK
	case err != nil:
		fmt.Fprintln(stderr, "flanneld:", oneline.Text(err))
		return exitError
	}
	if err := opts.SetupLogging(); err != nil {
		fmt.Fprintln(stderr, "flanneld:", oneline.Text(err))
		return exitError
	}
	log := klog.Background()
	defer klog.Flush()
	log.Info("flanneld starts", append([]any{"version", version.String()}, opts.LogValues()...)...)
	for _, w := range opts.Warnings {
		log.Error(nil, w)
	}

	err = daemon.Run(klog.NewContext(ctx, log), daemon.Config{Options: opts, Backends: builtin.New, Tuner: tune.New(env)})
	switch {
	case errors.Is(err, daemon.ErrConfigChanged):
		log.Info("flanneld stops, the data path stays", "reason", oneline.Text(err))
		return exitConfigChanged
	case err != nil:
		log.Error(errors.New(oneline.Text(err)), "flanneld stops")
		return exitError
	}
	log.Info("flanneld stopped, the data path stays")
	return exitOK
}
