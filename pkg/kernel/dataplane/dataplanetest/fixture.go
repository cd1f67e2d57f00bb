// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

const (
	dev4, dev6 = "flannel.1", "flannel-v6.1"

	protoBoot   = 3 // protocol number of routes of other flannel daemons and of ip(8)
	protoStatic = 4
)

// Scope returns the scope of a dual-stack vxlan network.
func Scope() dataplane.Scope {
	return dataplane.Scope{
		Devices:  []string{dev4, dev6},
		Networks: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00:10::/32")},
	}
}

// Base returns the two devices of a dual-stack vxlan network, with the addresses of subnet
// 1, which is this host's.
func Base() dataplane.State {
	s := dataplane.NewState()
	for _, d := range []struct {
		name, local string
		mac         byte
		mtu         int
	}{{dev4, "192.168.77.1", 4, 1450}, {dev6, "fd00:77::1", 6, 1430}} {
		s.Add(dataplane.Link{
			Name: d.name, Kind: "vxlan", MAC: dataplane.MAC{2, 0, 0, 0xff, 0, d.mac}, MTU: d.mtu, Up: true,
			VXLAN: dataplane.VXLAN{VNI: 1, Port: 8472, Local: netip.MustParseAddr(d.local), Underlay: "eth0"},
		})
	}

	s.Add(
		dataplane.Addr{Dev: dev4, Prefix: prefix.Host(subnet4(1).Addr())},
		dataplane.Addr{Dev: dev6, Prefix: prefix.Host(subnet6(1).Addr())})
	return s
}

// subnet4 and subnet6 are the subnets of host i.
func subnet4(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(5 + i>>8), byte(i), 0}), 24)
}

func subnet6(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x10, 0, 5, byte(i >> 8), byte(i)}), 64)
}

func isFamily6(p netip.Prefix) bool { return p.Addr().Is6() }

// Peer returns the objects for host i in both families, the IPv4 ones first: a neighbour,
// an FDB entry and a route each. Peers with the same index and different variants have the
// same subnets, and different MACs and host addresses.
func Peer(i, variant int) []dataplane.Object {
	var objects []dataplane.Object
	for _, p := range []netip.Prefix{subnet4(i), subnet6(i)} {
		dev := dev4
		dst := netip.AddrFrom4([4]byte{198, byte(18 + variant), byte(i >> 8), byte(i)})
		if isFamily6(p) {
			dev, dst = dev6, netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, byte(variant), 0, byte(i >> 8), byte(i)})
		}
		mac := dataplane.MAC{2, byte(variant), dev[len(dev)-3], 0, byte(i >> 8), byte(i)}
		objects = append(objects,
			dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: dev, IP: p.Addr()}, MAC: mac},
			dataplane.FDB{FDBKey: dataplane.FDBKey{Dev: dev, MAC: mac}, Dst: dst},
			dataplane.NewRoute(p, p.Addr(), dev, true))
	}
	return objects
}

// Peers returns Base with peers 2 to n+1.
func Peers(n int) dataplane.State {
	s := Base()
	for i := range n {
		s.Add(Peer(i+2, 0)...)
	}
	return s
}

// directRoutes returns an IPv4 and an IPv6 route to the subnets of host i. The gateways are
// host n of eth0's networks, such as 192.168.77.n.
func directRoutes(i, n int) []dataplane.Route {
	return []dataplane.Route{
		dataplane.NewRoute(subnet4(i), netip.AddrFrom4([4]byte{192, 168, 77, byte(n)}), "eth0", false),
		dataplane.NewRoute(subnet6(i), netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x77, 15: byte(n)}), "eth0", false),
	}
}

// canonical returns r without the attributes that the Reconciler may ignore when it adopts
// a route.
func canonical(r dataplane.Route) dataplane.Route {
	r.Protocol = 0
	r.OnLink = false
	r.NexthopID = 0
	r.MTU = 0
	return r
}

