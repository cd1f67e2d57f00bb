// SPDX-License-Identifier: Apache-2.0

// Package overflow lets the routers of a cloud carry the packets of pods, and a tunnel those
// packets that the routers cannot carry, because the quota of routes is used up, or because a host
// is in another VPC or outside of the cloud.
//
//   - overflow.go is the Backend, which consists of a cloud and a tunnel.
//   - data.go is the backend data of leases. It decides between which hosts the routers carry packets,
//     and is pure.
//   - network.go is the Network, which gives the tunnel the peers that need it.
//   - report.go is the log.
//
// The kernel has objects only for peers that need the tunnel. Packets to the others follow the default
// route to the routers of the cloud. A migration also has two backends, but its routes stand by for each
// other. Here routes must not stand by, because even such a route precedes the default route.
package overflow

import (
	"context"
	"encoding/json"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// Backend implements backend.Backend with a cloud and a tunnel.
type Backend struct {
	cloud  *cloudnet.Backend
	tunnel backend.Backend
	side   backend.Side // of the tunnel

	present atomic.Pointer[map[prefix.Family]data] // data of this host in the running network; nil before it first changes
}

// New creates the backend for a cloud and the tunnel that its Overflow describes, for backend.Registry.Combine.
func New(env backend.Env, newCloud, newTunnel backend.Create) (backend.Backend, []string, error) {
	c, warnings, err := newCloud(env)
	if err != nil {
		return nil, nil, err
	}
	env.Elsewhere = true
	tunnel, more, err := newTunnel(env)
	if err != nil {
		return nil, nil, err
	}
	cloud := c.(*cloudnet.Backend) // no other backend has an Overflow
	return &Backend{cloud: cloud, tunnel: tunnel, side: backend.NewSide(tunnel, cloud.Overflow.Type)}, append(warnings, more...), nil
}

// Describe implements backend.Backend. The MTU is at most the one of the tunnel, because any peer may come to need the
// tunnel.
func (b *Backend) Describe() backend.Description {
	d := b.cloud.Describe().Join(b.tunnel.Describe())
	d.Usable = b.tunnel.Describe().Usable // a host that cannot use the cloud uses the tunnel
	return d
}

// Claim implements backend.Backend. It makes no call of the cloud, because a host that cannot use
// the cloud uses the tunnel. A host that already had a lease publishes the same data about its
// routes until the first comparison, unless its address has changed.
func (b *Backend) Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	before := map[prefix.Family]data{}
	addresses := map[prefix.Family]netip.Addr{}
	if prev.BackendType == b.Describe().LeaseType {
		for _, e := range prev.Endpoints {
			f := prefix.FamilyOf(e.PublicIP)
			before[f], _, _ = decode(e.Data) // data that cannot be read is replaced
			addresses[f] = e.PublicIP
		}
		prev = prev.Lease().For(b.side.LeaseType, ofTunnel).Claim()
	}

	claim, err := b.tunnel.Claim(ctx, prev)
	if err != nil {
		return subnet.Claim{}, err
	}
	claim.BackendType = b.Describe().LeaseType
	claim.NextType = ""
	if now := b.present.Load(); now != nil {
		before = *now
	}

	for i, e := range claim.Endpoints {
		f := prefix.FamilyOf(e.PublicIP)
		d := before[f]
		if addresses[f].IsValid() && addresses[f] != e.PublicIP { // the routes lead to the host with the former address
			d = data{}
		}
		d.Overflow = e.Data
		claim.Endpoints[i].Data = d.encode()
	}
	return claim, nil
}

// tunnelled returns the chosen endpoints of l as the tunnel uses them.
func (b *Backend) tunnelled(l *subnet.Lease, chosen func(subnet.Endpoint) bool) *subnet.Lease {
	own := *l
	own.Endpoints = slices.DeleteFunc(slices.Clone(l.Endpoints), func(e subnet.Endpoint) bool { return !chosen(e) })
	own = own.For(b.side.LeaseType, ofTunnel)
	return &own
}

func ofTunnel(e subnet.Endpoint) json.RawMessage {
	d, _, _ := decode(e.Data) // Check has refused data that cannot be read
	return d.Overflow
}
