// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
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
	peers   []peer      // the peers whose leases are in etcd
	plain   []*exec.Cmd // programs that carry packets instead of daemons, one on each host
}

func newBed(ctx context.Context, flanneld string) *bed {
	b := &bed{lab: must.Get(lab.New(ctx, lab.Config{Hosts: 2, Flanneld: flanneld}))}
	for _, h := range b.lab.Hosts() {
		prepareHost(ctx, h)
	}

	host := b.lab.Host(1)
	b.client = must.Get(b.lab.Etcd().Client(ctx, func(c *clientv3.Config) {
		c.Endpoints = []string{host.EtcdEndpoint()}
		c.DialOptions = []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return host.Dial(ctx, "tcp", addr)
		})}
	}))
	return b
}

// prepareHost adds a route that makes the addresses of all peers directly reachable through
// eth0, as host-gw requires.
func prepareHost(ctx context.Context, h *lab.Host) {
	withRTNL(ctx, h, func(r *rtnl) {
		r.putLinkRoute(netip.MustParsePrefix(peerNetwork), link("eth0").Index)
		r.flush()
	})
}

// inside runs f in the namespace, on a locked thread.
func inside(ctx context.Context, n *lab.Namespace, f func()) {
	must.Do(n.Do(ctx, func() error { return must.Catch(f) }))
}

func withRTNL(ctx context.Context, h *lab.Host, f func(r *rtnl)) {
	inside(ctx, h.Namespace, func() {
		r := openRTNL()
		defer r.close()
		f(r)
	})
}

func withNetlink(ctx context.Context, h *lab.Host, f func(nl *netlink.Handle)) {
	must.Do(h.Netlink(ctx, func(nl *netlink.Handle) error { return must.Catch(func() { f(nl) }) }))
}

// link returns a device of the calling thread's namespace.
func link(name string) *net.Interface { return must.Get(net.InterfaceByName(name)) }

func (b *bed) close() {
	for _, cmd := range b.plain {
		end(cmd)
	}
	b.client.Close()
	b.lab.Close()
}

// configure replaces flannel's data in etcd by the network configuration and the leases of
// n peers. It does nothing if etcd already has them.
func (b *bed) configure(ctx context.Context, backend string, n int) {
	if b.backend == backend && len(b.peers) == n {
		return
	}
	must.Get(b.client.Delete(ctx, etcdPrefix, clientv3.WithPrefix()))
	b.putConfig(ctx, map[string]any{"Type": backend}, nil)
	b.backend, b.peers = backend, makePeers(n)
	b.putLeases(ctx, b.peers, b.backend, "")
}

// putConfig writes the network configuration with that backend. If next is not nil, it
// becomes NextBackend, so that the network migrates.
func (b *bed) putConfig(ctx context.Context, backend, next map[string]any) {
	keys := map[string]any{"Network": podNetwork, "SubnetLen": 24, "SubnetMin": ownSubnets, "Backend": backend}
	if next != nil {
		keys["NextBackend"] = next
	}
	b.put(ctx, etcdPrefix+"/config", marshal(keys))
}

// putLeases writes the leases of peers with data for the backend and, unless next is
// empty, for the next backend.
func (b *bed) putLeases(ctx context.Context, peers []peer, backend, next string) {
	var ops []clientv3.Op
	for _, p := range peers {
		ops = append(ops, clientv3.OpPut(p.key(), p.value(backend, next)))
	}
	write(ctx, b.client, ops)
}

func (b *bed) deleteLeases(ctx context.Context, peers []peer) {
	var ops []clientv3.Op
	for _, p := range peers {
		ops = append(ops, clientv3.OpDelete(p.key()))
	}
	write(ctx, b.client, ops)
}

func write(ctx context.Context, c *clientv3.Client, ops []clientv3.Op) {
	for some := range slices.Chunk(ops, txnOps) {
		must.Get(c.Txn(ctx).Then(some...).Commit())
	}
}

func marshal(v any) string { return string(must.Get(json.Marshal(v))) }

func (b *bed) device() string {
	if b.backend == "vxlan" {
		return "flannel.1"
	}
	return "eth0"
}

// clean stops the daemon on h and removes everything that it has left there: state, device,
// routes and nexthop objects. It also deletes the leases of all daemons.
func (b *bed) clean(ctx context.Context, h *lab.Host) {
	if d := h.Daemon(); d != nil {
		must.Get(d.Stop(ctx))
	}

	for _, dir := range []string{"/var/lib/flannel", "/run/flannel"} {
		must.Do(os.RemoveAll(h.Path(dir)))
	}

	// Each daemon has an etcd lease. The leases of peers have none, so they stay.
	for _, l := range must.Get(b.client.Leases(ctx)).Leases {
		must.Get(b.client.Revoke(ctx, l.ID))
	}
	withRTNL(ctx, h, func(r *rtnl) {
		for _, dev := range []string{"eth0", "flannel.1"} {
			if link, err := net.InterfaceByName(dev); err == nil {
				r.flushDevice(link.Index)
			}
		}
	})
	withNetlink(ctx, h, func(nl *netlink.Handle) {
		link, err := nl.LinkByName("flannel.1")
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return
		}
		must.Do(err)
		must.Do(nl.LinkDel(link))
	})
}

