// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/firewall/nftables"
	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/tunnel"
	"github.com/flanneld/flanneld/subnet"
)

// portCheckInterval is the interval at which the FOU port is checked, because the kernel
// does not announce that a port was deleted.
const portCheckInterval = 2 * time.Second

// kernelBase returns the wanted state without any peers: that of Env.Base, and the device with the
// base address of the own subnet. The device does not leave checksums to the hardware. Between
// virtual machines of one host there is no hardware, and the packets would arrive without
// checksums. A peer that unpacks them in user space could not find out that these are missing.
func (b *Backend) kernelBase(own subnet.Lease) dataplane.State {
	want := b.env.Base(own)
	want.Add(b.kernelDevice(deviceName))
	for _, e := range own.Endpoints {
		want.Add(dataplane.Addr{Dev: deviceName, Prefix: prefix.Host(e.Subnet.Addr())})
	}
	return want
}

// kernelDevice returns the ipip device with that name, which packs packets into datagrams.
func (b *Backend) kernelDevice(name string) dataplane.Link {
	local := b.local()
	return dataplane.Link{
		Name: name, Kind: dataplane.KindIPIP, MTU: mtu(b.env), Up: true, TxChecksum: dataplane.OffloadOff,
		Tunnel: dataplane.Tunnel{Local: local.Addr(), FOU: dataplane.FOU{Source: local.Port(), Destination: local.Port()}},
	}
}

// probeDevice is the name of the device that tryDevice creates and deletes again.
const probeDevice = "flannel-udp-try"

// tryDevice returns an error if the kernel cannot create the device, for example because it has no
// ipip.
func (b *Backend) tryDevice(ctx context.Context) error {
	l := b.kernelDevice(probeDevice)
	l.Up = false // otherwise it would receive packets
	return b.env.TryDevice(ctx, l)
}

// Usable implements backend.Checker. Only mode kernel can fail, because mode auto can use user
// space.
func (b *Backend) Usable(ctx context.Context) error {
	if b.config.Mode != modeKernel {
		return nil
	}
	if err := fouMissing(); err != nil {
		return err
	}
	links, err := b.env.Links(ctx, deviceName)
	if err != nil || links[deviceName].Kind == dataplane.KindIPIP {
		return err
	}
	return b.tryDevice(ctx)
}

// routes returns the routes to one peer, which are all its objects.
func routes(_ context.Context, l subnet.Lease) ([]dataplane.Object, error) {
	var objects []dataplane.Object
	for _, e := range l.Endpoints {
		objects = append(objects, dataplane.NewRoute(e.Subnet, e.PublicIP, deviceName, true))
	}
	return objects, nil
}

// kernelNetwork is a network whose packets the kernel carries.
type kernelNetwork struct {
	*Backend
	*backend.Programmer
	*backend.Notifier
	receiver receiver
	peers    map[netip.Prefix]netip.Addr // public addresses by subnet

	filter        *senderFilter // nil if the kernel has no nftables; then senders are not checked
	inherited     bool          // the kernel has the filter of an earlier network, which admits its peers
	filterChanged atomic.Bool   // another program may have changed the filter
	routesStale   bool          // routes are out of date, because updating the filter has failed
}

// startKernel starts a network whose packets the kernel carries. After its checks it closes the
// tunnel of user space, because the kernel needs its port. At the end it closes the TUN device. If
// it fails while it creates the objects of the kernel path, it removes all of them.
func (b *Backend) startKernel(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	if err := fouMissing(); err != nil {
		return nil, err
	}
	if err := b.checkDeviceName(ctx); err != nil {
		return nil, err
	}
	if err := b.host.freePort(func() error { return b.tryDevice(ctx) }); err != nil {
		return nil, err
	}
	scope := b.Scope()
	scope.TxChecksum = true
	reconciler, err := b.env.Reconciler(ctx, scope)
	if err != nil {
		return nil, err
	}
	n := &kernelNetwork{
		Backend: b, Notifier: backend.NewNotifier(ctx), receiver: b.receiver(),
		Programmer: &backend.Programmer{Base: b.kernelBase(own), Desired: routes, Reconciler: reconciler},
	}
	n.Forward(reconciler.Changed())
	err = n.start(ctx)
	if err == nil { // not earlier, because user space may need the device that systemd has kept
		err = b.host.useKernelPath(b.receiver())
	}
	if err != nil {
		return nil, oneline.Join(err, n.Close(), b.host.removeKernelPath(b.receiver()))
	}
	return n, nil
}

