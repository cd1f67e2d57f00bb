// SPDX-License-Identifier: Apache-2.0

// Package hostgw routes packets to peers directly, without encapsulation. All hosts must
// be on the same layer-2 network.
package hostgw

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/subnet"
)

// Type is the backend's name in the configuration and in leases.
const Type = "host-gw"

// Backend implements backend.Backend.
type Backend struct{ env backend.Env }

// New is the backend's factory. The configuration has no keys of its own. New returns an
// error if the public address of this host is not on the external interface, because peers
// could then not use it as a gateway, or if the interface belongs to a VRF.
func New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	warnings, err := subnet.DecodeBackend(raw, &struct{}{})
	if err != nil {
		return nil, nil, err
	}
	if vrf := env.Underlay.VRF; vrf != "" {
		return nil, nil, fmt.Errorf("host-gw does not work in a VRF: %s belongs to %s, but the routes to pods are in the main table; use vxlan, or name another interface with --iface", env.Underlay.Name, vrf)
	}

	for _, a := range env.Underlay.Addrs {
		if a.Public != a.Local {
			return nil, nil, fmt.Errorf("host-gw does not work behind NAT: the public address %s is not assigned to this host (%s has %s)",
				a.Public, env.Underlay.Name, a.Local)
		}
	}
	return &Backend{env}, warnings, nil
}

// Describe implements backend.Backend.
func (b *Backend) Describe() backend.Description {
	return backend.Description{Scope: b.env.Scope(), LeaseType: Type, MTU: b.env.Underlay.MTU}
}

// Claim implements backend.Backend. Leases contain no backend data.
func (b *Backend) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	return b.env.Claim(Type, prev), nil
}

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	p, err := b.env.Programmer(ctx, b.env.Scope())
	if err != nil {
		return nil, err
	}
	p.Base = b.env.Base(own)
	p.Desired = b.desired
	return p, nil
}

func (b *Backend) desired(_ context.Context, l subnet.Lease) ([]dataplane.Object, error) {
	var objects []dataplane.Object
	for _, e := range l.Endpoints {
		objects = append(objects, dataplane.NewRoute(e.Subnet, e.PublicIP, b.env.Underlay.Name, false))
	}
	return objects, nil
}
