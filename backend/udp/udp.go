// SPDX-License-Identifier: Apache-2.0

// Package udp carries packets between hosts in UDP datagrams. Each datagram contains one
// packet and nothing else. The backend is for hosts whose kernel has no vxlan. Either the
// kernel packs the datagrams with fou (the kernel path), or this process does (user space).
//
//   - udp.go is the Backend, and config.go the Backend object of the configuration. start.go
//     chooses between user space and the kernel path.
//   - userspace.go is the network in user space, whose packets pass through package tunnel.
//   - kernel.go is the network of the kernel path. Besides the device and the routes, it has
//     the FOU port in receiver.go and the source check in filter.go, with its rules in
//     filter_rules.go. leftovers.go names these two objects, so that they are removed when
//     another configuration replaces this one.
//   - host.go is the Host, which outlives networks: it contains the TUN device, the tunnel and
//     the peers (peers.go), and removes the objects of the kernel path.
package udp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/tunnel"
	"github.com/flanneld/flanneld/subnet"
)

// Type is the backend's name in the configuration. Leases do not contain it.
const Type = "udp"

// Backend implements backend.Backend.
type Backend struct {
	env    backend.Env
	config config
	host   *Host
}

// New is the backend's factory.
func (h *Host) New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	c, warnings, err := parseConfig(raw, env)
	if err != nil {
		return nil, nil, err
	}
	b := &Backend{env: env, config: c, host: h}
	if c.Mode == modeKernel {
		if err := b.kernelSupported(); err != nil {
			return nil, nil, fmt.Errorf("Backend.Mode is %q: %w", c.Mode, err)
		}
	}
	return b, warnings, nil
}

// device returns the name of the device. If the process serves several networks, each device
// has its port in its name, so that the name does not depend on the order of the networks.
func (b *Backend) device() string {
	if b.env.Network == "" {
		return deviceName
	}
	return fmt.Sprintf("flannel-%d", b.config.Port)
}

// Scope implements backend.Backend.
func (b *Backend) Scope() dataplane.Scope { return b.env.Scope(b.device()) }

// Ports implements backend.Listener.
func (b *Backend) Ports() []int { return []int{b.config.Port} }

// Tunnel implements backend.Tunneler.
func (b *Backend) Tunnel(prefix.Family) firewall.Payload {
	return firewall.Payload{Protocol: firewall.UDP, Port: uint16(b.config.Port)}
}

// HoldsIPIP implements backend.IPIPHolder. Mode auto does not need the device: it can use user space.
func (b *Backend) HoldsIPIP() bool { return b.config.Mode == modeKernel }

// LeaseType implements backend.LeaseTyper.
func (*Backend) LeaseType() string { return "" }

// Claim implements backend.Backend. Leases have neither a type nor data.
func (b *Backend) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	return b.env.Claim("", prev), nil
}

// MTU implements backend.Sized. It also implements backend.Network for the networks of both modes.
func (b *Backend) MTU() int { return mtu(b.env) }

// Check implements backend.Network for both modes. A lease with backend data belongs to another
// backend. A lease without data may also belong to another backend: the leases of alloc look
// the same.
func (*Backend) Check(l subnet.Lease) ([]string, error) {
	for _, e := range l.Endpoints {
		if len(e.Data) > 0 && string(e.Data) != "null" {
			return nil, fmt.Errorf("the lease has backend data %.40q, which hosts with udp do not publish", e.Data)
		}
	}
	return nil, nil
}

// ipv4Only reports whether the network has no IPv6.
func (b *Backend) ipv4Only() bool {
	return !slices.ContainsFunc(b.env.Config.Networks, func(n subnet.Network) bool { return n.Family() != prefix.IPv4 })
}

// kernelSupported returns an error if the kernel path cannot do what the configuration or the
// options of this host require.
func (b *Backend) kernelSupported() error {
	switch {
	case b.env.Network != "":
		return errors.New("the kernel path is for a daemon with one network")
	case !b.ipv4Only():
		return errors.New("the kernel path supports only networks without IPv6")
	case b.host.settings.Check == tunnel.CheckStrict:
		return errors.New("the kernel path cannot check sources inside datagrams, as --udp-source-check=strict requires")
	}
	return nil
}

// local returns the IPv4 address and port at which datagrams from peers arrive.
func (b *Backend) local() netip.AddrPort {
	addr, _ := b.env.Underlay.Family(prefix.IPv4)
	return netip.AddrPortFrom(addr.Local, uint16(b.config.Port))
}

func (b *Backend) receiver() receiver { return receiver{b.local()} }
