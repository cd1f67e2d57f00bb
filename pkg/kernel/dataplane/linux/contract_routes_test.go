// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

func routeCases() []contractCase {
	return []contractCase{
		{"a connected network is refused", connectedNetwork},
		{"routes of others survive", othersSurvive},
		{"a route of another program is taken over without a gap", takeOver},
		{"a route changes its device without a gap", moveBetweenDevices},
		{"a failed put keeps the existing route", failedPut},
		{"nothing is deleted without sweep", noSweep},
		{"objects without a peer are swept", sweep},
		{"routes on shared devices", sharedDevices},
		{"a gateway out of reach", unreachable},
		{"routes through nexthop objects", nexthopObjects},
		{"detours left behind", detoursLeft},
		{"an unreachable route", lastResort},
		{"an exclusive put", exclusivePut},
		{"a route with its own MTU", ownMTU},
	}
}

func freshCases() []contractCase {
	return []contractCase{
		{"routes of other programs exist before fresh devices", freshDevices},
		{"duplicates of the routes of fresh devices", freshDuplicates},
		{"a read fails before the first routes on fresh devices", freshReadFails},
	}
}

func bridgeCases() []contractCase {
	return []contractCase{{"the bridge that a peer was refused for is deleted", bridgeGoes}}
}

// exitCases returns cases about devices that flanneld does not own, but that its routes use.
func exitCases() []contractCase {
	nic := dataplane.Link{Name: nic, Kind: "veth", Up: true}
	return []contractCase{
		{"another interface goes down and comes up", func(f *fixture) {
			whileInterface(f, func() {
				f.must(f.SetUp(nic.Name, false))
				f.must(f.SetUp(nic.Name, true))
				f.must(f.Append(nicAddrs()[1])) // the kernel deletes IPv6 addresses when the link goes down
			})
		}},
		{"another interface is created again", func(f *fixture) {
			whileInterface(f, func() {
				f.must(f.Remove(nic))
				f.must(f.Append(nic))
				f.must(f.Append(nicAddrs()...))
			})
		}},
		{"another interface loses its addresses for a moment", func(f *fixture) {
			whileInterface(f, func() {
				f.must(f.Remove(nicAddrs()...))
				f.must(f.Append(nicAddrs()...))
			})
		}},
		{"another interface loses its carrier", func(f *fixture) {
			whileInterface(f, func() { f.must(f.SetCarrier(nic.Name, false)) },
				func() { f.must(f.SetCarrier(nic.Name, true)) })
		}},
		{"the interface of many routes loses its carrier", manyWithoutCarrier},
		{"the nexthop object of another program is deleted", foreignNexthopGoes},
	}
}

// nic is the name of a second interface.
const nic = "eth1"

func nicAddrs() []dataplane.Object {
	return []dataplane.Object{
		dataplane.Addr{Dev: nic, Prefix: netip.MustParsePrefix("192.168.88.1/24")},
		dataplane.Addr{Dev: nic, Prefix: netip.MustParsePrefix("fd00:88::1/64")},
	}
}

// directRoutesOnNIC returns an IPv4 and an IPv6 route to the subnets of host i through nic.
// The gateways are host n of nic's networks, such as 192.168.88.n.
func directRoutesOnNIC(i, n int) []dataplane.Route {
	return []dataplane.Route{
		dataplane.NewRoute(subnet4(i), netip.AddrFrom4([4]byte{192, 168, 88, byte(n)}), nic, false),
		dataplane.NewRoute(subnet6(i), netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x88, 15: byte(n)}), nic, false),
	}
}

// bridgeGoes checks that a route that was refused because of a bridge is created when
// another program has deleted the bridge. The kernel deletes the connected route of the
// bridge without an announcement.
func bridgeGoes(f *fixture) {
	f.must(f.Append(bridge()...))
	f.restart()
	if report := f.reconcile(dataplanetest.Peers(5), true); len(report.Refused) != 1 {
		f.Errorf("refused %v, want the route to %s", report.Refused, subnet4(3))
	}
	f.must(f.Remove(bridge()[0]))
	if report := f.reconcile(dataplanetest.Peers(5), true); len(report.Refused) > 0 {
		f.Errorf("refused %v, want nothing", report.Refused)
	}
	f.expect(dataplanetest.Peers(5))
}

