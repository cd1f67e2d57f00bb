// SPDX-License-Identifier: Apache-2.0

// Package location lets one backend carry the packets between hosts of one location, and another
// one the packets between locations. The backend between locations encrypts them. The backend
// inside of a location need not.
//
//   - location.go is the Backend, which consists of these two backends.
//   - data.go is what a host publishes about its location, and is pure.
//   - network.go is the Network, which decides about each peer.
//   - rivals.go finds peers that the backend inside could mix up.
//
// The backend between locations serves all peers, and has one route to the whole network. The
// backend inside of the location has a route to the subnet of each of its peers, with a longer
// prefix. So the kernel sends a packet to another host encrypted unless there is such a route. One
// route is added or removed when a peer changes its backend.
package location

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// The two backends, as parts of the Programmer.
const (
	between = iota
	inside
)

// Backend implements backend.Backend with one backend between locations and one inside of them.
type Backend struct {
	env     backend.Env
	between backend.Backend
	inside  backend.Backend
	sides   struct{ between, inside backend.Side }
	digest  string              // of the configuration of the backend inside
	kernel  *backend.Programmer // of the network that was started last
}

// New creates the backend of a network with locations, for backend.Registry.Locate.
func New(env backend.Env, newBetween, newInside backend.Create) (backend.Backend, []string, error) {
	b := &Backend{env: env}
	half := env
	half.Part = func(ctx context.Context) *backend.Programmer { return b.kernel.NewPart(ctx, between) }
	var err error
	var warnings, more []string
	if b.between, warnings, err = newBetween(half); err != nil {
		return nil, nil, err
	}

	half.Part = func(ctx context.Context) *backend.Programmer { return b.kernel.NewPart(ctx, inside) }
	half.Underlay = withoutNAT(env.Underlay)
	if b.inside, more, err = newInside(half); err != nil {
		return nil, nil, err
	}

	same := b.between.Describe().SameLocation
	b.digest = digest(same)
	if port, clash := backend.PortClash(b.between.Describe().Ports, b.inside.Describe().Ports); clash {
		return nil, nil, fmt.Errorf("SameLocation has UDP port %d, which %s also has: want another one",
			port, env.Config.BackendType)
	}

	b.sides.between = backend.NewSide(b.between, env.Config.BackendType)
	b.sides.inside = backend.NewSide(b.inside, same.Type)
	return b, append(warnings, more...), nil
}

// withoutNAT replaces the public addresses by the local ones, to which hosts of one location send.
func withoutNAT(i underlay.Interface) underlay.Interface {
	i.Addrs = slices.Clone(i.Addrs)
	for n := range i.Addrs {
		i.Addrs[n].Public = i.Addrs[n].Local
	}
	return i
}

// Describe implements backend.Backend. The MTU is the smaller one of the two backends, because any peer may change its
// location.
func (b *Backend) Describe() backend.Description {
	d := b.between.Describe().Join(b.inside.Describe())
	d.Inside = []string{b.sides.inside.Type}
	d.Usable = b.usable
	d.Scope.TxChecksum = true // the backend inside may want TxChecksum
	return d
}

// usable implements backend.Description.Usable.
func (b *Backend) usable(ctx context.Context) error {
	if err := backend.Usable(ctx, b.between); err != nil || b.env.Location == "" {
		return err
	}
	return backend.Usable(ctx, b.inside)
}

// Claim implements backend.Backend. A host without a location publishes no data for the backend
// inside.
func (b *Backend) Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	claim, err := b.between.Claim(ctx, prev)
	if err != nil || b.env.Location == "" {
		return claim, err
	}
	inside, err := b.claimInside(ctx, prev)
	if err != nil {
		return subnet.Claim{}, fmt.Errorf("SameLocation: %w", err)
	}

	for i, e := range inside.Endpoints {
		d := data{Name: b.env.Location, Type: b.sides.inside.Type, Config: b.digest, Address: e.PublicIP, Data: e.Data}
		if claim.Endpoints[i].Data, err = d.addTo(claim.Endpoints[i].Data); err != nil {
			return subnet.Claim{}, err
		}
	}
	return claim, nil
}

// claimInside returns the claim of the backend inside, which gets only its own data from prev.
func (b *Backend) claimInside(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	before := prev.Lease().For(b.sides.inside.LeaseType, func(e subnet.Endpoint) json.RawMessage {
		d, _ := decode(e.Data)
		if d.Type != b.sides.inside.Type {
			return nil
		}
		return d.Data
	})
	return b.inside.Claim(ctx, before.Claim())
}

// asInside returns a lease as the backend inside uses it. It returns nil if the host is elsewhere, or
// if its data cannot be used, which why explains.
func (b *Backend) asInside(l *subnet.Lease) (_ *subnet.Lease, why string) {
	own := *l
	own.BackendType = b.sides.inside.LeaseType
	own.NextType = ""
	own.Endpoints = nil

	for _, e := range l.Endpoints {
		d, ok := decode(e.Data)
		switch {
		case !ok || d.Name != b.env.Location:
			return nil, ""
		case d.Type != b.sides.inside.Type:
			return nil, fmt.Sprintf("it publishes data for %q, and not for %s", subnet.Shorten(d.Type), b.sides.inside.Type)
		case d.Config != b.digest:
			return nil, "it has another SameLocation in its network configuration"
		case prefix.FamilyOf(d.Address) != e.Family() || !b.env.Reachable(d.Address):
			return nil, fmt.Sprintf("its address %q at the location is not one of another host", subnet.Shorten(d.Address.String()))
		}

		e.PublicIP = d.Address
		e.Data = d.Data
		e.NextData = nil
		own.Endpoints = append(own.Endpoints, e)
	}
	return &own, ""
}

// ownInside returns this host's lease as the backend inside uses it.
func (b *Backend) ownInside(ctx context.Context, own subnet.Lease) (subnet.Lease, error) {
	// The last known lease may be from a time at which this host had no location.
	claim, err := b.claimInside(ctx, own.Claim())
	own.BackendType = b.sides.inside.LeaseType
	own.NextType = ""
	own.Endpoints = claim.Endpoints
	return own, err
}
