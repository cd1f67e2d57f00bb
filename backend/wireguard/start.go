// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/wireguard/internal/discovery"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/underlay"
	"github.com/flanneld/flanneld/subnet"
)

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	key, err := b.key(true)
	if err != nil {
		return nil, err
	}
	p, err := b.env.Programmer(ctx, b.scope())
	if err != nil {
		return nil, err
	}
	n := &network{Backend: b, Programmer: p, key: key, now: currentInstant}
	n.lookups = newLookups(n.Notifier, lookup)
	if b.config.PSKFile != "" {
		n.Go(func(ctx context.Context) { watchPSKFile(ctx, b.config.PSKFile, n.Notify) })
	}

	n.startDiscovery(own)
	if err := n.start(ctx, own); err != nil {
		return nil, oneline.Join(fmt.Errorf("set up WireGuard devices: %w", err), n.Close())
	}
	return n, nil
}

// start sets up the devices, in the kernel or in this process, and gives them their keys and ports.
func (n *network) start(ctx context.Context, own subnet.Lease) error {
	links, err := n.env.Links(ctx, n.scope().Devices...)
	if err != nil {
		return err
	}

	inProcess, err := n.inProcess(ctx, links)
	if err != nil {
		return err
	}

	kind := dataplane.KindWireGuard
	n.implementation = implKernel
	if inProcess {
		kind = dataplane.KindTUN
		n.implementation = implUserspace
		err = n.takeDevices(ctx, links)
	} else {
		err = n.host.closeNamed(n.scope().Devices)
	}
	if err != nil {
		return err
	}

	n.Base = n.base(own, kind)
	if err := n.SetUp(ctx); err != nil {
		return err
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

// takeDevices takes the devices of this process from the Host, and runs them. links are those devices of the
// backend that exist.
func (n *network) takeDevices(ctx context.Context, links map[string]dataplane.Link) error {
	err := n.removeKernelDevices(ctx, links)
	for _, d := range n.devices {
		if err == nil {
			d.userspace, err = n.host.take(d.tunnel, n.config.deviceMTU(n.env.Underlay.MTU, d.tunnel), n.env.Underlay)
		}
	}
	if err != nil {
		return err
	}
	return n.ensureUserspace(ctx)
}

// startDiscovery also creates the devices. own is the last lease of this host.
func (n *network) startDiscovery(own subnet.Lease) {
	c := discovery.Config{
		Interval: time.Duration(n.config.EndpointSharingInterval) * time.Second, Reachable: n.env.Reachable, Broadcasts: underlay.Broadcasts, Random: rand.N[time.Duration],
		Public: func(f prefix.Family) netip.Addr {
			a, _ := n.env.Underlay.Family(f)
			return a.Public
		},
	}

	for _, t := range n.tunnels() {
		n.devices = append(n.devices, &device{tunnel: t, peers: map[string]discovery.Peer{}})
		c.Devices = append(c.Devices, t.outer)
	}

	shared := n.publishes(own.Claim())
	n.published.Store(&shared)
	n.discovery = discovery.New(c, shared, n.now().Steady)
}

func currentInstant() discovery.Instant {
	var boot unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) // fails only for unknown clocks
	return discovery.Instant{Wall: time.Now().Round(0), Steady: time.Duration(boot.Nano())}
}

// usable implements backend.Description.Usable.
func (b *Backend) usable(ctx context.Context) error {
	links, err := b.env.Links(ctx, b.scope().Devices...)
	if err != nil {
		return err
	}
	inProcess, err := b.inProcess(ctx, links)
	if inProcess && slices.ContainsFunc(b.tunnels(), func(t tunnel) bool { return !b.host.has(t, b.env.Underlay) }) {
		return checkAccess(tunDevice)
	}
	return err
}

// inProcess reports whether the devices run in this process. It returns an error if they must run in the
// kernel and cannot. links are those devices of the backend that exist.
func (b *Backend) inProcess(ctx context.Context, links map[string]dataplane.Link) (bool, error) {
	if b.config.Implementation == implUserspace {
		return true, nil
	}
	err := b.kernelSupported(ctx, links)
	if b.config.Implementation == implAuto && errors.Is(err, syscall.EOPNOTSUPP) {
		return true, nil
	}
	return false, err
}

// kernelSupported returns an error that wraps EOPNOTSUPP if the kernel has no WireGuard. It creates and deletes a
// device, unless one of links, those devices of the backend that exist, is of WireGuard.
func (b *Backend) kernelSupported(ctx context.Context, links map[string]dataplane.Link) error {
	for _, l := range links {
		if l.Kind == dataplane.KindWireGuard {
			return nil
		}
	}

	// Networks of one host have different ports, and may try at the same moment.
	name := fmt.Sprintf("flannel-t%d", b.config.ListenPort)
	return b.env.TryDevice(ctx, dataplane.Link{Name: name, Kind: dataplane.KindWireGuard, MTU: prefix.IPv6.MinMTU()})
}

// removeKernelDevices removes the kernel's WireGuard devices of a start with another Implementation,
// whose names the TUN devices need. links are those devices of the backend that exist.
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
	if err := checkAccess(tunDevice); err != nil {
		return err
	}

	for _, failed := range n.env.Kernel.Apply(ctx, ops) {
		return failed
	}
	return nil
}

func (b *Backend) base(own subnet.Lease, kind string) dataplane.State {
	want := b.env.TunnelBase(own)
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