// checkDeviceName returns an error if another program owns the device with this backend's name: a
// device of another kind, or a TUN device that the program has open. If no other program has the
// TUN device open, the Host opens it.
func (b *Backend) checkDeviceName(ctx context.Context) error {
	links, err := b.env.Links(ctx, deviceName)
	if err != nil {
		return err
	}
	l, ok := links[deviceName]
	switch {
	case !ok || l.Kind == dataplane.KindIPIP && l.Tunnel.FOU != dataplane.FOU{}:
		return nil
	case l.Kind == dataplane.KindTUN:
		return b.host.claimDevice(ctx, deviceName)
	}
	return backend.DeviceConflict(l, dataplane.KindTUN+", or "+dataplane.KindIPIP+" with FOU")
}

// start prepares port, filter and device. The filter precedes the device, so that no packet arrives
// unchecked. It admits no peer yet, or still those of an earlier network.
func (n *kernelNetwork) start(ctx context.Context) error {
	if _, err := n.receiver.ensure(); err != nil {
		return err
	}
	if err := n.startFilter(ctx); err != nil {
		return err
	}
	if err := n.SetUp(ctx); err != nil {
		return fmt.Errorf("set up %s: %w", deviceName, err)
	}
	n.Go(n.watchPort)
	if n.filter != nil {
		n.Go(func(ctx context.Context) {
			nftables.Watch(ctx, filterPlaces(), func() { n.filterChanged.Store(true); n.Notify() })
		})
	}
	return nil
}

// startFilter creates the filter, or keeps that of an earlier network (see senderFilter.start). If
// the kernel has no nftables, it only logs that senders are not checked.
func (n *kernelNetwork) startFilter(ctx context.Context) error {
	if err := nftables.Available(); err != nil {
		n.host.warnUnchecked(ctx, err)
		return nil
	}
	n.filter = newSenderFilter(n.receiver.local, n.host.settings.Check == tunnel.CheckOff)
	var err error
	n.inherited, err = n.filter.start()
	return err
}

// watchPort checks the port every portCheckInterval until ctx ends, and notifies the loop when the
// port is missing.
func (n *kernelNetwork) watchPort(ctx context.Context) {
	ticker := time.NewTicker(portCheckInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if ok, err := n.receiver.present(); err == nil && !ok {
			n.Notify()
		}
	}
}

// Sync implements backend.Network. A set names each change only once, so a failed step does not
// prevent the later steps. The exception is the filter: if it fails, Sync ends, so that it does not
// create the device without the filter. The next Sync then writes all routes.
func (n *kernelNetwork) Sync(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	n.peers = entries(peers, n.peers)
	missing, portErr := n.receiver.ensure()
	repaired, filterErr := n.admit(peers)
	if filterErr != nil {
		n.routesStale = true
		return backend.Outcome{}, oneline.Join(portErr, filterErr)
	}
	peers.All = peers.All || n.routesStale
	n.routesStale = false
	outcome, err := n.Programmer.Sync(ctx, peers)
	if missing && portErr == nil {
		outcome.Repaired++
	}
	if repaired {
		outcome.Repaired++
	}
	return outcome, oneline.Join(portErr, err)
}

// admit updates the filter. If another program may have changed the filter, or peers.All is set, it
// also repairs the filter. repaired reports whether there was something to repair. An inherited
// filter stays unchanged until the set of peers is complete.
func (n *kernelNetwork) admit(peers backend.Set) (repaired bool, err error) {
	if n.filter == nil || n.inherited && !peers.Complete {
		return false, nil
	}
	n.inherited = false
	if err := n.filter.admit(slices.Collect(maps.Values(n.peers))); err != nil {
		return false, err
	}
	if !n.filterChanged.Swap(false) && !peers.All {
		return false, nil
	}
	repaired, err = n.filter.repair()
	if err != nil {
		n.filterChanged.Store(true)
	}
	return repaired, err
}

// Mode implements backend.DataPath.
func (*kernelNetwork) Mode() string { return modeKernel }

// Dropped implements backend.DataPath.
func (n *kernelNetwork) Dropped() map[string]uint64 {
	if n.filter == nil {
		return nil
	}
	return n.filter.dropped()
}

// Close implements backend.Network. The objects in the kernel stay in use.
func (n *kernelNetwork) Close() error {
	n.Notifier.Close()
	return n.Programmer.Close()
}
