// SPDX-License-Identifier: Apache-2.0

// Package wireguard encrypts the packets between hosts with WireGuard: with that of the
// kernel, or with one that runs in this process. The Reconciler manages the device, its
// address and its route, as for other backends. It does not see the peers in the device, so
// this package compares these with the wanted peers itself, in the same passes.
//
// In this package a session is one of WireGuard: the keys that two hosts agree on in a
// handshake and use for at most 3 minutes.
//
//   - wireguard.go is the Backend. config.go is the Backend object of the configuration,
//     and data.go the backend data of leases.
//   - start.go starts the network. It sets up the devices, in the kernel or in this process.
//   - network.go is the Network: in each pass it writes the difference between the peers of
//     a device and the wanted ones. peer.go computes that with a pure function, and control.go
//     reads and configures devices. psk.go decides when a peer gets a new preshared key.
//   - Package discovery decides which endpoints are tried and shared, and when the devices are
//     read. lookups.go looks up the names of peers for it.
//   - key.go stores the private key.
//   - userspace.go runs the device in this process. initiator.go starts its sessions, and reader.go
//     corrects the UDP checksums of packets that it reads from its TUN device.
//   - host.go is the Host, which outlives networks: it contains the devices in this process.
package wireguard

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync/atomic"

	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/wireguard/internal/discovery"
	"github.com/flanneld/flanneld/pkg/base/endpoint"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/subnet"
)

// Type is the backend's name in the configuration and in leases.
const Type = "wireguard"

// Backend implements backend.Backend.
type Backend struct {
	env    backend.Env
	config config
	host   *Host
	// published is what the network shares in the lease of this host; nil before the network starts.
	published atomic.Pointer[discovery.Endpoints]
}

// New is the backend's factory.
func (h *Host) New(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
	c, warnings, err := parseConfig(raw, env)
	if err != nil {
		return nil, nil, err
	}
	return &Backend{env: env, config: c, host: h}, warnings, nil
}

func (b *Backend) tunnels() []tunnel { return b.config.tunnels(b.env.Network, families(b.env)) }

func (b *Backend) scope() dataplane.Scope {
	var names []string
	for _, t := range b.tunnels() {
		names = append(names, t.name)
	}
	return b.env.Scope(names...)
}

// Describe implements backend.Backend. Leftovers are the control sockets of the devices in user space. A daemon
// that is killed leaves them.
func (b *Backend) Describe() backend.Description {
	d := backend.Description{
		Scope: b.scope(), LeaseType: Type, MTU: b.mtu(), Ports: map[string][]int{}, Usable: b.usable,
		SameLocation: b.config.SameLocation, CheckPublicEndpoint: b.checkPublicEndpoint,
	}
	for _, t := range b.tunnels() {
		d.Ports[Type] = append(d.Ports[Type], t.port)
		d.Leftovers = append(d.Leftovers, socketLeftover(socketPath(socketDir, t.name)))
	}
	switch key := newKeyStore(b.env.StateDir, b.env.Network); {
	case key.path == "":
	case key.own:
		d.Kept = []string{key.path}
	default:
		d.Files = []string{key.path}
	}
	return d
}

// Claim implements backend.Backend. It may create the private key, because the key must
// be on disk before the public key is published.
func (b *Backend) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	key, err := b.key(len(prev.Endpoints) > 0)
	if err != nil {
		return subnet.Claim{}, err
	}
	claim := b.env.Claim(Type, prev)
	shared := b.publishes(prev)
	for i, f := range families(b.env) {
		d := leaseData{PublicKey: key.PublicKey().String(), PublicEndpoint: b.env.PublicEndpoint.String()}
		d.PeerEndpoints = shared.Encode(f)
		for _, t := range b.tunnels() {
			if slices.Contains(t.families, f) {
				d.Port = t.port
			}
		}
		claim.Endpoints[i].Data = encodeData(d)
	}
	return claim, nil
}

// publishes returns what this host shares at present. Before the network has started, that is what
// prev says, the last claim of this host.
func (b *Backend) publishes(prev subnet.Claim) discovery.Endpoints {
	if b.config.EndpointSharingInterval == 0 {
		return discovery.Endpoints{}
	}
	if now := b.published.Load(); now != nil {
		return *now
	}

	own := backend.NewSide(b, Type).Before(prev).Lease() // after a migration, prev may have data for two backends
	return discovery.SharedIn(own, b.env.Reachable)
}

func (b *Backend) checkPublicEndpoint(e endpoint.Named) error {
	if e.Port != 0 && len(b.tunnels()) > 1 {
		return fmt.Errorf("it has a port, but the network has a device with a port of its own for each family: expected a name alone, or another Backend.Mode than %q", modeSeparate)
	}
	return nil
}

// key returns the private key of this host, which it also stores. known means that this host has had
// a lease.
func (b *Backend) key(known bool) (wgtypes.Key, error) {
	var have wgtypes.Key
	client, err := wgctrl.New()
	if err != nil {
		return have, fmt.Errorf("open WireGuard's interface: %w", err)
	}
	defer client.Close()

	for _, t := range b.tunnels() {
		if d, err := client.Device(t.name); err == nil && have == (wgtypes.Key{}) {
			have = d.PrivateKey
		}
	}

	store := newKeyStore(b.env.StateDir, b.env.Network)
	// A cloned disk has the key of another host, and peers refuse the second lease with a key.
	store.foreign = store.own && !known
	return store.key(have)
}

func (b *Backend) mtu() int {
	mtu := b.env.Underlay.MTU
	for _, t := range b.tunnels() {
		mtu = min(mtu, b.config.deviceMTU(b.env.Underlay.MTU, t))
	}
	return mtu
}
