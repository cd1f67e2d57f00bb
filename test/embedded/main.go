// SPDX-License-Identifier: Apache-2.0

// Command embedded is the example of Documentation/embedding.md: a program that contains the
// node network as one of its parts, with the backends vxlan and host-gw only.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/hostgw"
	"github.com/flanneld/flanneld/backend/vxlan"
	"github.com/flanneld/flanneld/pkg/daemon"
	"github.com/flanneld/flanneld/pkg/options"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := network(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "embedded:", err)
		os.Exit(1)
	}
}

// network runs the node network until ctx ends. flags has the syntax of flanneld's flags.
// Another program could build the flags from a configuration of its own.
func network(ctx context.Context, flags []string) error {
	opts, err := options.Parse(append([]string{"--ip-masq"}, flags...), nil)
	if err != nil {
		return err
	}
	log := klog.Background().WithName("network") // or any other logr.Logger
	return daemon.Run(klog.NewContext(ctx, log), daemon.Config{Options: opts, Backends: backends})
}

// backends returns the catalog of the backends that a configuration may name. With
// builtin.New it would contain all of flanneld's.
func backends(options.Options) (backend.Catalog, error) {
	registry, err := backend.NewRegistry(
		backend.Entry{Type: hostgw.Type, Factory: hostgw.New},
		backend.Entry{Type: vxlan.Type, Factory: vxlan.New},
	)
	return backend.Catalog{Registry: registry}, err
}
