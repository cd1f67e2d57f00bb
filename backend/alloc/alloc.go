// SPDX-License-Identifier: Apache-2.0

// Package alloc takes a subnet for the host, and leaves the routes between the subnets to the
// underlay.
package alloc

import (
	"context"
	"encoding/json"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/subnet"
)

// Type is the backend's name in the configuration. Its leases contain no type.
const Type = "alloc"

// Backend implements backend.Backend.
type Backend struct{ env backend.Env }

// New is the backend's factory. The configuration has no keys of its own.
func New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	warnings, err := subnet.DecodeBackend(raw, &struct{}{})
	if err != nil {
		return nil, nil, err
	}
	return &Backend{env}, warnings, nil
}

// Describe implements backend.Backend. Leases have no type.
func (b *Backend) Describe() backend.Description {
	return backend.Description{Scope: b.env.Scope(), MTU: b.env.Underlay.MTU}
}

// Claim implements backend.Backend.
func (b *Backend) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	return b.env.Claim("", prev), nil
}

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	p, err := b.env.Programmer(ctx, b.env.Scope())
	if err != nil {
		return nil, err
	}
	p.Base = b.env.Base(own)
	return p, nil
}