// whileInterface checks that the Reconciler restores the routes to two directly reached
// peers after each of the functions in change. One peer has plain routes. The other one has
// adopted routes, which use nexthop objects of another program. whileInterface calls all
// functions twice, because the first time may discard what the monitor knows about the
// device.
func whileInterface(f *fixture, change ...func()) {
	f.reconcile(dataplanetest.Base(), true)
	f.must(f.Append(dataplane.Link{Name: nic, Kind: "veth", Up: true}))
	f.must(f.Append(nicAddrs()...))
	want := state(dataplanetest.Base(), objects(append(directRoutesOnNIC(3, 9), directRoutesOnNIC(4, 10)...))...)
	for range 2 {
		f.adopt(directRoutesOnNIC(4, 10), want)
		for _, step := range change {
			step()
			f.reconcile(want, true)
			f.expectForwarded(want)
		}
	}
}

// adopt lets another program replace the wanted routes by routes through nexthop objects. It
// checks that the Reconciler changes none of them.
func (f *fixture) adopt(routes []dataplane.Route, want dataplane.State) {
	f.Helper()
	for i, r := range routes {
		id := adoptedNexthop + uint32(i)
		f.must(f.RemoveNexthop(id))
		f.must(f.Remove(r))
		r.NexthopID = id
		r.Protocol = protoStatic
		f.must(f.Append(r))
	}

	f.spy.Take()
	f.reconcile(want, true)
	for _, op := range f.spy.Take() {
		if r, ok := op.Object.(dataplane.Route); ok && slices.ContainsFunc(routes, func(a dataplane.Route) bool { return a.Dst == r.Dst }) {
			f.Errorf("%s, want no change, because the route of another program is adopted", op)
		}
	}
}

// adoptedNexthop is the id of the first nexthop object that adopt creates.
const adoptedNexthop = 47

// manyWithoutCarrier checks that the Reconciler restores the routes through an interface
// that loses its carrier. The interface has so many routes that some use nexthop objects.
// The kernel deletes the routes that use nexthop objects, and keeps the plain ones.
func manyWithoutCarrier(f *fixture) {
	want := dataplanetest.Base()
	for i := range 300 {
		want.Add(objects(directRoutes(2+i, 2+i%200))...)
	}

	f.reconcile(want, true)
	for range 3 {
		for _, on := range []bool{false, true} {
			f.must(f.SetCarrier("eth0", on))
			f.reconcile(want, true)
			f.expectForwarded(want)
		}
		f.reconcile(dataplanetest.Base(), true)
		f.reconcile(want, true)
	}
}

// foreignNexthopGoes checks that the Reconciler creates an adopted route again if another
// program deletes its nexthop object. The kernel deletes all routes that use the object.
func foreignNexthopGoes(f *fixture) {
	want := state(dataplanetest.Base(), dataplanetest.Peer(3, 0)...)
	for range 2 {
		f.reconcile(dataplanetest.Base(), true)
		f.adopt(peer[dataplane.Route](3, 0), want)
		for i := range peer[dataplane.Route](3, 0) {
			f.must(f.RemoveNexthop(adoptedNexthop + uint32(i)))
		}
		f.reconcile(want, true)
		f.expect(want)
	}
}