// NewReconciler returns a Reconciler for Scope. It is closed at the end of the test.
func NewReconciler(t testing.TB, k dataplane.Kernel, resync time.Duration) *dataplane.Reconciler {
	t.Helper()
	r, err := dataplane.NewReconciler(dataplane.Config{Kernel: k, Scope: Scope(), Resync: resync})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

// fixture is a World under test, with a Reconciler.
type fixture struct {
	testing.TB
	World
	spy        *Spy
	resync     time.Duration
	reconciler *dataplane.Reconciler
}

func newFixture(t testing.TB, w World, resync time.Duration) *fixture {
	spy := &Spy{Kernel: w}
	return &fixture{TB: t, World: w, spy: spy, resync: resync, reconciler: NewReconciler(t, spy, resync)}
}

// restart replaces the Reconciler by a new one, which knows nothing about the kernel.
func (f *fixture) restart() { f.reconciler = NewReconciler(f.TB, f.spy, f.resync) }

// Context returns a context whose logger is silent.
func (f *fixture) Context() context.Context {
	return klog.NewContext(f.TB.Context(), klog.Logger{})
}

// must fails the test if err is not nil.
func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

func (f *fixture) read() dataplane.State {
	f.Helper()
	s, err := f.Read(f.Context(), Scope())
	f.must(err)
	return s
}

// readAll reads the state of the scope's devices in all networks, and all routes, including
// those of other programs.
func (f *fixture) readAll() dataplane.State {
	f.Helper()
	s, err := f.Read(f.Context(), dataplane.Scope{
		Devices:  Scope().Devices,
		Networks: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
	})
	f.must(err)
	return s
}

// expect fails the test unless the kernel's state is want. It ignores routes that the
// kernel has created, and whether routes of flanneld use nexthop objects.
func (f *fixture) expect(want dataplane.State) {
	f.Helper()
	have := f.read()
	for r := range have.AllRoutes() {
		switch {
		case r.Protocol == protoKernel:
			have.Remove(r)
		case r.Protocol == dataplane.Protocol && r.NexthopID != 0:
			have.Remove(r) // the Kernel chooses whether a route uses a nexthop object
			r.NexthopID = 0
			have.Add(r)
		}
	}
	if diff := diffStates(want, have); diff != "" {
		f.Fatalf("kernel state (-want +have):\n%s", diff)
	}
}

func diffLinks(want, have dataplane.Link) string {
	return diffStates(state(dataplane.NewState(), want), state(dataplane.NewState(), have))
}

func diffStates(want, have dataplane.State) string {
	return cmp.Diff(want, have, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}))
}

// apply executes ops and fails the test if one fails.
func (f *fixture) apply(ops ...dataplane.Op) {
	f.Helper()
	if failed := f.Apply(f.Context(), ops); len(failed) > 0 {
		f.Fatalf("%d of %d operations failed, the first: %v", len(failed), len(ops), failed[0])
	}
}

// put puts objects and fails the test if one fails.
func (f *fixture) put(objects ...dataplane.Object) {
	f.Helper()
	var ops []dataplane.Op
	for _, o := range objects {
		ops = append(ops, dataplane.Op{Object: o})
	}
	f.apply(ops...)
}

// reconcile calls Reconcile twice, and returns the report of the first call. The first call
// must succeed, and the second one must find nothing to do.
func (f *fixture) reconcile(want dataplane.State, sweep bool) dataplane.Report {
	f.Helper()
	report, err := f.reconciler.Reconcile(f.Context(), want, sweep)
	f.must(err)
	again, err := f.reconciler.Reconcile(f.Context(), want, sweep)
	f.must(err)
	// A put that the kernel refuses is repeated each time.
	if again.Puts+again.Deletes > 0 && !again.Unreachable {
		f.Fatalf("a second pass made %d puts and %d deletes, want none", again.Puts, again.Deletes)
	}
	return report
}

// repair makes one pass without sweep after other programs have changed objects. A Reconciler with
// a cache looks only at what they have announced, as in the daemon.
func (f *fixture) repair(want dataplane.State) {
	f.Helper()
	if f.resync == 0 {
		f.reconcile(want, false)
		return
	}
	_, err := f.reconciler.Update(f.Context(), nil, nil, false)
	f.must(err)
}

// expectForwarded fails the test unless the kernel's state has the same effect on packets
// as want: Plan must find no change.
func (f *fixture) expectForwarded(want dataplane.State) {
	f.Helper()
	if ops := dataplane.Plan(f.read(), want, Scope(), nil, true).Ops; len(ops) > 0 {
		f.Fatalf("%d changes remain, the first is %s", len(ops), ops[0])
	}
}

// has reports whether the kernel has all of these routes, with exactly these attributes.
func (f *fixture) has(routes ...dataplane.Route) bool {
	f.Helper()
	have := f.readAll()
	return !slices.ContainsFunc(routes, func(r dataplane.Route) bool { return !have.HasRoute(r) })
}

// expectPuts fails the test if the Reconciler has deleted anything since the last look.
func (f *fixture) expectPuts() {
	f.Helper()
	for _, op := range f.spy.Take() {
		if op.Delete {
			f.Errorf("%s, want no delete", op)
		}
	}
}

// expectUntouched fails the test if the Reconciler has changed anything since the last look.
func (f *fixture) expectUntouched() {
	f.Helper()
	if ops := f.spy.Take(); len(ops) > 0 {
		f.Errorf("%d changes, the first %s; want none", len(ops), ops[0])
	}
}

// ofOther returns routes as another program, with this protocol number, would create them.
func ofOther(protocol uint8, routes []dataplane.Route) []dataplane.Route {
	routes = slices.Clone(routes)
	for i := range routes {
		routes[i].Protocol = protocol
	}
	return routes
}

// state returns a copy of base with objects added.
func state(base dataplane.State, objects ...dataplane.Object) dataplane.State {
	s := dataplane.NewState()
	for _, o := range objectsOf(base) {
		s.Add(o)
	}
	s.Add(objects...)
	return s
}

func objectsOf(s dataplane.State) []dataplane.Object {
	var objects []dataplane.Object
	for _, op := range dataplane.Plan(dataplane.NewState(), s, Scope(), nil, false).Ops {
		objects = append(objects, op.Object)
	}
	return objects
}

func objects[T dataplane.Object](of []T) []dataplane.Object {
	var all []dataplane.Object
	for _, o := range of {
		all = append(all, o)
	}
	return all
}
