// Package alloc takes a subnet for the host and leaves the routing to others.
package alloc

import (
	"context"
	"encoding/json"

	"flanneld/backend"
	"flanneld/pkg/dataplane"
	"flanneld/subnet"
)

// Type is the backend's name in the configuration. Leases carry none.
const Type = "alloc"

// Backend implements backend.Backend and, because there is nothing to
// program, backend.Network.
type Backend struct{ env backend.Env }

// New is the backend's factory. The configuration has no keys of its own.
func New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	warnings, err := subnet.DecodeBackend(raw, &struct{}{})
	if err != nil {
		return nil, nil, err
	}
	return &Backend{env}, warnings, nil
}

// Scope implements backend.Backend: nothing in the kernel is ours.
func (*Backend) Scope() dataplane.Scope { return dataplane.Scope{} }

// Claim implements backend.Backend.
func (b *Backend) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	return b.env.Claim("", prev), nil
}

// Start implements backend.Backend.
func (b *Backend) Start(context.Context, subnet.Lease) (backend.Network, error) { return b, nil }

// MTU implements backend.Network.
func (b *Backend) MTU() int { return b.env.Underlay.MTU }

// Check implements backend.Network.
func (*Backend) Check(subnet.Lease) ([]string, error) { return nil, nil }

// Sync implements backend.Network.
func (*Backend) Sync(context.Context, backend.Set) (backend.Outcome, error) {
	return backend.Outcome{}, nil
}

// Changed implements backend.Network.
func (*Backend) Changed() <-chan struct{} { return nil }

// Close implements backend.Network.
func (*Backend) Close() error { return nil }
