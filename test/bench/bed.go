// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/test/lab"
)

const etcdPrefix = lab.Prefix

// txnOps is how many keys one transaction writes. etcd allows 128 by default.
const txnOps = 100

// bed is the lab for the measures. The daemon runs on host 1. Host 2 has the same settings:
// on it the benchmark measures the kernel's limit, and it is the other end of traffic.
type bed struct {
	lab     *lab.Lab
	client  *clientv3.Client // connects from inside host 1, like the daemon
	backend string
	peers   []peer // the peers whose leases are in etcd
	plain   []int  // process ids of the programs that carry packets instead of daemons
}

func newBed(ctx context.Context, flanneld string) (*bed, error) {
	l, err := lab.New(ctx, lab.Config{Hosts: 2, Flanneld: flanneld})
	if err != nil {
		return nil, err
	}
	b := &bed{lab: l}
	for _, h := range l.Hosts() {
		if err := prepareHost(ctx, h); err != nil {
			b.close()
			return nil, fmt.Errorf("prepare %s: %w", h.Name(), err)
		}
	}

	host := l.Host(1)
	b.client, err = l.Etcd().Client(ctx, func(c *clientv3.Config) {
		c.Endpoints = []string{host.EtcdEndpoint()}
		c.DialOptions = []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return host.Dial(ctx, "tcp", addr)
		})}
	})
	if err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

// prepareHost adds a route that makes the addresses of all peers directly reachable through
// eth0, as host-gw requires.
func prepareHost(ctx context.Context, h *lab.Host) error {
	return withRTNL(ctx, h, func(r *rtnl) error {
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		r.putLinkRoute(netip.MustParsePrefix(peerNetwork), eth0.Index)
		return r.flush()
	})
}

// withRTNL runs f with a new rtnetlink socket, on a locked thread in the host's network
// namespace.
func withRTNL(ctx context.Context, h *lab.Host, f func(r *rtnl) error) error {
	return h.Do(ctx, func() error {
		r, err := openRTNL()
		if err != nil {
			return err
		}
		defer r.close()
		return f(r)
	})
}

func (b *bed) close() {
	if b.client != nil {
		b.client.Close()
	}
	b.lab.Close()
}

// configure replaces flannel's data in etcd by the network configuration and the leases of
// n peers. It does nothing if etcd already has them.
func (b *bed) configure(ctx context.Context, backend string, n int) error {
	if b.backend == backend && len(b.peers) == n {
		return nil
	}
	if _, err := b.client.Delete(ctx, etcdPrefix, clientv3.WithPrefix()); err != nil {
		return fmt.Errorf("empty etcd: %w", err)
	}
	if err := b.putConfig(ctx, map[string]any{"Type": backend}, nil); err != nil {
		return err
	}
	b.backend, b.peers = backend, makePeers(n)
	return b.putLeases(ctx, b.peers)
}

// putConfig writes the network configuration with that backend. If next is not nil, it
// becomes NextBackend, so that the network migrates.
func (b *bed) putConfig(ctx context.Context, backend, next map[string]any) error {
	keys := map[string]any{"Network": podNetwork, "SubnetLen": 24, "SubnetMin": ownSubnets, "Backend": backend}
	if next != nil {
		keys["NextBackend"] = next
	}
	config, err := json.Marshal(keys)
	if err != nil {
		return err
	}
	if _, err := b.client.Put(ctx, etcdPrefix+"/config", string(config)); err != nil {
		return fmt.Errorf("write the network configuration: %w", err)
	}
	return nil
}

func (b *bed) putLeases(ctx context.Context, peers []peer) error {
	return b.putLeasesOf(ctx, peers, b.backend, "")
}

// putLeasesOf writes the leases of peers with data for the backend and, unless next is
// empty, for the next backend.
func (b *bed) putLeasesOf(ctx context.Context, peers []peer, backend, next string) error {
	for len(peers) > 0 {
		some := peers[:min(txnOps, len(peers))]
		peers = peers[len(some):]
		var ops []clientv3.Op
		for _, p := range some {
			value, err := p.migratingValue(backend, next)
			if err != nil {
				return err
			}
			ops = append(ops, clientv3.OpPut(p.key(), value))
		}
		if _, err := b.client.Txn(ctx).Then(ops...).Commit(); err != nil {
			return fmt.Errorf("write leases: %w", err)
		}
	}
	return nil
}