// detoursLeft checks that a detour is deleted even without sweep, because it misdirects the
// packets to a host. A route counts as a detour only if it has the protocol and the metric
// of a detour, is on a device of the scope, and has no gateway and a single address as its
// destination.
func detoursLeft(f *fixture) {
	want := state(dataplanetest.Base(), dataplanetest.Peer(3, 0)...)
	f.reconcile(want, true)
	var left, others []dataplane.Route
	for i, dev := range []string{dev4, dev6} {
		ip := []string{"198.18.0.3", "2001:db8::3"}[i]
		detour := dataplane.NewDetour(netip.MustParseAddr(ip), dev)
		left = append(left, detour)

		for n, differ := range []func(*dataplane.Route){
			func(r *dataplane.Route) { r.Protocol = protoStatic },
			func(r *dataplane.Route) { r.Dev = "eth0" },
			func(r *dataplane.Route) { r.Priority = 7 },
			func(r *dataplane.Route) { r.Gateway, r.OnLink = peer[dataplane.Neigh](3, 0)[i].IP, true },
			func(r *dataplane.Route) { r.Dst = netip.PrefixFrom(r.Dst.Addr(), r.Dst.Bits()-1).Masked() },
		} {
			r := detour
			r.Dst = prefix.Host([]netip.Addr{
				netip.AddrFrom4([4]byte{198, 18, 1, byte(4 * n)}),
				netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 1, 15: byte(4 * n)}),
			}[i])
			differ(&r)
			others = append(others, r)
		}
	}

	f.must(f.Append(objects(append(left, others...))...))
	f.reconcile(want, false)
	f.expect(want)
	if f.has(left[0]) || f.has(left[1]) {
		f.Errorf("the routes are %v, want none of %v among them", f.readAll().Routes, left)
	}
	if !f.has(others...) {
		f.Errorf("the routes are %v, want all of %v among them", f.readAll().Routes, others)
	}
}

// bridge returns a bridge of pods in the subnet of host 3.
func bridge() []dataplane.Object {
	return []dataplane.Object{
		dataplane.Link{Name: "cni0", Kind: "bridge", Up: true},
		dataplane.Addr{Dev: "cni0", Prefix: netip.MustParsePrefix("10.5.3.1/24")},
	}
}

// connectedNetwork checks that the Reconciler refuses a route that would make a bridge of
// pods unreachable, and deletes its own earlier route.
func connectedNetwork(f *fixture) {
	want := dataplanetest.Peers(5)
	f.reconcile(want, true)
	f.must(f.Append(bridge()...))
	report := f.reconcile(want, true)
	if len(report.Refused) != 1 || report.Refused[0].Route.Dst != subnet4(3) || !strings.Contains(report.Refused[0].Reason, "cni0") {
		f.Errorf("refused %v, want the route to %s for cni0", report.Refused, subnet4(3))
	}

	var left []dataplane.Route
	for r := range f.read().AllRoutes() {
		if r.Dst == subnet4(3) {
			left = append(left, r)
		}
	}
	if len(left) != 1 || left[0].Protocol != protoKernel {
		f.Errorf("routes %v, want only the connected one", left)
	}

	f.must(f.Remove(bridge()[0]))
	if report := f.reconcile(want, true); len(report.Refused) > 0 {
		f.Errorf("refused %v, want nothing", report.Refused)
	}
	f.expect(want)
}

// others returns objects that flanneld does not own: routes in its networks on another
// device, objects outside of its networks on its devices, and an unreachable route outside of
// its networks.
func others() []dataplane.Object {
	out4 := dataplane.NewRoute(netip.MustParsePrefix("172.30.1.0/24"), subnet4(2).Addr(), dev4, true)
	out6 := dataplane.NewRoute(netip.MustParsePrefix("fd00:30::/48"), subnet6(2).Addr(), dev6, true)
	out4.Protocol, out6.Protocol = protoStatic, dataplane.Protocol // one even has flanneld's protocol number
	return append(objects(ofOther(protoStatic, directRoutes(77, 7))), out4, out6,
		dataplane.Addr{Dev: dev4, Prefix: netip.MustParsePrefix("172.30.0.1/32")},
		dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: dev6, IP: netip.MustParseAddr("fd00:30::1")}, MAC: dataplane.MAC{2, 9}},
		dataplane.Route{RouteKey: dataplane.RouteKey{Dst: netip.MustParsePrefix("10.0.0.0/7"), Type: dataplane.Unreachable}, Protocol: protoStatic})
}

