// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

const (
	dev4, dev6 = "flannel.1", "flannel-v6.1"

	protoKernel = 2
	protoBoot   = 3 // protocol number of routes of other flannel daemons and of ip(8)
	protoStatic = 4
)

// subnet4 and subnet6 are the subnets of host i.
func subnet4(i int) netip.Prefix { return peer[dataplane.Route](i, 0)[0].Dst }

func subnet6(i int) netip.Prefix { return peer[dataplane.Route](i, 0)[1].Dst }

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

// fixture is a subject under test, with a Reconciler.
type fixture struct {
	testing.TB
	subject
	realKernel // nil for the kernel in memory
	spy        *dataplanetest.Spy
	lose       func() bool // whether to drop the announcements of a Drain; may be nil
	resync     time.Duration
	reconciler *dataplane.Reconciler
}

func newFixture(t testing.TB, w subject, resync time.Duration) *fixture {
	spy := &dataplanetest.Spy{Kernel: w}
	kernel, _ := w.(realKernel)
	f := &fixture{TB: t, subject: w, realKernel: kernel, spy: spy, resync: resync}
	f.restart()
	return f
}

// restart makes a new Reconciler, which knows nothing about the kernel.
func (f *fixture) restart() {
	f.reconciler = dataplanetest.NewReconciler(f.TB, lossyKernel{f.spy, f}, f.resync)
}

// lossyKernel is a kernel whose monitors lose announcements when the fixture says so.
type lossyKernel struct {
	dataplane.Kernel
	of *fixture
}

func (k lossyKernel) Monitor(s dataplane.Scope, changed wait.Signal) (dataplane.Monitor, error) {
	m, err := k.Kernel.Monitor(s, changed)
	return lossyMonitor{m, k.of}, err
}

type lossyMonitor struct {
	dataplane.Monitor
	of *fixture
}

func (m lossyMonitor) Drain() (events []dataplane.Event, rerouted, lost bool) {
	events, rerouted, lost = m.Monitor.Drain()
	if m.of.lose != nil && m.of.lose() {
		return nil, true, true
	}
	return events, rerouted, lost
}

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
	s, err := f.Read(f.Context(), dataplanetest.Scope())
	f.must(err)
	return s
}

// readAll reads the state of the scope's devices in all networks, and all routes, including
// those of other programs.
func (f *fixture) readAll() dataplane.State {
	f.Helper()
	s, err := f.Read(f.Context(), dataplane.Scope{
		Devices:  dataplanetest.Scope().Devices,
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
	if ops := dataplane.Plan(f.read(), want, dataplanetest.Scope(), nil, true).Ops; len(ops) > 0 {
		f.Fatalf("%d changes remain, the first is %s", len(ops), ops[0])
	}
}

// has reports whether the kernel has all of these routes, with exactly these attributes.
func (f *fixture) has(routes ...dataplane.Route) bool {
	f.Helper()
	have := f.readAll()
	return !slices.ContainsFunc(routes, func(r dataplane.Route) bool { return !have.Has(r) })
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

func objectsOf(s dataplane.State) []dataplane.Object { return slices.Collect(s.All()) }

func objects[T dataplane.Object](of []T) []dataplane.Object {
	var all []dataplane.Object
	for _, o := range of {
		all = append(all, o)
	}
	return all
}
