// SPDX-License-Identifier: Apache-2.0

// Package vxlan carries packets between hosts with the kernel's VXLAN device. There is
// one device per address family, with a route, a neighbour and an FDB entry for each
// peer. With DirectRouting, a peer on the same network as this host has only a route.
//
//   - vxlan.go is the Backend, and the pure functions from leases to kernel objects.
//   - config.go is the Backend object of the configuration, with the MTU.
//   - data.go is the backend data of leases.
package vxlan

import (
	"context"
	"crypto/rand"
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
const Type = "vxlan"

// Backend implements backend.Backend.
type Backend struct {
	env    backend.Env
	config config
	device map[prefix.Family]string // device names
}

// New is the backend's factory.
func New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	c, warnings, err := parseConfig(raw, env)
	if err != nil {
		return nil, nil, err
	}
	b := &Backend{env: env, config: c, device: map[prefix.Family]string{}}
	for _, n := range env.Config.Networks {
		b.device[n.Family()] = c.deviceName(n.Family())
	}
	return b, warnings, nil
}

func (b *Backend) scope() dataplane.Scope { return b.env.Scope(b.devices()...) }

func (b *Backend) deviceMTU(f prefix.Family) int { return b.config.deviceMTU(b.env.Underlay.MTU, f) }

// Describe implements backend.Backend.
func (b *Backend) Describe() backend.Description {
	kind := Type
	if b.config.GBP { // see backend.PortClash
		kind += " with GBP"
	}
	packets := []firewall.Payload{{Protocol: firewall.UDP, Port: uint16(b.config.Port)}}
	return backend.Description{
		Scope: b.scope(), LeaseType: Type, MTU: b.env.MTU(b.deviceMTU), Ports: map[string][]int{kind: {b.config.Port}},
		Tunnels: map[prefix.Family][]firewall.Payload{prefix.IPv4: packets, prefix.IPv6: packets}, Matches: b.matches,
	}
}

// matches implements backend.Description.Matches. It compares the VNI in the backend data of the lease with
// this host's VNI, because in a migration from one VNI to another both backends have the type vxlan.
// A lease also matches if its data contains no VNI, as older daemons write it, or VNI 0. A lease
// whose data cannot be decoded matches too: the method Check of the network refuses it later.
func (b *Backend) matches(l subnet.Lease) bool {
	for _, e := range l.Endpoints {
		if d, err := decodeData(e.Data); err == nil && d.VNI != 0 && d.VNI != b.config.VNI {
			return false
		}
	}
	return true
}

// Claim implements backend.Backend. For each family it takes the VTEP MAC from prev, or else
// from an existing device, or else a random one. It never derives a MAC from data that cloned
// hosts share.
func (b *Backend) Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	links, err := b.env.Links(ctx, b.devices()...)
	if err != nil {
		return subnet.Claim{}, err
	}

	prev = backend.NewSide(b, Type).Before(prev) // after a migration, it may have data for two backends
	claim := b.env.Claim(Type, prev)
	for i, n := range b.env.Config.Networks {
		mac := randomMAC()
		before, _ := prev.Endpoint(n.Family())
		if recalled, err := vtepMAC(before.Data); err == nil {
			mac = recalled
		} else if dev, ok := links[b.device[n.Family()]]; ok && dev.Kind == "vxlan" && dev.MAC.IsUnicast() {
			mac = dev.MAC
		}
		claim.Endpoints[i].Data = encodeData(b.config.VNI, mac)
	}
	return claim, nil
}

func randomMAC() dataplane.MAC {
	var mac dataplane.MAC
	_, _ = rand.Read(mac[:]) // never fails
	mac[0] = mac[0]&^1 | 2   // unicast, locally administered (IEEE 802)
	return mac
}

func (b *Backend) devices() []string {
	var names []string
	for _, n := range b.env.Config.Networks {
		names = append(names, b.device[n.Family()])
	}
	return names
}

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	base, err := b.base(own)
	if err != nil {
		return nil, err
	}
	scope := b.scope()
	offload, _ := b.config.txChecksum()
	scope.TxChecksum = offload != dataplane.OffloadAuto
	p, err := b.env.Programmer(ctx, scope)
	if err != nil {
		return nil, err
	}

	p.Base = base
	p.Desired = b.desired
	p.Volatile = b.config.DirectRouting
	if err := p.SetUp(ctx); err != nil {
		return nil, oneline.Join(fmt.Errorf("set up vxlan devices: %w", err), p.Close())
	}
	return &network{p}, nil
}

// network implements backend.Network.
type network struct{ *backend.Programmer }

// Check implements backend.Network. The identities are the VTEP MACs. A peer may use the same
// MAC for both families, because each has its own device.
func (n *network) Check(l subnet.Lease) ([]string, error) {
	var macs []string
	for _, e := range l.Endpoints {
		mac, err := vtepMAC(e.Data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", e.Family(), err)
		}
		macs = append(macs, e.Family().String()+" VTEP MAC "+mac.String())
	}
	return macs, nil
}

func (b *Backend) desired(ctx context.Context, l subnet.Lease) ([]dataplane.Object, error) {
	objects := make([]dataplane.Object, 0, 3*len(l.Endpoints)) // neighbour, FDB entry and route
	for _, e := range l.Endpoints {
		direct, err := b.env.Direct(ctx, b.config.DirectRouting, e.PublicIP)
		if err != nil {
			return nil, err
		}
		if objects, err = desired(objects, e, b.device[e.Family()], direct); err != nil {
			return nil, err
		}
	}
	return objects, nil
}

func (b *Backend) base(own subnet.Lease) (dataplane.State, error) {
	want := b.env.TunnelBase(own)
	offload, _ := b.config.txChecksum()
	for _, e := range own.Endpoints {
		f := e.Family()
		mac, err := vtepMAC(e.Data)
		if err != nil {
			return want, fmt.Errorf("own lease %s: %w", own.Key, err)
		}
		addr, ok := b.env.Underlay.Family(f)
		if !ok {
			return want, fmt.Errorf("own lease %s: %s is not enabled on %s", own.Key, f, b.env.Underlay.Name)
		}

		name := b.device[f]
		want.Add(dataplane.Link{
			Name: name, Kind: "vxlan", MAC: mac, MTU: b.deviceMTU(f), Up: true,
			VXLAN: dataplane.VXLAN{
				VNI: b.config.VNI, Port: b.config.Port, Local: addr.Local, Underlay: b.env.Underlay.Name,
				Learning: b.config.Learning, GBP: b.config.GBP,
			},
			TxChecksum: offload,
		}, dataplane.Addr{Dev: name, Prefix: prefix.Host(e.Subnet.Addr())})
	}
	return want, nil
}

// direct is the device of Env.Direct; if it is empty, the vxlan device encapsulates the packets.
func desired(objects []dataplane.Object, e subnet.Endpoint, device, direct string) ([]dataplane.Object, error) {
	if direct != "" {
		return append(objects, dataplane.NewRoute(e.Subnet, e.PublicIP, direct, false)), nil
	}

	mac, err := vtepMAC(e.Data)
	if err != nil {
		return nil, err
	}
	vtep := e.Subnet.Addr()
	return append(objects,
		dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: device, IP: vtep}, MAC: mac},
		dataplane.FDB{FDBKey: dataplane.FDBKey{Dev: device, MAC: mac}, Dst: e.PublicIP},
		dataplane.NewRoute(e.Subnet, vtep, device, true),
	), nil
}