func othersSurvive(f *fixture) {
	f.reconcile(dataplanetest.Peers(5), true)
	f.must(f.Append(others()...))
	f.must(f.Append(dataplane.FDB{FDBKey: dataplane.FDBKey{Dev: dev4}, Dst: netip.MustParseAddr("198.51.100.1")})) // the entry for unknown MACs
	f.spy.Take()
	f.reconcile(dataplanetest.Base(), true)
	for _, op := range f.spy.Take() {
		if e, ok := op.Object.(dataplane.FDB); ok && !e.MAC.IsUnicast() {
			f.Errorf("%s, want no change of entries for groups", op)
		}
	}

	have := f.readAll()
	for _, o := range others() {
		if !have.Has(o) {
			f.Errorf("%s was removed", o)
		}
	}
}

// noGap fails the test unless the first operation on a route to dst is a put.
func (f *fixture) noGap(ops []dataplane.Op, dst netip.Prefix) {
	f.Helper()
	for _, op := range ops {
		if r, ok := op.Object.(dataplane.Route); ok && r.Dst == dst {
			if op.Delete {
				f.Errorf("%s before a put", op)
			}
			return
		}
	}
	f.Errorf("no put of %s", dst)
}

func takeOver(f *fixture) {
	f.reconcile(dataplanetest.Base(), true)
	f.must(f.Append(objects(ofOther(protoBoot, directRoutes(3, 9)))...))
	want := state(dataplanetest.Base(), dataplanetest.Peer(3, 0)...)
	f.reconcile(want, false)
	f.expect(want)
	ops := f.spy.Take()
	for _, dst := range []netip.Prefix{subnet4(3), subnet6(3)} {
		f.noGap(ops, dst)
	}
}

// moveBetweenDevices checks that the routes to a peer move to the host's own L2 network and
// back, as with direct routing, without a gap in either family.
func moveBetweenDevices(f *fixture) {
	tunnel := state(dataplanetest.Base(), dataplanetest.Peer(3, 0)...)
	direct := state(dataplanetest.Base(), objects(directRoutes(3, 9))...)
	for _, want := range []dataplane.State{tunnel, direct, tunnel} {
		f.spy.Take()
		f.reconcile(want, true)
		f.expect(want)
		ops := f.spy.Take()
		f.noGap(ops, subnet4(3))
		f.noGap(ops, subnet6(3))
	}

	// This route leads to the gateway of peer 4 through another device. Its destination is
	// outside of the scope's networks.
	f.must(f.Append(dataplane.Route{RouteKey: dataplane.RouteKey{Dst: netip.MustParsePrefix("fd00::/16"), Type: dataplane.Unicast, Priority: 512},
		Gateway: netip.MustParseAddr("fd00:77::9"), Dev: "eth0", Protocol: protoStatic}))
	want := state(dataplanetest.Base(), dataplanetest.Peer(4, 0)...)
	f.reconcile(want, true)
	f.expect(want)
}

// failedPut checks that, if the put of a route fails, the existing route to the destination
// stays.
func failedPut(f *fixture) {
	f.reconcile(dataplanetest.Base(), true)
	duplicates := ofOther(protoBoot, directRoutes(3, 9))
	for i := range duplicates {
		duplicates[i].Priority = 100
	}
	f.must(f.Append(objects(duplicates)...))
	f.spy.Fail = func(op dataplane.Op) error {
		if _, ok := op.Object.(dataplane.Route); ok {
			return syscall.EBUSY
		}
		return nil
	}

	want := state(dataplanetest.Base(), dataplanetest.Peer(3, 0)...)
	if _, err := f.reconciler.Reconcile(f.Context(), want, true); err == nil {
		f.Error("no error, want the error of the put")
	}
	f.spy.Fail = nil
	if !f.has(duplicates...) {
		f.Error("the destination has no route")
	}
	f.reconcile(want, true)
	f.expect(want)
}

