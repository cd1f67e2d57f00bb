// SPDX-License-Identifier: Apache-2.0

// Package ipip encapsulates packets in IP, with the kernel's own tunnel devices: IPv4 in IPv4
// (ipip) and IPv6 in IPv6 (ip6tnl). It adds one route for each peer and family. The gateway of
// the route is the public address of the peer.
package ipip

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/subnet"
)

// Type is the backend's name in the configuration and in leases.
const Type = "ipip"

// config is the Backend object of the network configuration.
type config struct {
	DirectRouting bool // plain routes, without the tunnel, to peers on the same network as this host
}

// Defaults returns the keys of Backend with their defaults, as a struct. The reference
// page is generated from it and from the comments of its fields.
func Defaults() any { return config{} }

// Backend implements backend.Backend.
type Backend struct {
	env    backend.Env
	config config
}

// New is the backend's factory.
func New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	b := &Backend{env: env}
	warnings, err := subnet.DecodeBackend(raw, &b.config)
	if err != nil {
		return nil, nil, err
	}

	for _, n := range env.Config.Networks {
		f := n.Family()
		if mtu := b.deviceMTU(f); mtu < f.MinMTU() {
			return nil, nil, fmt.Errorf("%s has an MTU of %d, which leaves %d bytes inside the tunnel: %s needs %d",
				env.Underlay.Name, env.Underlay.MTU, mtu, f, f.MinMTU())
		}
	}
	return b, warnings, nil
}

func (b *Backend) deviceMTU(f prefix.Family) int { return b.env.Underlay.MTU - kinds[f].overhead }

// kind contains the differences of a tunnel between the address families.
type kind struct {
	link     string
	device   string // for IPv4 the name that other flannel daemons use, too
	protocol uint8  // IP protocol number of packets that carry the family
	overhead int    // of the outer header, in bytes
}

var kinds = map[prefix.Family]kind{
	prefix.IPv4: {link: dataplane.KindIPIP, device: "flannel.ipip", protocol: 4, overhead: 20},
	prefix.IPv6: {link: dataplane.KindIP6Tnl, device: "flannel-v6.ipip", protocol: 41, overhead: 40},
}

func (b *Backend) scope() dataplane.Scope {
	var devices []string
	for _, n := range b.env.Config.Networks {
		devices = append(devices, kinds[n.Family()].device)
	}
	return b.env.Scope(devices...)
}

// Describe implements backend.Backend.
func (b *Backend) Describe() backend.Description {
	d := backend.Description{
		Scope: b.scope(), LeaseType: Type, MTU: b.env.MTU(b.deviceMTU), Usable: b.usable, Tunnels: map[prefix.Family][]firewall.Payload{},
	}
	for f, k := range kinds {
		d.Tunnels[f] = []firewall.Payload{{Protocol: k.protocol}}
	}
	return d
}

// probeDevice is the name of the device that usable creates and deletes again.
const probeDevice = "flannel-try"

// usable implements backend.Description.Usable.
func (b *Backend) usable(ctx context.Context) error {
	links, err := b.links(ctx)
	if err != nil {
		return err
	}

	for _, n := range b.env.Config.Networks {
		k := kinds[n.Family()]
		addr, ok := b.env.Underlay.Family(n.Family())
		if _, there := links[k.device]; there || !ok {
			continue
		}
		err := b.env.TryDevice(ctx, dataplane.Link{
			Name: probeDevice, Kind: k.link, MTU: b.deviceMTU(n.Family()), Tunnel: dataplane.Tunnel{Local: addr.Local},
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Claim implements backend.Backend. Leases contain no backend data.
func (b *Backend) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	return b.env.Claim(Type, prev), nil
}

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	base, err := b.base(own)
	if err != nil {
		return nil, err
	}
	if _, err := b.links(ctx); err != nil {
		return nil, err
	}
	p, err := b.env.Programmer(ctx, b.scope())
	if err != nil {
		return nil, err
	}

	p.Base = base
	p.Desired = b.desired
	p.Volatile = b.config.DirectRouting
	if err := p.SetUp(ctx); err != nil {
		return nil, oneline.Join(fmt.Errorf("set up ipip devices: %w", err), p.Close())
	}
	return p, nil
}

// links returns the tunnel devices that exist.
func (b *Backend) links(ctx context.Context) (map[string]dataplane.Link, error) {
	links, err := b.env.Links(ctx, b.scope().Devices...)
	if err != nil {
		return nil, err
	}
	for _, n := range b.env.Config.Networks {
		k := kinds[n.Family()]
		// A device of another kind was given this name on purpose, so it is not replaced.
		if l, ok := links[k.device]; ok && l.Kind != k.link {
			return nil, backend.DeviceConflict(l, k.link)
		}
	}
	return links, nil
}

func (b *Backend) base(own subnet.Lease) (dataplane.State, error) {
	want := b.env.TunnelBase(own)
	for _, e := range own.Endpoints {
		f := e.Family()
		addr, ok := b.env.Underlay.Family(f)
		if !ok {
			return want, fmt.Errorf("own lease %s: %s is not enabled on %s", own.Key, f, b.env.Underlay.Name)
		}
		k := kinds[f]
		want.Add(dataplane.Link{
			Name: k.device, Kind: k.link, MTU: b.deviceMTU(f), Up: true,
			Tunnel: dataplane.Tunnel{Local: addr.Local},
		}, dataplane.Addr{Dev: k.device, Prefix: prefix.Host(e.Subnet.Addr())})
	}
	return want, nil
}

func (b *Backend) desired(ctx context.Context, l subnet.Lease) ([]dataplane.Object, error) {
	var objects []dataplane.Object
	for _, e := range l.Endpoints {
		direct, err := b.env.Direct(ctx, b.config.DirectRouting, e.PublicIP)
		if err != nil {
			return nil, err
		}
		objects = append(objects, desired(e, direct))
	}
	return objects, nil
}

// direct is the device of Env.Direct; if it is empty, the tunnel device encapsulates the packets.
func desired(e subnet.Endpoint, direct string) dataplane.Route {
	if direct != "" {
		return dataplane.NewRoute(e.Subnet, e.PublicIP, direct, false)
	}
	return dataplane.NewRoute(e.Subnet, e.PublicIP, kinds[e.Family()].device, true)
}
