// SPDX-License-Identifier: Apache-2.0

package dataplane_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

var (
	link  = dataplanetest.Base().Links["flannel.1"]
	addr  = dataplane.Addr{Dev: "flannel.1", Prefix: netip.MustParsePrefix("10.5.1.0/32")}
	neigh = dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: "flannel.1", IP: netip.MustParseAddr("10.5.3.0")}, MAC: dataplane.MAC{2, 3}}
	fdb   = dataplane.FDB{FDBKey: dataplane.FDBKey{Dev: "flannel.1", MAC: dataplane.MAC{2, 3}}, Dst: netip.MustParseAddr("192.168.77.3")}
	route = dataplane.NewRoute(netip.MustParsePrefix("10.5.3.0/24"), netip.MustParseAddr("10.5.3.0"), "flannel.1", true)
	other = dataplane.NewRoute(netip.MustParsePrefix("10.5.4.0/24"), netip.MustParseAddr("192.168.77.4"), "eth0", false)
)

func with[T any](v T, change func(*T)) T {
	change(&v)
	return v
}

func stateOf(objects ...dataplane.Object) dataplane.State {
	s := dataplane.NewState()
	s.Add(objects...)
	return s
}

// TestPlan checks the operations of Plan in their order, by the beginning of their text,
// the number of routes that are taken over, and the reason of a refusal. Operations on the
// same kind of object may be in any order, so a case has at most one of each kind, except
// for routes to one destination.
func TestPlan(t *testing.T) {
	all := []dataplane.Object{link, addr, neigh, fdb, route}
	hole := dataplane.NewUnreachable(route.Dst)
	bridge := with(route, func(r *dataplane.Route) { r.Protocol, r.Dev, r.Gateway, r.OnLink = 2, "cni0", netip.Addr{}, false })
	offload := func(o dataplane.Offload) dataplane.Link {
		return with(link, func(l *dataplane.Link) { l.TxChecksum = o })
	}
	elsewhere := dataplane.NewUnreachable(netip.MustParsePrefix("10.5.5.0/24"))
	addr6 := dataplane.Addr{Dev: "flannel-v6.1", Prefix: netip.MustParsePrefix("fd00:10::/128")}
	foreign := with(route, func(r *dataplane.Route) { r.Protocol, r.Dev, r.Gateway = 3, "eth0", other.Gateway })
	standby := dataplane.NewRoute(route.Dst, netip.MustParseAddr("192.168.77.3"), "eth0", false).Standby()
	for _, tc := range []struct {
		name       string
		have, want []dataplane.Object
		dropped    []dataplane.Route
		keep       bool // Plan gets sweep false
		ops        []string
		taken      int
		refused    string
	}{
		{name: "parents first", want: all, ops: []string{
			"put link flannel.1", "put address 10.5.1.0/32", "put neighbour 10.5.3.0", "put FDB entry 02:03:00:00:00:00", "put route 10.5.3.0/24"}},
		{name: "children leave first", have: all, want: []dataplane.Object{link}, ops: []string{
			"delete route 10.5.3.0/24", "delete FDB entry 02:03:00:00:00:00", "delete neighbour 10.5.3.0", "delete address 10.5.1.0/32"}},
		{name: "an unreachable route is added beside a bridge", have: []dataplane.Object{bridge}, want: []dataplane.Object{hole},
			ops: []string{"put " + hole.String()}},
		{name: "an existing unreachable route stays", have: []dataplane.Object{hole, bridge}, want: []dataplane.Object{hole}},
		{name: "an unreachable route remains where a peer was", have: []dataplane.Object{hole, route}, want: []dataplane.Object{hole},
			ops: []string{"delete route 10.5.3.0/24"}},
		{name: "an unwanted unreachable route is deleted", have: []dataplane.Object{hole, bridge},
			ops: []string{"delete " + hole.String()}},
		{name: "any checksum offload is right if none is wanted", have: []dataplane.Object{offload(dataplane.OffloadOn)}, want: []dataplane.Object{link}},
		{name: "a wanted checksum offload that exists", have: []dataplane.Object{offload(dataplane.OffloadOn)}, want: []dataplane.Object{offload(dataplane.OffloadOn)}},
		{name: "a wanted checksum offload is put", have: []dataplane.Object{offload(dataplane.OffloadOn)}, want: []dataplane.Object{offload(dataplane.OffloadOff)},
			ops: []string{"put link flannel.1"}},
		{name: "links are not swept", have: []dataplane.Object{link}},
		{name: "nothing is deleted without sweep", have: append(all, other), want: []dataplane.Object{link}, keep: true},
		{name: "nothing to do", have: all, want: all},
		{name: "puts before deletes", have: []dataplane.Object{link, addr, other}, want: []dataplane.Object{link, addr, route},
			ops: []string{"put route 10.5.3.0/24", "delete route 10.5.4.0/24"}},
		{name: "a link that changes in place keeps the rest", have: all,
			want: append([]dataplane.Object{with(link, func(l *dataplane.Link) { l.MTU-- })}, all[1:]...), ops: []string{"put link flannel.1"}},
		{name: "a replaced link loses all objects",
			have: append([]dataplane.Object{with(link, func(l *dataplane.Link) { l.VXLAN.VNI++ }),
				with(addr, func(a *dataplane.Addr) { a.Prefix = netip.MustParsePrefix("10.5.9.0/32") }),
				with(neigh, func(n *dataplane.Neigh) { n.IP = n.IP.Next() }), other, elsewhere}, all[1:]...),
			want: append(all, other, elsewhere), ops: []string{"delete link flannel.1", "put link flannel.1", "put address 10.5.1.0/32",
				"put neighbour 10.5.3.0", "put FDB entry 02:03:00:00:00:00", "put route 10.5.3.0/24"}},
		{name: "an address that is a peer's gateway goes first", keep: true,
			have: []dataplane.Object{link, addr, with(addr, func(a *dataplane.Addr) { a.Prefix = netip.MustParsePrefix("10.5.3.0/32") })},
			want: []dataplane.Object{link, addr, route}, ops: []string{"delete address 10.5.3.0/32", "put route 10.5.3.0/24"}},
		{name: "an IPv4 address with another length goes last", have: []dataplane.Object{link, with(addr, func(a *dataplane.Addr) { a.Prefix = netip.MustParsePrefix("10.5.1.0/24") })},
			want: []dataplane.Object{link, addr}, ops: []string{"put address 10.5.1.0/32", "delete address 10.5.1.0/24"}},
		{name: "an IPv6 address of another device goes last", have: []dataplane.Object{dataplane.Addr{Dev: "flannel.1", Prefix: addr6.Prefix}},
			want: []dataplane.Object{addr6}, ops: []string{"put address fd00:10::/128 dev flannel-v6.1", "delete address fd00:10::/128 dev flannel.1"}},
		{name: "a changed MAC and destination replace entries", have: all, want: []dataplane.Object{link, addr, route,
			with(neigh, func(n *dataplane.Neigh) { n.MAC[1]++ }), with(fdb, func(f *dataplane.FDB) { f.Dst = f.Dst.Next() })},
			ops: []string{"put neighbour 10.5.3.0", "put FDB entry 02:03:00:00:00:00"}},
		{name: "an equal route is adopted", have: []dataplane.Object{link, with(route, func(r *dataplane.Route) { r.Protocol, r.OnLink, r.NexthopID = 3, false, 7 })},
			want: []dataplane.Object{link, route}},
		{name: "an equal route with the wanted MTU is adopted", have: []dataplane.Object{link, with(route, func(r *dataplane.Route) { r.Protocol, r.MTU = 3, 1300 })},
			want: []dataplane.Object{link, with(route, func(r *dataplane.Route) { r.MTU = 1300 })}},
		{name: "a plain route exists", have: []dataplane.Object{link, route}, want: []dataplane.Object{link, route.AsPlain()}},
		{name: "a plain route replaces one through a nexthop object", have: []dataplane.Object{link, with(route, func(r *dataplane.Route) { r.NexthopID = 7 })},
			want: []dataplane.Object{link, route.AsPlain()}, ops: []string{"put route 10.5.3.0/24"}},
		{name: "a route of another program is taken over", have: []dataplane.Object{link, foreign}, want: []dataplane.Object{link, route}, keep: true,
			ops: []string{"put route 10.5.3.0/24"}, taken: 1},
		{name: "duplicates stay until the put has succeeded", have: []dataplane.Object{link, with(foreign, func(r *dataplane.Route) { r.Priority = 9 })},
			want: []dataplane.Object{link, route}, ops: []string{"put route 10.5.3.0/24"}, taken: 1},
		{name: "duplicates are deleted after the put", have: []dataplane.Object{link, route, with(foreign, func(r *dataplane.Route) { r.Priority = 9 })},
			want: []dataplane.Object{link, route}, keep: true, ops: []string{"delete route 10.5.3.0/24"}, taken: 1},
		{name: "two wanted routes are created", have: []dataplane.Object{link}, want: []dataplane.Object{link, route, standby},
			ops: []string{"put route 10.5.3.0/24", "put route 10.5.3.0/24 via 192.168.77.3 dev eth0 metric 1048576"}},
		{name: "two wanted routes are in place", have: []dataplane.Object{link, route, standby}, want: []dataplane.Object{link, route, standby}},
		{name: "two wanted routes change their metrics", have: []dataplane.Object{link, route, standby}, keep: true,
			want: []dataplane.Object{link, route.Standby(), with(standby, func(r *dataplane.Route) { r.Priority = 0 })},
			ops:  []string{"put route 10.5.3.0/24 via 10.5.3.0 dev flannel.1 metric 1048576", "put route 10.5.3.0/24 via 192.168.77.3 dev eth0"}},
		{name: "the last of two wanted routes changes its MTU", have: []dataplane.Object{link, standby, route}, keep: true,
			want: []dataplane.Object{link, standby, with(route, func(r *dataplane.Route) { r.MTU = 1300 })},
			ops:  []string{"put route 10.5.3.0/24 via 10.5.3.0 dev flannel.1 mtu 1300"}},
		{name: "a third route is deleted once", have: []dataplane.Object{link, route, standby, with(route, func(r *dataplane.Route) { r.Priority = 9 })},
			want: []dataplane.Object{link, route, standby}, ops: []string{"delete route 10.5.3.0/24 via 10.5.3.0 dev flannel.1 metric 9"}},
		{name: "one of two wanted routes goes", have: []dataplane.Object{link, route, standby}, want: []dataplane.Object{link, route},
			ops: []string{"delete route 10.5.3.0/24 via 192.168.77.3 dev eth0 metric 1048576"}},
		{name: "a connected network is refused", have: []dataplane.Object{link, with(foreign, func(r *dataplane.Route) { r.Protocol, r.Dev = 2, "cni0" })},
			want: []dataplane.Object{link, route}, refused: "cni0"},
		{name: "both wanted routes are refused", have: []dataplane.Object{link, bridge}, want: []dataplane.Object{link, route, standby}, refused: "cni0"},
		{name: "a refused route is deleted if it exists", have: []dataplane.Object{link, route, with(foreign, func(r *dataplane.Route) { r.Protocol, r.Dev = 2, "cni0" })},
			want: []dataplane.Object{link, route}, refused: "cni0", ops: []string{"delete route 10.5.3.0/24"}},
		{name: "a refused route stays without sweep", have: []dataplane.Object{link, route, with(foreign, func(r *dataplane.Route) { r.Protocol, r.Dev = 2, "cni0" })},
			want: []dataplane.Object{link, route}, refused: "cni0", keep: true},
		{name: "our route on a shared device is deleted", have: []dataplane.Object{other}, ops: []string{"delete route 10.5.4.0/24"}},
		{name: "a foreign route on a shared device stays", have: []dataplane.Object{foreign}},
		{name: "a dropped foreign route is deleted", have: []dataplane.Object{with(foreign, func(r *dataplane.Route) { r.NexthopID, r.MTU = 7, 1300 })}, dropped: []dataplane.Route{with(foreign, func(r *dataplane.Route) { r.Protocol, r.OnLink = 0, false })},
			ops: []string{"delete route 10.5.3.0/24"}},
		{name: "objects outside the networks stay", have: []dataplane.Object{link,
			with(route, func(r *dataplane.Route) { r.Dst = netip.MustParsePrefix("172.30.0.0/24") }),
			with(route, func(r *dataplane.Route) { r.Dst = netip.MustParsePrefix("10.0.0.0/7") }),
			with(addr, func(a *dataplane.Addr) { a.Prefix = netip.MustParsePrefix("172.30.0.1/32") })}},
		{name: "objects of other devices stay", have: []dataplane.Object{with(addr, func(a *dataplane.Addr) { a.Dev = "cni0" }),
			with(neigh, func(n *dataplane.Neigh) { n.Dev = "cni0" }), with(fdb, func(f *dataplane.FDB) { f.Dev = "cni0" })}},
		{name: "a route that the kernel made stays", have: []dataplane.Object{link, with(route, func(r *dataplane.Route) { r.Protocol = 2 })}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dropped := map[dataplane.Route]struct{}{}
			for _, r := range tc.dropped {
				dropped[r] = struct{}{}
			}
			got := dataplane.Plan(stateOf(tc.have...), stateOf(tc.want...), dataplanetest.Scope(), dropped, !tc.keep)
			var ops []string
			for _, op := range got.Ops {
				ops = append(ops, op.String())
			}
			shortest := func(a, b string) bool { return strings.HasPrefix(a, b) || strings.HasPrefix(b, a) }
			if diff := cmp.Diff(tc.ops, ops, cmp.Comparer(shortest)); diff != "" {
				t.Errorf("ops (-want +got):\n%s", diff)
			}
			if len(got.Taken) != tc.taken {
				t.Errorf("taken over: %v, want %d", got.Taken, tc.taken)
			}
			if (tc.refused != "") != (len(got.Refused) > 0) || tc.refused != "" && !strings.Contains(got.Refused[0].Reason, tc.refused) {
				t.Errorf("refused: %v, want %q", got.Refused, tc.refused)
			}
		})
	}
}

