// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"context"
	"fmt"
	"maps"
	"net/netip"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/tunnel"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/subnet"
)

// Start implements backend.Backend. If an earlier network has left a tunnel running that fits,
// packets continue to flow. Otherwise they wait in the device until the first Sync has set the peers.
func (b *Backend) Start(ctx context.Context, own subnet.Lease) (backend.Network, error) {
	p, err := b.env.Programmer(ctx, b.scope())
	if err != nil {
		return nil, err
	}
	p.Base = b.base(own)
	n := &network{Backend: b, own: own, Programmer: p}
	if err := n.openTunnel(ctx); err != nil {
		return nil, oneline.Join(err, n.Close())
	}
	if err := n.SetUp(ctx); err != nil {
		return nil, oneline.Join(fmt.Errorf("set up %s: %w", n.device(), err), n.Close())
	}
	return n, nil
}

func (b *Backend) base(own subnet.Lease) dataplane.State {
	want := b.env.TunnelBase(own)
	want.Add(dataplane.Link{Name: b.device(), Kind: dataplane.KindTUN, MTU: mtu(b.env), Up: true})
	for _, e := range own.Endpoints {
		want.Add(dataplane.Addr{Dev: b.device(), Prefix: prefix.Host(e.Subnet.Addr())})
	}
	for _, n := range b.env.Config.Networks {
		want.Add(dataplane.NewRoute(n.Prefix, netip.Addr{}, b.device(), false))
	}
	return want
}

// network implements backend.Network.
type network struct {
	*Backend
	*backend.Programmer
	own     subnet.Lease
	leases  map[string]*subnet.Lease // those of the last Sync, for objects
	tunnel  *tunnel.Tunnel           // belongs to the Host
	started bool                     // this network has started the tunnel, and is notified of its end
}

// openTunnel opens a tunnel that carries no packets yet, unless an earlier network has left it running.
func (n *network) openTunnel(ctx context.Context) (err error) {
	var c tunnel.Config
	for _, net := range n.env.Config.Networks {
		c.Networks = append(c.Networks, net.Prefix)
		if addr, ok := n.env.Underlay.Family(net.Family()); ok {
			c.Local = append(c.Local, netip.AddrPortFrom(addr.Local, uint16(n.config.Port)))
		}
	}
	for _, e := range n.own.Endpoints {
		c.Own = append(c.Own, e.Subnet.Addr())
	}

	n.started = false
	n.tunnel, err = n.host.openTunnel(ctx, n.device(), c)
	return err
}

// startTunnel also notifies the loop when the tunnel ends.
func (n *network) startTunnel() error {
	if err := n.tunnel.Start(); err != nil {
		return err
	}
	n.started = true
	done := n.tunnel.Done()
	n.Go(func(ctx context.Context) {
		select {
		case <-done:
			n.Notify()
		case <-ctx.Done():
		}
	})
	return nil
}

// Sync implements backend.Network.
func (n *network) Sync(ctx context.Context, peers backend.Set) (backend.Outcome, error) {
	if n.tunnel == nil || n.tunnel.Err() != nil || !n.tunnel.Device.Alive() {
		if err := n.openTunnel(ctx); err != nil {
			return backend.Outcome{}, err
		}
	}

	n.leases = maps.Clone(peers.Leases)
	n.tunnel.Table.Set(entries(peers, n.tunnel.Table.Peers()))

	outcome, err := n.Programmer.Sync(ctx, peers)
	if !n.started { // even after an error, which may concern one family only
		err = oneline.Join(err, n.startTunnel())
	}
	return outcome, err
}

// entries returns the public addresses of the peers by subnet. As long as set is not complete, those of
// have stay.
func entries(set backend.Set, have map[netip.Prefix]netip.Addr) map[netip.Prefix]netip.Addr {
	want := make(map[netip.Prefix]netip.Addr, len(set.Leases))
	if !set.Complete {
		maps.Copy(want, have)
	}
	for _, l := range set.Leases {
		for _, e := range l.Endpoints {
			want[e.Subnet] = e.PublicIP
		}
	}
	return want
}

// objects implements backend.NetworkReport.Objects.
func (n *network) objects(key string) []status.Object {
	l := n.leases[key]
	if l == nil {
		return nil
	}

	var all []status.Object
	for _, e := range l.Endpoints {
		all = append(all, status.Object{
			Text:    fmt.Sprintf("%s in datagrams to %s port %d", e.Subnet, e.PublicIP, n.config.Port),
			Present: n.tunnel != nil && n.tunnel.Table.Peers()[e.Subnet] == e.PublicIP,
		})
	}
	return all
}

// Report implements backend.Network.
func (n *network) Report() backend.NetworkReport {
	r := n.Programmer.Report()
	r.Objects = n.objects
	r.Mode = modeUserspace
	r.Dropped = n.host.counters.Dropped()
	return r
}

// Close implements backend.Network. Device and tunnel belong to the Host, and continue for the next
// network.
func (n *network) Close() error {
	n.Notifier.Close()
	n.host.leaveTunnel()
	return n.Programmer.Close()
}
