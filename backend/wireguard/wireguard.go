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
//   - network.go is the Network: in each pass it writes the difference between the peers of
//     a device and the wanted ones. peer.go computes that with a pure function.
//   - handshakes.go finds out which sessions are in use, and psk.go when a peer gets a new
//     preshared key.
//   - nat.go finds endpoints of peers behind NAT. sharer.go decides which endpoints this host
//     shares in its lease, shared.go encodes and decodes shared endpoints, and trials.go tries
//     the endpoints that other hosts share. names.go resolves the names of peers.
//   - relay.go reads and writes what leases say about relays. A relay is a host that carries
//     packets between two other hosts that do not reach each other. relaying.go decides when to
//     use a relay.
//   - key.go stores the private key.
//   - userspace.go runs the device in this process, and initiator.go starts its sessions.
//   - host.go is the Host, which outlives networks: it contains the devices in this process.
package wireguard

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"syscall"

	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/endpoint"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// Type is the backend's name in the configuration and in leases.
const Type = "wireguard"

// Backend implements backend.Backend.
type Backend struct {
	env    backend.Env
	config config
	host   *Host
	// published is what the network publishes about other hosts; nil before the network starts.
	published atomic.Pointer[published]
}

func (b *Backend) tunnels() []tunnel { return b.config.tunnels(b.env.Network, families(b.env)) }

// SameLocation implements backend.Surrounding.
func (b *Backend) SameLocation() backend.SameLocation { return b.config.SameLocation }

// Scope implements backend.Backend.
func (b *Backend) Scope() dataplane.Scope {
	var names []string
	for _, t := range b.tunnels() {
		names = append(names, t.name)
	}
	return b.env.Scope(names...)
}

// Files implements backend.FileOwner.
func (b *Backend) Files() []string {
	if path := os.Getenv(keyFileVariable); path != "" {
		return []string{path}
	}
	return nil
}

// Ports implements backend.Listener.
func (b *Backend) Ports() []int {
	var ports []int
	for _, t := range b.tunnels() {
		ports = append(ports, t.port)
	}
	return ports
}

// Claim implements backend.Backend. It may create the private key, because the key must
// be on disk before the public key is published.
func (b *Backend) Claim(_ context.Context, prev subnet.Claim) (subnet.Claim, error) {
	key, err := b.key()
	if err != nil {
		return subnet.Claim{}, err
	}
	claim, more := b.env.Claim(Type, prev), b.publishes(prev)
	for i, f := range families(b.env) {
		d := leaseData{PublicKey: key.PublicKey().String(), PublicEndpoint: b.env.PublicEndpoint.String(), Relay: mark(b.env.Relay)}
		if d.PeerEndpoints, err = more.shared.encode(f); err != nil {
			return subnet.Claim{}, err
		}
		if d.Unreachable, err = encodeKeys(more.relays[f].unreachable); err != nil {
			return subnet.Claim{}, err
		}
		if d.Relays, err = encodeKeys(more.relays[f].relays); err != nil {
			return subnet.Claim{}, err
		}
		for _, t := range b.tunnels() {
			if !slices.Contains(t.families, f) {
				continue
			}
			d.Port = t.port
			if claim.Endpoints[i].Data, err = encodeData(d); err != nil {
				return subnet.Claim{}, err
			}
		}
	}
	return claim, nil
}

// CheckPublicEndpoint implements backend.EndpointNamer.
func (b *Backend) CheckPublicEndpoint(e endpoint.Named) error {
	if e.Port != 0 && len(b.tunnels()) > 1 {
		return fmt.Errorf("it has a port, but the network has a device with a port of its own for each family: expected a name alone, or another Backend.Mode than %q", modeSeparate)
	}
	return nil
}

// key returns the private key of this host: the stored one, or else the key of an existing
// device, or else a new one. It stores the key if there is a file for it.
func (b *Backend) key() (wgtypes.Key, error) {
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
	return newKeyStore(b.env.StateDir, b.env.Network).key(have)
}

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	key, err := b.key()
	if err != nil {
		return nil, err
	}
	reconciler, err := b.env.Reconciler(ctx, b.Scope())
	if err != nil {
		return nil, err
	}
	n := &network{
		Backend: b, key: key, now: currentInstant, Notifier: backend.NewNotifier(ctx),
		Programmer: &backend.Programmer{Reconciler: reconciler},
	}
	n.Forward(reconciler.Changed())
	n.names = newResolver(resolve, n.Notify)
	n.Go(n.names.run)
	if b.config.PSKFile != "" {
		n.Go(n.watchPSKFile)
	}
	for _, t := range b.tunnels() {
		n.devices = append(n.devices, newDevice(t))
	}
	n.nat = n.newNAT(own)
	if err := n.start(ctx, own); err != nil {
		return nil, oneline.Join(fmt.Errorf("set up WireGuard devices: %w", err), n.Close())
	}
	return n, nil
}