// stale returns the state that an earlier process left behind.
func stale() dataplane.State {
	s := state(dataplanetest.Base(), dataplanetest.Peer(6, 0)...)
	s.Add(objects(directRoutes(7, 7))...)
	s.Add(dataplane.Addr{Dev: dev4, Prefix: netip.MustParsePrefix("10.9.9.0/32")},
		dataplane.Addr{Dev: dev6, Prefix: netip.MustParsePrefix("fd00:10:9::/128")})
	return s
}

func noSweep(f *fixture) {
	f.put(objectsOf(stale())...)
	f.reconcile(state(dataplanetest.Base(), dataplanetest.Peer(2, 0)...), false)
	f.expect(state(stale(), dataplanetest.Peer(2, 0)...))
	f.expectPuts()
}

func sweep(f *fixture) {
	f.put(objectsOf(stale())...)
	f.reconcile(state(dataplanetest.Base(), dataplanetest.Peer(2, 0)...), true)
	f.expect(state(dataplanetest.Base(), dataplanetest.Peer(2, 0)...))
}

// sharedDevices checks that the Reconciler deletes an unwanted route on a shared device only
// with sweep, and only if the route has flanneld's protocol number or was wanted.
func sharedDevices(f *fixture) {
	ours := directRoutes(2, 9)
	theirs := ofOther(protoBoot, directRoutes(3, 9))
	adopted := ofOther(protoBoot, directRoutes(4, 9))
	f.put(objects(ours)...)
	f.must(f.Append(objects(theirs)...))
	f.must(f.Append(objects(adopted)...))
	f.reconcile(state(dataplane.NewState(), objects(directRoutes(4, 9))...), false)
	f.reconcile(dataplane.NewState(), false)
	if !f.has(ours...) || !f.has(adopted...) {
		f.Error("a route was deleted without sweep")
	}
	f.reconcile(dataplane.NewState(), true)
	f.expect(state(dataplane.NewState(), objects(theirs)...))
}

// unreachable checks that the Reconciler refuses the routes of a peer whose gateway is not
// on the host's L2 network, and that this affects no other peer.
func unreachable(f *fixture) {
	want := state(dataplanetest.Base(), objects(directRoutes(3, 9))...)
	bad := []dataplane.Route{
		dataplane.NewRoute(subnet4(4), netip.MustParseAddr("192.0.2.1"), "eth0", false),
		dataplane.NewRoute(subnet6(4), netip.MustParseAddr("2001:db8::1"), "eth0", false),
	}

	report := f.reconcile(state(want, objects(bad)...), true)
	if len(report.Refused) != 2 || !report.Unreachable {
		f.Errorf("refused %v, unreachable %t; want both of %v", report.Refused, report.Unreachable, bad)
	}

	f.expect(want)
	if report := f.reconcile(want, true); len(report.Refused) > 0 || report.Unreachable {
		f.Errorf("refused %v, unreachable %t; want nothing", report.Refused, report.Unreachable)
	}
}

// noOtherHost checks that the Reconciler refuses a gateway that is an address of this
// host, on any device, or the broadcast address.
func noOtherHost(f *fixture) {
	var own []dataplane.Object
	for _, p := range []netip.Prefix{subnet4(4), subnet6(4)} { // the device of an earlier VNI could have such addresses
		own = append(own, dataplane.Addr{Dev: "eth0", Prefix: prefix.Host(p.Addr())})
	}

	f.must(f.Append(own...))
	want := state(dataplanetest.Base(), objects(directRoutes(3, 9))...)
	bad := append(peer[dataplane.Route](4, 0),
		dataplane.NewRoute(subnet4(5), netip.MustParseAddr("192.168.77.255"), "eth0", false),
		dataplane.NewRoute(subnet6(5), netip.MustParseAddr("fd00:77::1"), "eth0", false))

	report := f.reconcile(state(want, objects(bad)...), true)
	if len(report.Refused) != len(bad) || !report.Unreachable {
		f.Errorf("refused %v, unreachable %t; want all of %v", report.Refused, report.Unreachable, bad)
	}

	for _, r := range report.Refused {
		if !strings.Contains(r.Reason, syscall.EINVAL.Error()) {
			f.Errorf("refused for %q, want the kernel's reason", r.Reason)
		}
	}

	f.must(f.Remove(own...))
	report = f.reconcile(state(want, objects(bad)...), true)
	if len(report.Refused) != 2 {
		f.Errorf("refused %v, want the last two of %v", report.Refused, bad)
	}
	f.expect(state(want, objects(bad[:2])...))
}