// TestAddState checks that AddState adds objects of each kind.
func TestAddState(t *testing.T) {
	s := stateOf(other)
	s.AddState(stateOf(link, addr, neigh, fdb, route))
	if diff := cmp.Diff(stateOf(link, addr, neigh, fdb, route, other), s, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestRemoveRoute checks that Remove removes a route that equals the given one, and no other route to the
// destination.
func TestRemoveRoute(t *testing.T) {
	s := stateOf(route)
	s.Remove(route.Standby())
	if !s.Has(route) {
		t.Error("the route was removed, want it to stay beside a removed route with another metric")
	}
	s.Add(route, route.Standby())
	s.Remove(route)
	if got := s.Routes[route.Dst]; len(got) != 1 || got[0] != route.Standby() {
		t.Errorf("the routes are %v, want only the standby route", got)
	}
	s.Remove(route.Standby())
	if len(s.Routes) > 0 {
		t.Errorf("the routes are %v, want no destination", s.Routes)
	}
}

func TestStrings(t *testing.T) {
	for want, o := range map[string]dataplane.Object{
		"link flannel.1 type vxlan":                                               link,
		"address 10.5.1.0/32 dev flannel.1":                                       addr,
		"neighbour 10.5.3.0 lladdr 02:03:00:00:00:00 dev flannel.1":               neigh,
		"FDB entry 02:03:00:00:00:00 dst 192.168.77.3 dev flannel.1":              fdb,
		"route 10.5.3.0/24 via 10.5.3.0 dev flannel.1 metric 5 mtu 1300 tos 0x08": with(route, func(r *dataplane.Route) { r.Priority, r.MTU, r.TOS = 5, 1300, 8 }),
		"route unreachable 10.5.3.0/24":                                           dataplane.Route{RouteKey: dataplane.RouteKey{Dst: route.Dst, Type: dataplane.Unreachable}},
		"route fd00:10::/64 via fd00:10:: dev flannel.1":                          dataplane.NewRoute(netip.MustParsePrefix("fd00:10::/64"), netip.MustParseAddr("fd00:10::"), "flannel.1", true),
	} {
		if o.String() != want {
			t.Errorf("%q, want %q", o, want)
		}
		if got := (dataplane.Op{Delete: true, Object: o}).String(); got != "delete "+want {
			t.Errorf("%q, want it to begin with delete", got)
		}
		if got := (dataplane.Op{Exclusive: true, Object: o}).String(); got != "add "+want {
			t.Errorf("%q, want it to begin with add", got)
		}
	}
}

func TestMAC(t *testing.T) {
	for in, unicast := range map[string]bool{"02:00:00:00:00:0A": true, "00:00:00:00:00:00": false, "33:33:00:00:00:01": false, "ff:ff:ff:ff:ff:ff": false} {
		m, err := dataplane.ParseMAC(in)
		if err != nil || m.IsUnicast() != unicast || m.String() != strings.ToLower(in) {
			t.Errorf("%s: %s, unicast %t, %v; want %t", in, m, m.IsUnicast(), err, unicast)
		}
	}
	for _, in := range []string{"", "02:00", "02:00:00:00:00:00:00:01", "x"} {
		if m, err := dataplane.ParseMAC(in); err == nil || !strings.Contains(err.Error(), in) {
			t.Errorf("%q: %s, %v; want an error that names it", in, m, err)
		}
	}
}

// TestPlanTunnel checks that a tunnel is changed in place if only its local address differs. If
// it has a foreign setting or is of another kind, the kernel cannot change it. The tunnel must then be replaced, and its addresses must be put again.
func TestPlanTunnel(t *testing.T) {
	link := dataplane.Link{Name: "tun", Kind: dataplane.KindIPIP, Up: true, Tunnel: dataplane.Tunnel{Local: netip.MustParseAddr("192.168.77.1")}}
	addr := dataplane.Addr{Dev: "tun", Prefix: netip.MustParsePrefix("10.5.1.0/32")}
	scope := dataplane.Scope{Devices: []string{"tun"}, Networks: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}}
	replaced := []string{"delete link tun type ipip", "put link tun type ipip", "put address 10.5.1.0/32 dev tun"}
	for name, tt := range map[string]struct {
		change func(*dataplane.Link)
		want   []string
	}{
		"local":   {func(l *dataplane.Link) { l.Tunnel.Local = l.Tunnel.Local.Next() }, []string{"put link tun type ipip"}},
		"foreign": {func(l *dataplane.Link) { l.Tunnel.Foreign = true }, replaced},
		"kind":    {func(l *dataplane.Link) { l.Kind = dataplane.KindTUN }, append([]string{"delete link tun type tun"}, replaced[1:]...)},
	} {
		t.Run(name, func(t *testing.T) {
			have, want := dataplane.NewState(), dataplane.NewState()
			want.Add(link, addr)
			changed := link
			tt.change(&changed)
			have.Add(changed, addr)
			var got []string
			for _, op := range dataplane.Plan(have, want, scope, nil, true).Ops {
				got = append(got, op.String())
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
