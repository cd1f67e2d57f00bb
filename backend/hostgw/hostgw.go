// Package hostgw routes packets to peers directly, without encapsulation. All
// hosts must be on one layer-2 network.
package hostgw

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"

	"flanneld/backend"
	"flanneld/pkg/dataplane"
	"flanneld/subnet"
)

// Type is the backend's name in the configuration and in leases.
const Type = "host-gw"

// Backend implements backend.Backend.
type Backend struct{ env backend.Env }

// New is the backend's factory. The configuration has no keys of its own.
func New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	warnings, err := subnet.DecodeBackend(raw, &struct{}{})
	if err != nil {
		return nil, nil, err
	}
	for _, a := range env.Underlay.Addrs {
		if a.Public != a.Local {
			return nil, nil, fmt.Errorf("host-gw does not work behind NAT: the public address %s is not assigned to this host (%s has %s)",
				a.Public, env.Underlay.Name, a.Local)
		}
	}
	return &Backend{env}, warnings, nil
}

// Claim implements backend.Backend.
func (b *Backend) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	return b.env.Claim(Type, prev), nil
}

// Start implements backend.Backend.
func (b *Backend) Start(context.Context, subnet.Lease) (backend.Network, error) {
	reconciler, err := b.env.Reconciler()
	if err != nil {
		return nil, err
	}
	return &network{b, reconciler}, nil
}

// network implements backend.Network.
type network struct {
	*Backend
	reconciler *dataplane.Reconciler
}

// MTU implements backend.Network.
func (n *network) MTU() int { return n.env.Underlay.MTU }

// Check implements backend.Network. Leases carry no data.
func (*network) Check(subnet.Lease) ([]string, error) { return nil, nil }

// Changed implements backend.Network.
func (n *network) Changed() <-chan struct{} { return n.reconciler.Changed() }

// Close implements backend.Network.
func (n *network) Close() error { return n.reconciler.Close() }

// Sync implements backend.Network.
func (n *network) Sync(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	want := dataplane.NewState()
	subnets := map[netip.Prefix]string{}
	for _, l := range peers.Leases {
		for _, e := range l.Endpoints {
			want.Add(desired(e, n.env.Underlay.Name))
			subnets[e.Subnet] = l.Key
		}
	}
	report, err := n.reconciler.Reconcile(ctx, want, peers.Complete)
	return backend.OutcomeOf(report, subnets), err
}

// desired is the route to one endpoint of a peer.
func desired(e subnet.Endpoint, dev string) dataplane.Route {
	return dataplane.NewRoute(e.Subnet, e.PublicIP, dev, false)
}
