// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/firewall/nftables"
	"github.com/flanneld/flanneld/subnet"
)

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	if b.config.Mode == modeUserspace {
		return b.startUserspace(ctx, own)
	}
	if b.config.Mode == modeKernel {
		return b.startKernel(ctx, own)
	}
	err := b.kernelPreferred()
	if err == nil {
		var n backend.Network
		if n, err = b.startKernel(ctx, own); err == nil {
			klog.FromContext(ctx).Info("the kernel carries the packets")
			return n, nil
		}
	}
	klog.FromContext(ctx).Info("packets go through user space", "reason", err.Error())
	return b.startUserspace(ctx, own)
}

// kernelPreferred returns an error if mode auto must use user space.
func (b *Backend) kernelPreferred() error {
	if err := b.kernelSupported(); err != nil {
		return err
	}
	if err := fouMissing(); err != nil {
		return err
	}
	return nftables.Available()
}
