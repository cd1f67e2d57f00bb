// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/loop"
	"github.com/flanneld/flanneld/pkg/base/subnetfile"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
)

// fileCheck is the interval at which the subnet file is compared with its wanted content.
const fileCheck = 30 * time.Second

// errStale is the state until the subnet file of a new session is written.
var errStale = errors.New("the file is not written yet")

// fileKeeper writes the subnet file, and writes it again if it was lost or altered.
type fileKeeper struct {
	path    string
	file    subnetfile.File
	report  func(error)
	failing bool
}

// expect reports errStale if the file must be written.
func (k *fileKeeper) expect() {
	if !subnetfile.UpToDate(k.path, k.file) {
		k.report(errStale)
	}
}

func (k *fileKeeper) run(ctx context.Context) {
	_ = loop.New(2*fileCheck, k.step).Run(ctx) // a successful step returns the time until the next one
}

func (k *fileKeeper) step(ctx context.Context) error {
	log := klog.FromContext(ctx)
	var err error
	if !subnetfile.UpToDate(k.path, k.file) {
		if err = subnetfile.Write(k.path, k.file); err == nil {
			log.Info("Wrote subnet file to "+k.path, "mtu", k.file.MTU)
		} else if !k.failing {
			log.Error(err, "no subnet file, trying again")
		}
	}

	k.failing = err != nil
	k.report(err)
	if err != nil {
		return err
	}
	return loop.After(wait.UntilNext(fileCheck))
}

// subnetFile returns the wanted content of the subnet file.
func subnetFile(now lastknown.State, mtu int, masquerade bool) subnetfile.File {
	f := subnetfile.File{MTU: mtu, IPMasq: masquerade}
	for _, n := range now.Config.Networks {
		if e, ok := now.Own.Endpoint(n.Family()); ok {
			f.Entries = append(f.Entries, subnetfile.Entry{Network: n.Prefix, Subnet: e.Subnet})
		}
	}
	return f
}

func previousSubnets(ctx context.Context, path string) []netip.Prefix {
	log := klog.FromContext(ctx)
	previous, err := subnetfile.Read(path)
	if err != nil {
		log.Error(err, "cannot read the previous subnet")
	}

	for _, w := range previous.Warnings {
		log.Error(nil, "damaged subnet file", "path", path, "line", w)
	}
	var subnets []netip.Prefix
	for _, e := range previous.Entries {
		if e.Subnet.IsValid() {
			subnets = append(subnets, e.Subnet)
		}
	}
	return subnets
}
