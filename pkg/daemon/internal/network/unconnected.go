// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// unconnected is the network of a host whose external interface is not there yet. It serves the pods of
// this host: the traffic rules and the subnet file need no peers. It does not change the kernel's objects,
// which an earlier process may have left.
type unconnected struct{ mtu int }

// unconnectedMTU returns the MTU that the network of be has as soon as interface i is there.
func unconnectedMTU(be backend.Backend, i underlay.Interface) int {
	if sized, ok := be.(backend.Sized); ok {
		return sized.MTU()
	}
	return i.MTU
}

// MTU implements backend.Network.
func (n unconnected) MTU() int { return n.mtu }

// Check implements backend.Network.
func (unconnected) Check(subnet.Lease) ([]string, error) { return nil, nil }

// Sync implements backend.Network.
func (unconnected) Sync(context.Context, backend.Set) (backend.Outcome, error) {
	return backend.Outcome{}, nil
}

// Changed implements backend.Network.
func (unconnected) Changed() <-chan struct{} { return nil }

// Close implements backend.Network.
func (unconnected) Close() error { return nil }