// nexthopObjects checks that the Reconciler adopts routes through nexthop objects, and that
// it can delete them.
func nexthopObjects(f *fixture) {
	want := state(dataplanetest.Base(), dataplanetest.Peer(3, 0)...)
	f.reconcile(dataplanetest.Base(), true)
	f.spy.Take()

	for id, o := range dataplanetest.Peer(3, 0) {
		if r, ok := o.(dataplane.Route); ok {
			r.NexthopID = uint32(id + 7)
			r.Protocol = protoBoot
			o = r
		}
		f.must(f.Append(o))
	}

	f.reconcile(want, true)
	f.expectUntouched() // all routes are adopted
	f.reconcile(dataplanetest.Base(), true)
	f.expect(dataplanetest.Base())
}

func lastResort(f *fixture) {
	var want []dataplane.Route
	for _, r := range directRoutes(2, 9) {
		want = append(want, dataplane.Route{RouteKey: dataplane.RouteKey{Dst: r.Dst, Priority: r.Priority, Type: dataplane.Unreachable}, Protocol: dataplane.Protocol})
	}
	f.reconcile(state(dataplanetest.Base(), objects(want)...), true)
	f.expect(state(dataplanetest.Base(), objects(want)...))
	f.reconcile(state(dataplanetest.Base(), dataplanetest.Peer(2, 0)...), true)
	f.expect(state(dataplanetest.Base(), dataplanetest.Peer(2, 0)...))
	f.reconcile(state(dataplanetest.Base(), objects(want)...), true)
	f.expect(state(dataplanetest.Base(), objects(want)...))
	f.reconcile(dataplanetest.Base(), true)
	f.expect(dataplanetest.Base())
}

// exclusivePut checks that an exclusive put creates a route and never replaces one.
func exclusivePut(f *fixture) {
	f.reconcile(dataplanetest.Base(), true)
	theirs := ofOther(protoStatic, directRoutes(3, 9))
	f.must(f.Append(objects(theirs)...))
	for i, ours := range [][]dataplane.Route{directRoutes(3, 7), directRoutes(4, 7)} {
		for _, r := range ours {
			failed := f.Apply(f.Context(), []dataplane.Op{{Exclusive: true, Object: r}})
			if i == 0 && (len(failed) != 1 || !errors.Is(failed[0], syscall.EEXIST)) {
				f.Errorf("%s: failures %v, want EEXIST", r, failed)
			} else if i == 1 && len(failed) > 0 {
				f.Errorf("%s: failures %v, want none", r, failed)
			}
		}
	}
	f.expect(state(dataplanetest.Base(), append(objects(theirs), objects(directRoutes(4, 7))...)...))
}

// routesBeside returns routes of other programs to the subnets of host 5. Their metric is higher than
// that of flanneld's route for IPv4, and lower for IPv6.
func routesBeside() []dataplane.Object {
	routes := ofOther(protoStatic, directRoutes(5, 9))
	for i := range routes {
		routes[i].Priority = 100
	}
	return objects(routes)
}