func (b *bed) deleteLeases(ctx context.Context, peers []peer) error {
	for len(peers) > 0 {
		some := peers[:min(txnOps, len(peers))]
		peers = peers[len(some):]
		var ops []clientv3.Op
		for _, p := range some {
			ops = append(ops, clientv3.OpDelete(p.key()))
		}
		if _, err := b.client.Txn(ctx).Then(ops...).Commit(); err != nil {
			return fmt.Errorf("delete leases: %w", err)
		}
	}
	return nil
}

// device returns the name of the device through which the routes to peers lead. The backend
// must be vxlan or host-gw.
func (b *bed) device() string {
	if b.backend == "vxlan" {
		return "flannel.1"
	}
	return "eth0"
}

// clean stops the daemon on h and removes everything that it has left there: state, device,
// routes and nexthop objects. It also deletes the leases of all daemons.
func (b *bed) clean(ctx context.Context, h *lab.Host) error {
	if d := h.Daemon(); d != nil {
		if _, err := d.Stop(ctx); err != nil {
			return err
		}
	}

	for _, dir := range []string{"/var/lib/flannel", "/run/flannel"} {
		if err := os.RemoveAll(h.Path(dir)); err != nil {
			return err
		}
	}
	if err := b.deleteOwnLeases(ctx); err != nil {
		return err
	}
	err := withRTNL(ctx, h, func(r *rtnl) error {
		for _, dev := range []string{"eth0", "flannel.1"} {
			link, err := net.InterfaceByName(dev)
			if err != nil {
				continue
			}
			if err := r.flushDevice(link.Index); err != nil {
				return fmt.Errorf("flush %s: %w", dev, err)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return h.Netlink(ctx, func(nl *netlink.Handle) error {
		link, err := nl.LinkByName("flannel.1")
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return nil
		}
		if err != nil {
			return err
		}
		return nl.LinkDel(link)
	})
}

// deleteOwnLeases deletes the leases of all daemons, by revoking all etcd leases. The
// leases of peers remain, because they have no etcd lease.
func (b *bed) deleteOwnLeases(ctx context.Context) error {
	leases, err := b.client.Leases(ctx)
	if err != nil {
		return fmt.Errorf("list etcd's leases: %w", err)
	}
	for _, l := range leases.Leases {
		if _, err := b.client.Revoke(ctx, l.ID); err != nil {
			return fmt.Errorf("revoke a lease: %w", err)
		}
	}
	return nil
}

// flushDevice deletes the routes to pods through a device, and then the nexthop objects of
// all devices. The opposite order takes much longer.
func (r *rtnl) flushDevice(ifindex int) error {
	pods := netip.MustParsePrefix(podNetwork)
	var routes []netip.Prefix
	err := r.dumpRoutes(ifindex, func(dst netip.Prefix, _ netip.Addr) {
		if pods.Overlaps(dst) && dst.Bits() >= pods.Bits() {
			routes = append(routes, dst)
		}
	})
	if err != nil {
		return fmt.Errorf("dump routes: %w", err)
	}
	var ids []uint32
	if err := r.dumpNexthops(func(id uint32) { ids = append(ids, id) }); err != nil {
		return fmt.Errorf("dump nexthops: %w", err)
	}

	for i := 0; i < len(routes); i += batch {
		for _, dst := range routes[i:min(i+batch, len(routes))] {
			r.delRoute(dst)
		}
		if err := r.flush(); err != nil {
			return fmt.Errorf("delete routes: %w", err)
		}
	}

	for i := 0; i < len(ids); i += batch {
		for _, id := range ids[i:min(i+batch, len(ids))] {
			r.delNexthop(id)
		}
		if err := r.flush(); err != nil {
			return fmt.Errorf("delete nexthops: %w", err)
		}
	}
	return nil
}

// addVXLAN creates on h a device like that of the daemon.
func addVXLAN(ctx context.Context, h *lab.Host) error {
	return h.Netlink(ctx, func(nl *netlink.Handle) error {
		eth0, err := nl.LinkByName("eth0")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "flannel.1"
		attrs.MTU = 1450
		link := &netlink.Vxlan{LinkAttrs: attrs, VxlanId: 1, Port: 8472, VtepDevIndex: eth0.Attrs().Index}
		if err := nl.LinkAdd(link); err != nil {
			return fmt.Errorf("add flannel.1: %w", err)
		}
		return nl.LinkSetUp(link)
	})
}

// limit measures how long the kernel takes to accept the objects of peers on host 2. It
// cleans that host first and writes the objects of base, which are not measured. kinds
// selects the objects of each peer. base and peers together must be the first peers of the
// benchmark, because limit verifies these at the end.
func (b *bed) limit(ctx context.Context, base, peers []peer, kinds objects) (took, cpu time.Duration, err error) {
	h := b.lab.Host(2)
	if err := b.clean(ctx, h); err != nil {
		return 0, 0, err
	}
	if b.backend == "vxlan" {
		if err := addVXLAN(ctx, h); err != nil {
			return 0, 0, err
		}
	}
	if err := b.quiesce(ctx); err != nil {
		return 0, 0, err
	}
	err = h.Do(ctx, func() error {
		link, err := net.InterfaceByName(b.device())
		if err != nil {
			return err
		}
		if _, _, err := writeLimit(link.Index, base, kinds); err != nil {
			return err
		}
		took, cpu, err = writeLimit(link.Index, peers, kinds)
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	return took, cpu, b.verify(ctx, h, len(base)+len(peers))
}

// verify returns an error unless a host has exactly the kernel objects that the first n peers need.
// It ignores objects that are not for peers, such as those for the subnets of daemons.
func (b *bed) verify(ctx context.Context, h *lab.Host, n int) error {
	kinds := objectsOf(b.backend)
	return withRTNL(ctx, h, func(r *rtnl) error {
		link, err := net.InterfaceByName(b.device())
		if err != nil {
			return err
		}
		have := newEntries()
		err = r.dumpRoutes(link.Index, func(dst netip.Prefix, gateway netip.Addr) { have.routes[dst] = gateway })
		if err == nil && kinds.vtep {
			err = errors.Join(
				r.dumpNeighs(unix.AF_INET, link.Index, func(dst netip.Addr, mac [6]byte) { have.neighs[dst] = mac }),
				r.dumpNeighs(unix.AF_BRIDGE, link.Index, func(dst netip.Addr, mac [6]byte) { have.fdb[mac] = dst }),
			)
		}
		if err == nil {
			err = have.check(makePeers(n), kinds)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", h.Name(), err)
		}
		return nil
	})
}

// entries contains the kernel objects on the device through which the routes to peers lead.
type entries struct {
	routes map[netip.Prefix]netip.Addr // gateways
	neighs map[netip.Addr][6]byte
	fdb    map[[6]byte]netip.Addr
}

func newEntries() entries {
	return entries{map[netip.Prefix]netip.Addr{}, map[netip.Addr][6]byte{}, map[[6]byte]netip.Addr{}}
}

// check returns an error unless e has all objects that peers need, and none for another peer. kinds
// selects the objects of each peer.
func (e entries) check(peers []peer, kinds objects) error {
	routes, neighs, fdb := 0, 0, 0 // numbers of objects for any peers
	pods := netip.MustParsePrefix(podNetwork)
	own := netip.MustParseAddr(ownSubnets)
	hosts := netip.MustParsePrefix(peerNetwork)
	ofPeer := func(a netip.Addr) bool { return pods.Contains(a) && a.Less(own) }
	for dst := range e.routes {
		if ofPeer(dst.Addr()) {
			routes++
		}
	}

	for ip := range e.neighs {
		if ofPeer(ip) {
			neighs++
		}
	}

	for _, dst := range e.fdb {
		if hosts.Contains(dst) {
			fdb++
		}
	}

	for _, p := range peers {
		if e.routes[p.subnet] != p.gateway(kinds) || kinds.vtep && (e.neighs[p.subnet.Addr()] != p.mac || e.fdb[p.mac] != p.ip) {
			return fmt.Errorf("peer %s has wrong entries: route via %s, neighbour %x, FDB entry to %s",
				p.subnet, e.routes[p.subnet], e.neighs[p.subnet.Addr()], e.fdb[p.mac])
		}
	}
	if n := len(peers); routes != n || kinds.vtep && (neighs != n || fdb != n) {
		return fmt.Errorf("%d routes, %d neighbours and %d FDB entries for %d peers", routes, neighs, fdb, n)
	}
	return nil
}

// quiesce waits until the last measure no longer has effects: it collects the benchmark's
// own garbage and leaves the kernel time for deferred work.
func (b *bed) quiesce(ctx context.Context) error {
	runtime.GC()
	return wait.For(ctx, 300*time.Millisecond)
}
