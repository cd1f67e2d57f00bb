// SPDX-License-Identifier: Apache-2.0

// Package udp carries packets between hosts in UDP datagrams. Each datagram contains one
// packet and nothing else. This process carries the packets, between a TUN device and a socket
// (package tunnel), so the backend is for hosts whose kernel has no vxlan.
//
//   - udp.go is the Backend, and config.go the Backend object of the configuration.
//   - network.go is the network, which gives the tunnel its peers.
//   - host.go is the Host, which outlives networks: it contains the device and the tunnel.
package udp

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
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
	return &Backend{env: env, config: c, host: h}, warnings, nil
}

func (b *Backend) device() string {
	if b.env.Network == "" {
		return deviceName
	}
	// With several networks the name must not depend on their order.
	return fmt.Sprintf("flannel-%d", b.config.Port)
}

func (b *Backend) scope() dataplane.Scope { return b.env.Scope(b.device()) }

// Describe implements backend.Backend. Leases have no type.
func (b *Backend) Describe() backend.Description {
	packets := []firewall.Payload{{Protocol: firewall.UDP, Port: uint16(b.config.Port)}}
	return backend.Description{
		Scope: b.scope(), MTU: mtu(b.env), Ports: map[string][]int{Type: {b.config.Port}},
		Tunnels: map[prefix.Family][]firewall.Payload{prefix.IPv4: packets, prefix.IPv6: packets},
		Usable:  func(context.Context) error { return b.host.usable(b.device()) },
	}
}

// Claim implements backend.Backend. Leases have neither a type nor data.
func (b *Backend) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	return b.env.Claim("", prev), nil
}

// Check implements backend.Network. A lease with backend data belongs to another
// backend. A lease without data may also belong to another backend: the leases of alloc look
// the same.
func (*network) Check(l subnet.Lease) ([]string, error) {
	for _, e := range l.Endpoints {
		if len(e.Data) > 0 && string(e.Data) != "null" {
			return nil, fmt.Errorf("the lease has backend data %.40q, which hosts with udp do not publish", e.Data)
		}
	}
	return nil, nil
}