// flushDevice deletes the routes to pods through a device, and then the nexthop objects of
// all devices. The opposite order takes much longer.
func (r *rtnl) flushDevice(ifindex int) {
	pods := netip.MustParsePrefix(podNetwork)
	var routes []netip.Prefix
	r.dumpRoutes(ifindex, func(dst netip.Prefix, _ kernelRoute) {
		if pods.Overlaps(dst) && dst.Bits() >= pods.Bits() {
			routes = append(routes, dst)
		}
	})
	var ids []uint32
	r.dumpNexthops(func(id uint32) { ids = append(ids, id) })
	inBatches(r, routes, r.delRoute)
	inBatches(r, ids, r.delNexthop)
}

func addVXLAN(ctx context.Context, h *lab.Host) {
	withNetlink(ctx, h, func(nl *netlink.Handle) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "flannel.1"
		attrs.MTU = 1450
		link := &netlink.Vxlan{LinkAttrs: attrs, VxlanId: 1, Port: 8472, VtepDevIndex: must.Get(nl.LinkByName("eth0")).Attrs().Index}
		must.Do(nl.LinkAdd(link))
		must.Do(nl.LinkSetUp(link))
	})
}

// limit measures how long the kernel takes to accept the objects of peers on host 2. It
// cleans that host first and writes the objects of base, which are not measured. kinds
// selects the objects of each peer. base and peers together must be the first peers of the
// benchmark, because limit verifies these at the end.
func (b *bed) limit(ctx context.Context, base, peers []peer, kinds objects) (took, cpu time.Duration) {
	h := b.lab.Host(2)
	b.clean(ctx, h)
	if b.backend == "vxlan" {
		addVXLAN(ctx, h)
	}
	b.quiesce(ctx)
	inside(ctx, h.Namespace, func() {
		device := link(b.device()).Index
		writeLimit(device, base, kinds)
		took, cpu = writeLimit(device, peers, kinds)
	})
	b.verify(ctx, h, len(base)+len(peers))
	return took, cpu
}

// verify ends the measure unless a host has exactly the kernel objects that the first n peers need.
// It ignores objects that are not for peers, such as those for the subnets of daemons.
func (b *bed) verify(ctx context.Context, h *lab.Host, n int) {
	kinds := objectsOf(b.backend)
	have := newEntries()
	withRTNL(ctx, h, func(r *rtnl) {
		device := link(b.device()).Index
		r.dumpRoutes(device, func(dst netip.Prefix, one kernelRoute) { have.routes[dst] = one.gateway })
		if kinds.vtep {
			r.dumpNeighs(unix.AF_INET, device, func(dst netip.Addr, mac [6]byte) { have.neighs[dst] = mac })
			r.dumpNeighs(unix.AF_BRIDGE, device, func(dst netip.Addr, mac [6]byte) { have.fdb[mac] = dst })
		}
	})
	if err := have.check(makePeers(n), kinds); err != nil {
		must.Fail("%s: %w", h.Name(), err)
	}
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

// check returns an error unless e has all objects that peers need, and none for another peer. It removes the objects
// that are for no peer. kinds selects the objects of each peer.
func (e entries) check(peers []peer, kinds objects) error {
	pods := netip.MustParsePrefix(podNetwork)
	own := netip.MustParseAddr(ownSubnets)
	hosts := netip.MustParsePrefix(peerNetwork)
	ofPeer := func(a netip.Addr) bool { return pods.Contains(a) && a.Less(own) }
	maps.DeleteFunc(e.routes, func(dst netip.Prefix, _ netip.Addr) bool { return !ofPeer(dst.Addr()) })
	maps.DeleteFunc(e.neighs, func(ip netip.Addr, _ [6]byte) bool { return !ofPeer(ip) })
	maps.DeleteFunc(e.fdb, func(_ [6]byte, dst netip.Addr) bool { return !hosts.Contains(dst) })
	for _, p := range peers {
		if e.routes[p.subnet] != p.gateway(kinds) || kinds.vtep && (e.neighs[p.subnet.Addr()] != p.mac || e.fdb[p.mac] != p.ip) {
			return fmt.Errorf("peer %s has wrong entries: route via %s, neighbour %x, FDB entry to %s",
				p.subnet, e.routes[p.subnet], e.neighs[p.subnet.Addr()], e.fdb[p.mac])
		}
	}
	routes, neighs, fdb := len(e.routes), len(e.neighs), len(e.fdb)
	if n := len(peers); routes != n || kinds.vtep && (neighs != n || fdb != n) {
		return fmt.Errorf("%d routes, %d neighbours and %d FDB entries for %d peers", routes, neighs, fdb, n)
	}
	return nil
}

// quiesce waits until the last measure no longer has effects: it collects the benchmark's
// own garbage and leaves the kernel time for deferred work.
func (b *bed) quiesce(ctx context.Context) {
	runtime.GC()
	pause(ctx, 300*time.Millisecond)
}
