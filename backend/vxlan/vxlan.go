// Package vxlan carries packets between hosts in VXLAN, by the kernel's own
// device: one per address family, with a route, a neighbour and an FDB entry
// for each peer.
package vxlan

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"flanneld/backend"
	"flanneld/pkg/dataplane"
	"flanneld/pkg/prefix"
	"flanneld/subnet"
)

// Type is the backend's name in the configuration and in leases.
const Type = "vxlan"

// Backend implements backend.Backend.
type Backend struct {
	env    backend.Env
	config config
}

// New is the backend's factory.
func New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	c, warnings, err := parseConfig(raw, env)
	if err != nil {
		return nil, nil, err
	}
	return &Backend{env: env, config: c}, warnings, nil
}

// Claim implements backend.Backend. A VTEP MAC is recalled from prev, else
// taken from a device that is there, else random: never derived from anything
// that cloned hosts share.
func (b *Backend) Claim(ctx context.Context, prev subnet.Claim) (subnet.Claim, error) {
	have, err := b.env.Kernel.Read(ctx, b.env.Scope(b.devices()...))
	if err != nil {
		return subnet.Claim{}, fmt.Errorf("read kernel state: %w", err)
	}
	claim := b.env.Claim(Type, prev)
	for i, n := range b.env.Config.Networks {
		mac := randomMAC()
		before, _ := prev.Endpoint(n.Family())
		if recalled, err := vtepMAC(before.Data); err == nil {
			mac = recalled
		} else if dev, ok := have.Links[b.config.deviceName(n.Family())]; ok && dev.Kind == "vxlan" && dev.MAC.IsUnicast() {
			mac = dev.MAC
		}
		if claim.Endpoints[i].Data, err = encodeData(b.config.VNI, mac); err != nil {
			return subnet.Claim{}, err
		}
	}
	return claim, nil
}

// randomMAC returns a locally administered unicast address.
func randomMAC() dataplane.MAC {
	var mac dataplane.MAC
	_, _ = rand.Read(mac[:]) // never fails
	mac[0] = mac[0]&^1 | 2
	return mac
}

func (b *Backend) devices() []string {
	var names []string
	for _, n := range b.env.Config.Networks {
		names = append(names, b.config.deviceName(n.Family()))
	}
	return names
}

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	reconciler, err := b.env.Reconciler(b.devices()...)
	if err != nil {
		return nil, err
	}
	n := &network{Backend: b, own: own, reconciler: reconciler}
	base, err := n.base()
	if err == nil {
		_, err = reconciler.Reconcile(ctx, base, false)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set up vxlan devices: %w", err), reconciler.Close())
	}
	return n, nil
}

// network implements backend.Network.
type network struct {
	*Backend
	own        subnet.Lease
	reconciler *dataplane.Reconciler
}

// MTU implements backend.Network.
func (n *network) MTU() int {
	mtu := n.env.Underlay.MTU
	for _, net := range n.env.Config.Networks {
		mtu = min(mtu, n.config.deviceMTU(n.env.Underlay.MTU, net.Family()))
	}
	return mtu
}

// Check implements backend.Network. One peer may use one MAC for both
// families, because each has a device of its own.
func (n *network) Check(l subnet.Lease) ([]string, error) {
	var macs []string
	for _, e := range l.Endpoints {
		mac, err := vtepMAC(e.Data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", e.Family(), err)
		}
		macs = append(macs, fmt.Sprintf("%s VTEP MAC %s", e.Family(), mac))
	}
	return macs, nil
}

// Sync implements backend.Network.
func (n *network) Sync(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	want, err := n.base()
	if err != nil {
		return backend.Outcome{}, err
	}
	subnets := map[netip.Prefix]string{}
	for _, l := range peers.Leases {
		for _, e := range l.Endpoints {
			direct, err := n.direct(ctx, e)
			if err != nil {
				return backend.Outcome{}, err
			}
			objects, err := n.config.desired(e, direct)
			if err != nil {
				return backend.Outcome{}, fmt.Errorf("lease %s: %w", l.Key, err)
			}
			want.Add(objects...)
			subnets[e.Subnet] = l.Key
		}
	}
	report, err := n.reconciler.Reconcile(ctx, want, peers.Complete)
	return backend.OutcomeOf(report, subnets), err
}

// direct returns the device on whose own network the peer is, or "" if it is
// behind a gateway or direct routing is off.
func (n *network) direct(ctx context.Context, e subnet.Endpoint) (string, error) {
	if !n.config.DirectRouting {
		return "", nil
	}
	return n.env.Kernel.OnLink(ctx, e.PublicIP)
}

// base is what the kernel holds without any peers: a device for each family,
// with the own subnet's base address.
func (n *network) base() (dataplane.State, error) {
	want := dataplane.NewState()
	for _, e := range n.own.Endpoints {
		f := e.Family()
		mac, err := vtepMAC(e.Data)
		if err != nil {
			return want, fmt.Errorf("own lease %s: %w", n.own.Key, err)
		}
		addr, ok := n.env.Underlay.Family(f)
		if !ok {
			return want, fmt.Errorf("own lease %s: %s is not enabled on %s", n.own.Key, f, n.env.Underlay.Name)
		}
		name := n.config.deviceName(f)
		want.Add(dataplane.Link{
			Name: name, Kind: "vxlan", MAC: mac, MTU: n.config.deviceMTU(n.env.Underlay.MTU, f), Up: true,
			VXLAN: dataplane.VXLAN{
				VNI: n.config.VNI, Port: n.config.Port, Local: addr.Local, Underlay: n.env.Underlay.Name,
				Learning: n.config.Learning, GBP: n.config.GBP,
			},
		}, dataplane.Addr{Dev: name, Prefix: prefix.Host(e.Subnet.Addr())})
	}
	return want, nil
}

// desired is what the kernel holds for one endpoint of a peer. direct names
// the device on whose network the peer is; empty means encapsulation.
func (c config) desired(e subnet.Endpoint, direct string) ([]dataplane.Object, error) {
	if direct != "" {
		return []dataplane.Object{dataplane.NewRoute(e.Subnet, e.PublicIP, direct, false)}, nil
	}
	mac, err := vtepMAC(e.Data)
	if err != nil {
		return nil, err
	}
	dev, vtep := c.deviceName(e.Family()), e.Subnet.Addr()
	return []dataplane.Object{
		dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: dev, IP: vtep}, MAC: mac},
		dataplane.FDB{FDBKey: dataplane.FDBKey{Dev: dev, MAC: mac}, Dst: e.PublicIP},
		dataplane.NewRoute(e.Subnet, vtep, dev, true),
	}, nil
}

// Changed implements backend.Network.
func (n *network) Changed() <-chan struct{} { return n.reconciler.Changed() }

// Close implements backend.Network.
func (n *network) Close() error { return n.reconciler.Close() }