// freshDevices checks that the first routes on new devices are created before the routes of
// other programs are known, with exclusive puts. A directly connected network must still be
// refused.
func freshDevices(f *fixture) {
	f.must(f.Append(bridge()...))
	f.must(f.Append(routesBeside()...))
	f.must(f.Append(objects(ofOther(protoStatic, directRoutes(4, 9)))...))
	want := dataplanetest.Peers(5)
	report := f.reconcile(state(want), true)
	if len(report.Refused) != 1 || report.Refused[0].Route.Dst != subnet4(3) {
		f.Errorf("refused %v, want the route to %s", report.Refused, subnet4(3))
	}

	delete(want.Routes, subnet4(3))
	f.expect(want)
	if made := 2*2 + 5*6 - 1; report.Puts != made || report.Repaired != 0 {
		f.Errorf("%d puts, of them %d repairs; want %d, none of them a repair", report.Puts, report.Repaired, made)
	}

	ops := f.spy.Take()
	first := slices.IndexFunc(ops, func(op dataplane.Op) bool {
		r, ok := op.Object.(dataplane.Route)
		return ok && r.Dst == subnet4(4)
	})
	if first < 0 || !ops[first].Exclusive {
		f.Error("a route of another program was replaced before it was known")
	}
}

// freshDuplicates checks that the Reconciler deletes the duplicates of routes on new devices
// even without sweep. Only a read can find the duplicates.
func freshDuplicates(f *fixture) {
	f.must(f.Append(routesBeside()...))
	f.reconcile(dataplanetest.Peers(5), false)
	f.expect(dataplanetest.Peers(5))
}

// freshReadFails checks that, if the brief read before the first routes on new devices
// fails, no route is created before a full read.
func freshReadFails(f *fixture) {
	_, err := f.reconciler.Reconcile(f.Context(), dataplanetest.Base(), false)
	f.must(err)
	fail := true
	f.spy.ReadError = func() error {
		defer func() { fail = false }()
		if fail {
			return syscall.EINTR
		}
		return nil
	}

	f.spy.Fail = func(op dataplane.Op) error {
		if _, ok := op.Object.(dataplane.Route); ok && f.spy.Reads == 0 {
			f.Errorf("%s before a full read", op)
		}
		return nil
	}

	_, err = f.reconciler.Reconcile(f.Context(), dataplanetest.Peers(3), true)
	f.must(err)
	if fail {
		f.Error("there was no read")
	}
	f.expect(dataplanetest.Peers(3))
}

// ownMTU checks that a route gets a wanted MTU without a gap, and loses it without a gap when no MTU is
// wanted any more. A wanted MTU must replace the MTU that another program has set on its route. If no MTU
// is wanted, another program's route must keep its MTU.
func ownMTU(f *fixture) {
	narrowed := func(mtu int) dataplane.State {
		s := dataplanetest.Base()
		for _, o := range dataplanetest.Peer(3, 0) {
			if r, ok := o.(dataplane.Route); ok {
				r.MTU = mtu
				o = r
			}
			s.Add(o)
		}
		return s
	}

	for _, mtu := range []int{0, 1400, 1300, 0, 1300} {
		f.spy.Take()
		f.reconcile(narrowed(mtu), true)
		f.expect(narrowed(mtu))
		ops := f.spy.Take()
		for _, dst := range []netip.Prefix{subnet4(3), subnet6(3)} {
			f.noGap(ops, dst)
		}
	}

	f.restart()
	f.reconcile(narrowed(1300), true)
	f.expectUntouched()

	replace := func(protocol uint8, mtu int) (replaced []dataplane.Route) {
		for _, r := range peer[dataplane.Route](3, 0) {
			for _, have := range f.read().Routes[r.Dst] {
				f.must(f.Remove(have))
			}
			r.Protocol = protocol
			r.MTU = mtu
			f.must(f.Append(r))
			replaced = append(replaced, r)
		}
		return replaced
	}

	for _, protocol := range []uint8{protoBoot, dataplane.Protocol} {
		for _, mtu := range []int{1350, 0} {
			replace(protocol, mtu)
			f.reconcile(narrowed(1300), true)
			f.expect(narrowed(1300))
		}
	}

	replace(dataplane.Protocol, 1350)
	f.reconcile(narrowed(0), true)
	f.expect(narrowed(0))
	foreign := replace(protoBoot, 1350)
	f.reconcile(narrowed(0), true)
	for _, r := range foreign {
		if have := f.read(); !have.Has(r) {
			f.Errorf("routes to %s: %v, want the one of another program with its MTU", r.Dst, have.Routes[r.Dst])
		}
	}
}
