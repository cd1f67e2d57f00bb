// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/statefile"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/daemon/internal/network"
	"github.com/flanneld/flanneld/pkg/options"
)

// leaveOtherMode removes what a daemon with the same store and files has left that served several networks,
// if this one serves a single one, or the other way round.
func leaveOtherMode(ctx context.Context, h *network.Host, cfg Config) error {
	o := cfg.Options
	return lastknown.Each(o.StateDir, func(file string, last lastknown.State) error {
		former, ok := ofOtherMode(o, file, last)
		if !ok {
			return nil
		}

		log := klog.FromContext(ctx).WithValues("network", last.Config.Prefixes())
		err := retire(klog.NewContext(ctx, log), network.Config{Host: h, Options: former, Name: last.Name, Backends: cfg.Backends}, false)
		if errors.Is(err, statefile.ErrInUse) {
			log.Info("another flanneld serves this network, so it stays", "subnetFile", former.SubnetFile)
			return nil
		}
		if err != nil {
			return fmt.Errorf("remove what a daemon with other --networks has left: %w", err)
		}
		log.Info("removed what a daemon with other --networks has left", "subnetFile", former.SubnetFile)
		return nil
	})
}

// ofOtherMode returns the options of a daemon in the other mode that has the state last in that file.
func ofOtherMode(o options.Options, file string, last lastknown.State) (former options.Options, ok bool) {
	former = o
	if o.Several() {
		former.Networks = nil
		former.WatchNetworks = false
	} else {
		former = o.Network(last.Name)
	}
	single := last.Name == ""
	return former, !o.KubeSubnetMgr && single == o.Several() && file == former.StateName()
}

// retire removes what this host has of a network that does not run, and its lease unless keep is set.
func retire(ctx context.Context, c network.Config, keep bool) error {
	n, err := network.Open(ctx, c)
	if err != nil {
		return err
	}
	defer n.Close()
	return n.Retire(ctx, keep)
}
