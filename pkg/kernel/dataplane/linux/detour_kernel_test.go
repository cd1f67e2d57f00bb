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

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
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
			m.begin(unix.RTM_GETROUTE, 0, rtmsg(prefix.Host(next), 0, 0, 0, 0, 0, unix.RTM_F_FIB_MATCH)...)
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

// TestKernelRouteBeforeDetour checks the copy of the route to a gateway that packets take during a detour:
// it has the next hop, the source and the MTU of the route. Without a route that can be copied, it is the
// detour itself.
func TestKernelRouteBeforeDetour(t *testing.T) {
	w, eth0 := newDetourWorld(t)
	tunnel, err := w.index(detourDevice)
	if err != nil {
		t.Fatal(err)
	}
	attributes := dataplane.NewRoute(netip.MustParsePrefix("fd00:96::/64"), netip.MustParseAddr("fd00:77::9"), "eth0", true)
	attributes.MTU = 1300
	source := netip.MustParseAddr("fd00:77::1")
	err = w.request(func(m *message) {
		encodeRoute(m, unix.RTM_NEWROUTE, unix.NLM_F_CREATE, attributes, eth0)
		m.addr(unix.RTA_PREFSRC, source)
	})
	if err != nil {
		t.Fatal(err)
	}
	throughObject := dataplane.NewRoute(netip.MustParsePrefix("fd00:95::/64"), netip.MustParseAddr("fd00:77::9"), "eth0", false)
	throughObject.NexthopID = 7
	blackhole := dataplane.Route{RouteKey: dataplane.RouteKey{Dst: netip.MustParsePrefix("fd00:94::/64"), Type: unix.RTN_BLACKHOLE}}
	containing := dataplane.NewRoute(netip.MustParsePrefix("fd00:10:5::/48"), netip.MustParseAddr("fd00:77::9"), "eth0", false)
	if err := w.Append(throughObject, blackhole, containing); err != nil {
		t.Fatal(err)
	}
	const table = 100
	rule := netlink.NewRule()
	rule.Family = netlink.FAMILY_V6
	rule.Table = table
	rule.Dst = &net.IPNet{IP: net.ParseIP("fd00:93::"), Mask: net.CIDRMask(64, 128)}
	if err := w.links.RuleAdd(rule); err != nil {
		t.Fatal(err)
	}
	if err := w.links.RouteAdd(&netlink.Route{Table: table, Dst: rule.Dst, LinkIndex: eth0, Gw: net.ParseIP("fd00:77::9")}); err != nil {
		t.Fatal(err)
	}

	copied := func(gateway, via string) routeReply {
		r := routeReply{route: dataplane.NewDetour(netip.MustParseAddr(gateway), detourDevice), oif: eth0}
		if via != "" {
			r.route.Gateway = netip.MustParseAddr(via)
		}
		return r
	}
	itself := func(gateway string) routeReply {
		return routeReply{route: dataplane.NewDetour(netip.MustParseAddr(gateway), detourDevice), oif: tunnel}
	}
	full := copied("fd00:96::2", "fd00:77::9")
	full.source = source
	full.route.OnLink = true
	full.route.MTU = 1300
	for name, tc := range map[string]struct {
		gateway string
		want    routeReply
	}{
		"on a network of this host":       {"fd00:77::2", copied("fd00:77::2", "")},
		"behind a router":                 {"fd00:99::2", copied("fd00:99::2", "fd00:77::9")},
		"with attributes":                 {"fd00:96::2", full},
		"behind two routers":              {"fd00:97::2", itself("fd00:97::2")},
		"through a nexthop object":        {"fd00:95::2", itself("fd00:95::2")},
		"of another type":                 {"fd00:94::2", itself("fd00:94::2")},
		"in another table":                {"fd00:93::2", itself("fd00:93::2")},
		"an address of this host":         {"fd00:77::1", itself("fd00:77::1")},
		"no route":                        {"2001:db8::1", itself("2001:db8::1")},
		"in the destination of the route": {"fd00:10:5:3::", itself("fd00:10:5:3::")},
	} {
		t.Run(name, func(t *testing.T) {
			route := dataplane.NewRoute(netip.MustParsePrefix("fd00:10:5:3::/64"), netip.MustParseAddr(tc.gateway), detourDevice, true)
			got := w.beforeDetour(route, tunnel)
			if got.route != tc.want.route || got.oif != tc.want.oif || got.source != tc.want.source && tc.want.source.IsValid() {
				t.Errorf("%+v, want %+v", got, tc.want)
			}
		})
	}
}
