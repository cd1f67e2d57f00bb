// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/dataplane"
	"github.com/flanneld/flanneld/pkg/dataplane/dataplanetest"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// detourDevice is the device of the routes that need a detour.
const detourDevice = "flannel.1"

// newDetourWorld returns a world that reaches fd00:77::/64 directly, fd00:99::/64 through a router,
// fd00:98::/64 through a router that has announced a preference, and fd00:97::/64 through two routers.
// eth0 is the index of the device to all of them.
func newDetourWorld(t *testing.T) (w *world, eth0 int) {
	t.Helper()
	w = newWorld(t)
	if _, err := dataplanetest.NewReconciler(t, w, 0).Reconcile(silentContext(t), dataplanetest.Base(), true); err != nil {
		t.Fatal(err)
	}
	eth0, err := w.index("eth0")
	if err != nil {
		t.Fatal(err)
	}
	routers := []netip.Addr{netip.MustParseAddr("fd00:77::9"), netip.MustParseAddr("fd00:77::8")}
	for network, preference := range map[string]byte{"fd00:99::/64": 0, "fd00:98::/64": 1} { // 1 is high (RFC 4191)
		err := w.request(func(m *message) {
			encodeRoute(m, unix.RTM_NEWROUTE, unix.NLM_F_CREATE, dataplane.NewRoute(netip.MustParsePrefix(network), routers[0], "eth0", false), eth0)
			m.attr(unix.RTA_PREF, []byte{preference})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	several := &netlink.Route{Dst: &net.IPNet{IP: net.ParseIP("fd00:97::"), Mask: net.CIDRMask(64, 128)}}
	for _, neighbour := range append(routers, netip.MustParseAddr("fd00:77::2")) { // so that packets do not wait for its MAC
		err := w.Append(dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: "eth0", IP: neighbour}, MAC: dataplane.MAC{2, 0, 0, 0, 0, 9}})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range routers {
		several.MultiPath = append(several.MultiPath, &netlink.NexthopInfo{LinkIndex: eth0, Gw: r.AsSlice()})
	}
	if err := w.links.RouteAdd(several); err != nil {
		t.Fatal(err)
	}
	return w, eth0
}

// TestKernelDetourCarriesNoPackets checks that packets to the gateway of a route still take eth0 while
// the route, which needs a detour through another device, is created and deleted. Packets that arrive
// from that device, and go to another address in the gateway's network, must also still take eth0.
func TestKernelDetourCarriesNoPackets(t *testing.T) {
	const rounds = 5000
	for name, gateway := range map[string]string{
		"on a network of this host": "fd00:77::2",
		"behind a router":           "fd00:99::2",
		"behind a preferred router": "fd00:98::2",
	} {
		t.Run(name, func(t *testing.T) {
			w, eth0 := newDetourWorld(t)
			tunnel, err := w.index(detourDevice)
			if err != nil {
				t.Fatal(err)
			}
			gateway := netip.MustParseAddr(gateway)
			route := dataplane.NewRoute(netip.MustParsePrefix("fd00:10:5:3::/64"), gateway, detourDevice, true)
			err = w.request(func(m *message) { encodeRoute(m, unix.RTM_NEWROUTE, unix.NLM_F_CREATE, route, tunnel) })
			if !errors.Is(err, unix.EINVAL) {
				t.Fatalf("the kernel does not refuse the route, so the test shows nothing: %v", err)
			}
			conn, err := net.ListenPacket("udp6", "[fd00:77::1]:0")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			watched := make(chan error, 1)
			other := w.daemon(t)
			go func() {
				var err error
				for range rounds {
					if err = watchGateway(other, conn, gateway, eth0, tunnel); err != nil {
						break
					}
				}
				watched <- err
			}()
			for puts := 1; ; puts++ {
				for _, op := range []dataplane.Op{{Object: route}, {Object: route, Delete: true}} {
					if failed := w.Apply(silentContext(t), []dataplane.Op{op}); len(failed) > 0 {
						t.Fatal(failed[0])
					}
				}
				select {
				case err := <-watched:
					if err != nil {
						t.Errorf("after %d routes: %v", puts, err)
					}
					t.Logf("%d routes in the time of %d rounds", puts, rounds)
					return
				default:
				}
			}
		})
	}
}

// watchGateway returns an error if a lookup returns another device than eth0, or if a packet to the gateway
// has no route twice. It looks up the gateway, and the address after the gateway for packets that arrive from
// tunnel. eth0 and tunnel are indexes of devices.
func watchGateway(k *Kernel, conn net.PacketConn, gateway netip.Addr, eth0, tunnel int) error {
	var arrived routeReply
	next := gateway.Next()
	r, err := k.lookup(gateway)
	if err == nil {
		err = k.sock.ask(func(m *message) {
			m.begin(unix.RTM_GETROUTE, 0, rtmsg(prefix.Host(next), 0, 0, 0, 0, 0, rtmFibMatch)...)
			m.addr(unix.RTA_DST, next)
			m.attr32(unix.RTA_IIF, uint32(tunnel))
		}, func(_ uint16, payload []byte) { arrived = parseRoute(payload) })
	}
	// A lookup also fails if the route that it has found is deleted before the answer is written.
	if err != nil && !errors.Is(err, unix.ENETUNREACH) {
		return err
	}
	if err == nil && (r.oif != eth0 || arrived.oif != eth0) {
		return fmt.Errorf("lookups of %s and, for packets from %s, of %s returned the devices %d and %d, want eth0, %d",
			gateway, detourDevice, next, r.oif, arrived.oif, eth0)
	}
	send := func() error {
		_, err := conn.WriteTo([]byte("packet"), net.UDPAddrFromAddrPort(netip.AddrPortFrom(gateway, 9)))
		return err
	}
	// The kernel has no route for a packet if it deletes the route that it has found for the packet at the
	// same moment. That can happen with any IPv6 route, for a few packets in 50,000 deletions.
	if err = send(); errors.Is(err, unix.ENETUNREACH) {
		err = send()
	}
	return err
}

// TestKernelDetourWithoutCopy checks that a route is created even if the route that packets to its gateway
// take cannot be copied, because it has two next hops. All other routes must stay as they are.
func TestKernelDetourWithoutCopy(t *testing.T) {
	w, _ := newDetourWorld(t)
	dst := netip.MustParsePrefix("fd00:10:5:3::/64")
	routes := func() (created, others []string) {
		t.Helper()
		all, err := w.links.RouteList(nil, netlink.FAMILY_V6)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range all {
			if r.Dst != nil && r.Dst.String() == dst.String() {
				created = append(created, r.Gw.String())
			} else {
				others = append(others, r.String())
			}
		}
		slices.Sort(others)
		return created, others
	}
	_, before := routes()
	op := dataplane.Op{Object: dataplane.NewRoute(dst, netip.MustParseAddr("fd00:97::2"), detourDevice, true)}
	if failed := w.Apply(silentContext(t), []dataplane.Op{op}); len(failed) > 0 {
		t.Fatal(failed[0])
	}
	created, others := routes()
	if want := []string{"fd00:97::2"}; !slices.Equal(created, want) {
		t.Errorf("the gateways to %s are %v, want %v", dst, created, want)
	}
	if diff := cmp.Diff(before, others); diff != "" {
		t.Errorf("other routes (-before +after):\n%s", diff)
	}
}