// start sets up the devices, and gives them their keys and ports. The devices run in this
// process if Implementation is userspace, or if it is auto and the kernel has no WireGuard.
// Otherwise they are devices of the kernel.
func (n *network) start(ctx context.Context, own subnet.Lease) error {
	links, err := n.env.Links(ctx, n.Scope().Devices...)
	if err != nil {
		return err
	}
	kind := dataplane.KindWireGuard
	n.implementation = implKernel
	err = n.kernelSupported(ctx, links)
	switch {
	case n.config.Implementation == implUserspace, n.config.Implementation == implAuto && errors.Is(err, syscall.EOPNOTSUPP):
		kind, n.implementation = dataplane.KindTUN, implUserspace
		if err := n.removeKernelDevices(ctx, links); err != nil {
			return err
		}
		for _, d := range n.devices {
			if d.userspace, err = n.host.take(d.tunnel, n.config.deviceMTU(n.env.Underlay.MTU, d.tunnel), n.env.Underlay); err != nil {
				return err
			}
		}
		if err := n.ensureUserspace(ctx); err != nil {
			return err
		}
	case err != nil:
		return err
	default:
		if err := n.host.closeNamed(n.Scope().Devices); err != nil {
			return err
		}
	}
	n.Base = n.base(own, kind)
	if err := n.SetUp(ctx); err != nil {
		return err
	}
	if n.env.Relay {
		klog.FromContext(ctx).Info("this host is a relay: it carries the packets of hosts that do not reach each other, and sees their plaintext")
	}
	klog.FromContext(ctx).Info("WireGuard is in use", "implementation", n.implementation, "publicKey", n.key.PublicKey().String())
	client, err := wgctrl.New()
	if err != nil {
		return fmt.Errorf("open WireGuard's interface: %w", err)
	}
	n.control = hostControl{client}
	_, err = n.syncPeers(ctx, backend.Set{All: true})
	return err
}

// Usable implements backend.Checker.
func (b *Backend) Usable(ctx context.Context) error {
	if b.config.Implementation == implUserspace {
		return nil
	}
	links, err := b.env.Links(ctx, b.Scope().Devices...)
	if err != nil {
		return err
	}
	err = b.kernelSupported(ctx, links)
	if b.config.Implementation == implAuto && errors.Is(err, syscall.EOPNOTSUPP) {
		return nil
	}
	return err
}

// probeDevice is the name of the device that kernelSupported creates and deletes again.
const probeDevice = "flannel-wg-try"

// kernelSupported returns an error if the kernel cannot create a WireGuard device. The error
// wraps EOPNOTSUPP if the kernel has no WireGuard. links contains the existing devices. If one
// of them is a WireGuard device, kernelSupported returns nil without a try.
func (b *Backend) kernelSupported(ctx context.Context, links map[string]dataplane.Link) error {
	for _, l := range links {
		if l.Kind == dataplane.KindWireGuard {
			return nil
		}
	}
	// The kernel loads its WireGuard module only when a device is created.
	link := dataplane.Link{Name: probeDevice, Kind: dataplane.KindWireGuard, MTU: prefix.IPv6.MinMTU()}
	for _, failed := range b.env.Kernel.Apply(ctx, []dataplane.Op{{Object: link}, {Object: link, Delete: true}}) {
		return failed.Err
	}
	return nil
}

// removeKernelDevices removes the kernel's WireGuard devices that an earlier start with another
// Implementation has left, so that TUN devices can have their names. It removes nothing and
// returns an error if another device has such a name, or if TUN devices cannot be created.
func (n *network) removeKernelDevices(ctx context.Context, links map[string]dataplane.Link) error {
	var ops []dataplane.Op
	for _, l := range links {
		switch l.Kind {
		case dataplane.KindTUN:
		case dataplane.KindWireGuard:
			ops = append(ops, dataplane.Op{Object: l, Delete: true})
		default:
			return backend.DeviceConflict(l, dataplane.KindTUN)
		}
	}
	if len(ops) == 0 {
		return nil
	}
	// The devices carry traffic. Keep them if TUN devices cannot be created.
	tun, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("check whether TUN devices can be created: %w", err)
	}
	if err := tun.Close(); err != nil {
		return err
	}
	for _, failed := range n.env.Kernel.Apply(ctx, ops) {
		return failed
	}
	return nil
}

// base returns the wanted state without peers: that of Env.Base, the devices with the base
// addresses of the own subnets, and one route for each network. Without that route, packets to
// unused or unknown subnets could leave unencrypted by another route.
func (b *Backend) base(own subnet.Lease, kind string) dataplane.State {
	want := b.env.Base(own)
	for _, t := range b.tunnels() {
		want.Add(dataplane.Link{Name: t.name, Kind: kind, MTU: b.config.deviceMTU(b.env.Underlay.MTU, t), Up: true})
		for _, n := range b.env.Config.Networks {
			e, ok := own.Endpoint(n.Family())
			if !ok || !slices.Contains(t.families, n.Family()) {
				continue
			}
			want.Add(dataplane.Addr{Dev: t.name, Prefix: prefix.Host(e.Subnet.Addr())},
				dataplane.NewRoute(n.Prefix, netip.Addr{}, t.name, false))
		}
	}
	return want
}

// MTU implements backend.Sized. It also implements backend.Network for network, which embeds
// Backend.
func (b *Backend) MTU() int {
	mtu := b.env.Underlay.MTU
	for _, t := range b.tunnels() {
		mtu = min(mtu, b.config.deviceMTU(b.env.Underlay.MTU, t))
	}
	return mtu
}

// Check implements backend.Network. The identities are the public keys. Unless each family has
// its own device, a lease with two keys is unusable, and so is one without an address that the
// device can send to.
func (n *network) Check(l subnet.Lease) ([]string, error) {
	var ids []string
	for _, e := range l.Endpoints {
		key, _, err := decodeData(e.Data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", e.Family(), err)
		}
		if id := "public key " + key.String(); !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	if n.config.Mode == modeSeparate {
		return ids, nil
	}
	if len(ids) > 1 {
		return nil, fmt.Errorf("it has two public keys, want one: Backend.Mode is %q", n.config.Mode)
	}
	for _, t := range n.tunnels() {
		if _, ok := n.peer(t, l); !ok {
			return nil, fmt.Errorf("it has no address that Backend.Mode %q can send to", n.config.Mode)
		}
	}
	return ids, nil
}
