// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

type contractCase struct {
	name string
	run  func(*fixture)
}

// contract checks that the kernels that newSubject returns do what dataplane.Kernel
// describes, and that a Reconciler on such a kernel does what dataplane.Reconciler
// describes.
func contract(t *testing.T, newSubject func(testing.TB) subject) {
	t.Helper()
	cases := slices.Concat(objectCases(), linkCases(), retireCases())
	both := slices.Concat(routeCases(), freshCases(), driftCases(), duplicateCases(), bridgeCases())
	if _, ok := newSubject(t).(realKernel); ok {
		cases = append(cases, kernelCases()...)
		both = append(both, kernelDriftCases()...)
	}

	for _, tc := range slices.Concat(cases, both) {
		t.Run(tc.name, func(t *testing.T) { tc.run(newFixture(t, newSubject(t), 0)) })
	}
	t.Run("an unchanged kernel is read once", func(t *testing.T) { readOnce(newFixture(t, newSubject(t), time.Hour)) })
	t.Run("a refused route causes no read", func(t *testing.T) { refusedAgain(newFixture(t, newSubject(t), time.Hour)) })
	t.Run("other programs change the kernel during and after a bulk of writes", func(t *testing.T) { disturbedBulk(newFixture(t, newSubject(t), time.Hour)) })
	for _, tc := range both {
		t.Run(tc.name+", by announcements alone", func(t *testing.T) { tc.run(newFixture(t, newSubject(t), time.Hour)) })
	}
}

// kernelCases returns cases for a real kernel.
func kernelCases() []contractCase {
	return []contractCase{
		{"devices ignore router advertisements", ignoredAdvertisements},
		{"on-link lookups on a link without neighbours", withoutNeighbours},
	}
}

func objectCases() []contractCase {
	return []contractCase{
		{"a read returns what was put", putIsRead},
		{"puts and deletes can be repeated", repeated},
		{"one failure among many is named", oneFailure},
		{"a thousand objects at once", thousands},
		{"missing devices", absentDevices},
		{"a scope without networks", onlyLinks},
		{"a scope of connected networks", onlyConnected},
		{"a context that has ended", endedContext},
		{"on-link lookups", onLink},
		{"on-link lookups behind a default route without a gateway", defaultIsNoNetwork},
		{"on-link lookups over another device", overAnotherDevice},
		{"changes that affect on-link lookups are announced", rerouted},
	}
}

func putIsRead(f *fixture) {
	want := dataplanetest.Peers(20)
	f.put(objectsOf(want)...)
	f.expect(want)
}

func ignoredAdvertisements(f *fixture) {
	f.put(objectsOf(dataplanetest.Base())...)
	for _, dev := range dataplanetest.Scope().Devices {
		ra, err := f.AcceptRA(dev)
		if err != nil || ra != "0" {
			f.Errorf("accept_ra of %s is %q (%v), want 0", dev, ra, err)
		}
	}
}

// rerouted checks that Drain returns rerouted for changes of routes and links by other
// programs outside of the scope, and not for own writes or neighbours.
func rerouted(f *fixture) {
	f.put(objectsOf(dataplanetest.Base())...)
	m, err := f.Monitor(dataplanetest.Scope(), wait.NewSignal())
	f.must(err)
	defer m.Close()
	toPeer := dataplane.NewRoute(netip.MustParsePrefix("198.51.100.7/32"), netip.MustParseAddr("192.168.77.9"), "eth0", false)
	type step struct {
		name string
		do   func(try int) error
		want bool
	}
	steps := []step{
		{"own writes", func(try int) error { f.put(dataplanetest.Peer(3+try, 0)...); return nil }, false},
		{"a route", func(int) error { return f.Append(toPeer) }, true},
		{"nothing", func(int) error { return nil }, false},
		{"a deleted route", func(int) error { return f.Remove(toPeer) }, true},
		{"a link", func(int) error { return f.SetUp("eth0", false) }, true},
	}
	if f.realKernel != nil {
		steps = append(steps, step{"a neighbour", func(try int) error { return f.Learn(peer[dataplane.Neigh](100+try, 0)[0]) }, false})
	}

	for _, step := range steps {
		const tries = 5 // some may fail: the kernel still announces link-local addresses of new devices
		got := !step.want
		for try := 0; try < tries && got != step.want; try++ {
			m.Drain()
			f.must(step.do(try))
			if _, got, _ = m.Drain(); step.want {
				break
			}
		}
		if got != step.want {
			f.Errorf("%s: rerouted %t, want %t", step.name, got, step.want)
		}
	}
}

// onlyLinks checks that a read of a scope without networks returns only links. That saves a
// router with a million routes a long read.
func onlyLinks(f *fixture) {
	f.put(objectsOf(dataplanetest.Peers(3))...)
	f.put(dataplane.NewDetour(netip.MustParseAddr("192.168.77.9"), dataplanetest.Scope().Devices[0]))
	s, err := f.Read(f.Context(), dataplane.Scope{Devices: dataplanetest.Scope().Devices})
	f.must(err)
	if diff := diffStates(linksOf(dataplanetest.Base()), s); diff != "" {
		f.Errorf("state (-want +got):\n%s", diff)
	}
}

// onlyConnected checks that a read of a scope with Connected returns only the directly
// connected routes. It must still return all addresses, neighbours and FDB entries.
func onlyConnected(f *fixture) {
	f.put(objectsOf(dataplanetest.Peers(3))...)
	f.must(f.Append(bridge()...))
	of6 := netip.PrefixFrom(subnet6(3).Addr().Next(), 64)
	f.must(f.Append(dataplane.Addr{Dev: "cni0", Prefix: of6}))
	scope := dataplanetest.Scope()
	scope.Connected = true
	s, err := f.Read(f.Context(), scope)
	f.must(err)
	var routes []dataplane.Route
	for r := range s.AllRoutes() {
		if !r.Dst.IsSingleIP() { // leave out the routes to the addresses of the devices
			routes = append(routes, r)
		}
	}

	slices.SortFunc(routes, func(a, b dataplane.Route) int { return a.Priority - b.Priority })
	want := []dataplane.Route{
		{RouteKey: dataplane.RouteKey{Dst: subnet4(3), Type: dataplane.Unicast}, Dev: "cni0", Protocol: protoKernel},
		{RouteKey: dataplane.RouteKey{Dst: subnet6(3), Type: dataplane.Unicast, Priority: 256}, Dev: "cni0", Protocol: protoKernel},
	}
	if !slices.Equal(routes, want) {
		f.Errorf("routes %v, want only those of cni0: %v", routes, want)
	}
	if len(s.FDB) != 6 || len(s.Neighs) != 6 || len(s.Addrs) != 2 {
		f.Errorf("%d FDB entries, %d neighbours and %d addresses, want all of them", len(s.FDB), len(s.Neighs), len(s.Addrs))
	}
}

// readOnce checks that an unchanged kernel is read in full once. While no route is wanted
// on new devices, there must be only brief reads, without the routing table.
func readOnce(f *fixture) {
	reconcile := func(want dataplane.State, sweep bool, brief, reads int) {
		report, err := f.reconciler.Reconcile(f.Context(), want, sweep)
		f.must(err)
		f.expect(want)
		if report.Repaired != 0 || f.spy.Brief != brief || f.spy.Reads != reads {
			f.Errorf("%d of %d writes were repairs, after %d brief and %d full reads, want none after %d and %d",
				report.Repaired, report.Puts, f.spy.Brief, f.spy.Reads, brief, reads)
		}
	}

	reconcile(dataplanetest.Base(), false, 1, 0)
	reconcile(dataplanetest.Base(), false, 1, 0)
	reconcile(dataplanetest.Peers(1), true, 2, 1)
	reconcile(dataplanetest.Peers(2), true, 2, 1)
}

// refusedAgain checks that routes that the kernel refuses in each pass cause no read, alone
// and beside routes that succeed. Each report must contain a refusal for each such route, and
// no other.
func refusedAgain(f *fixture) {
	f.reconcile(dataplanetest.Peers(3), true)
	f.spy.Reads = 0
	bad := []dataplane.Object{
		dataplane.NewRoute(subnet4(8), netip.MustParseAddr("192.0.2.1"), "eth0", false),
		dataplane.NewRoute(subnet6(8), netip.MustParseAddr("2001:db8::1"), "eth0", false),
	}
	if f.realKernel != nil {
		bad = append(bad,
			dataplane.NewRoute(subnet4(9), netip.MustParseAddr("192.168.77.255"), "eth0", false),
			dataplane.NewRoute(subnet6(9), netip.MustParseAddr("fd00:77::1"), "eth0", false))
	}

	for i, added := range [][]dataplane.Object{append(bad, dataplanetest.Peer(5, 0)...), nil, dataplanetest.Peer(6, 0), nil} {
		var removed []dataplane.Object
		if i == 2 {
			removed = dataplanetest.Peer(2, 0)
		}

		report, err := f.reconciler.Update(f.Context(), removed, added, true)
		f.must(err)
		refused := map[dataplane.Object]bool{}
		for _, r := range report.Refused {
			refused[r.Route] = true
		}

		other := slices.ContainsFunc(bad, func(o dataplane.Object) bool { return !refused[o] })
		if other || len(report.Refused) != len(bad) || report.Repaired != 0 {
			f.Errorf("step %d: refused %v with %d repairs, want %v and no repair", i, report.Refused, report.Repaired, bad)
		}

		for _, o := range bad {
			if f.reconciler.Has(o) {
				f.Errorf("step %d: Has(%s) is true, want false", i, o)
			}
		}
	}
	if f.spy.Reads != 0 {
		f.Errorf("%d reads, want none", f.spy.Reads)
	}

	want := dataplanetest.Peers(2)
	want.Remove(dataplanetest.Peer(2, 0)...)
	f.expect(state(want, slices.Concat(dataplanetest.Peer(4, 0), dataplanetest.Peer(5, 0), dataplanetest.Peer(6, 0))...))
}

// applyHook is a kernel that calls the function after at the end of each Apply with more than
// 1,000 operations.
type applyHook struct {
	dataplane.Kernel
	after func()
}

func (h applyHook) Apply(ctx context.Context, ops []dataplane.Op) []dataplane.OpError {
	failed := h.Kernel.Apply(ctx, ops)
	if len(ops) > 1000 {
		h.after()
	}
	return failed
}

// disturbedBulk checks that the Reconciler repairs a change that another program makes
// during a bulk of writes on new devices. There are so many writes that announcements are
// suspended. A change after these writes must be announced again.
func disturbedBulk(f *fixture) {
	report := func(r dataplane.Report, err error) dataplane.Report {
		f.must(err)
		return r
	}

	disturbed := 0
	f.spy.Kernel = applyHook{f.subject, func() {
		disturbed++
		f.must(f.Remove(dataplanetest.Peer(2, 0)...))
	}}

	report(f.reconciler.Reconcile(f.Context(), dataplanetest.Peers(300), true))
	f.expect(dataplanetest.Peers(300))
	if disturbed != 1 {
		f.Fatalf("%d large batches of writes, want one", disturbed)
	}

	for quiet := false; !quiet; { // drain what remains of the announcements of the bulk
		select {
		case <-f.reconciler.Changed():
			report(f.reconciler.Update(f.Context(), nil, nil, true))
		case <-time.After(100 * time.Millisecond):
			quiet = true
		}
	}

	f.spy.Reads = 0
	f.must(f.Remove(dataplanetest.Peer(3, 0)...))
	select {
	case <-f.reconciler.Changed():
	case <-time.After(5 * time.Second):
		f.Fatal("a change by another program after a bulk of writes was not announced")
	}
	if r := report(f.reconciler.Update(f.Context(), nil, nil, true)); r.Repaired == 0 || f.spy.Reads != 0 {
		f.Errorf("%d repairs after %d reads, want some after none", r.Repaired, f.spy.Reads)
	}
	f.expect(dataplanetest.Peers(300))
}

func repeated(f *fixture) {
	want := dataplanetest.Peers(3)
	f.put(objectsOf(want)...)
	f.put(objectsOf(want)...)
	f.expect(want)
	deletes := dataplane.Plan(want, dataplanetest.Base(), dataplanetest.Scope(), nil, true).Ops
	for _, d := range []string{dev4, dev6} {
		deletes = append(deletes, dataplane.Op{Delete: true, Object: want.Links[d]})
	}

	f.apply(deletes...)
	f.expect(dataplane.NewState())
	f.apply(deletes...)
	f.put(objectsOf(dataplanetest.Base())...)
	f.apply(deletes...) // the devices exist, but not the objects of peers
	f.expect(dataplane.NewState())
}

func oneFailure(f *fixture) {
	want := dataplanetest.Peers(90)
	bad := directRoutes(3, 0)[0]
	bad.Dst, bad.Gateway = netip.MustParsePrefix("10.99.0.0/24"), netip.MustParseAddr("203.0.113.1")
	var ops []dataplane.Op
	for i, o := range objectsOf(want) {
		if i == 300 {
			ops = append(ops, dataplane.Op{Object: bad})
		}
		ops = append(ops, dataplane.Op{Object: o})
	}

	failed := f.Apply(f.Context(), ops)
	if len(failed) != 1 || failed[0].Op != (dataplane.Op{Object: bad}) || !errors.Is(failed[0], syscall.ENETUNREACH) {
		f.Errorf("failures %v, want only %s: network unreachable", failed, bad)
	}
	f.expect(want)
}

func thousands(f *fixture) {
	want := dataplanetest.Peers(400)
	f.put(objectsOf(want)...)
	f.expect(want)
	f.reconcile(dataplanetest.Base(), true)
	f.expect(dataplanetest.Base())
}

func absentDevices(f *fixture) {
	f.expect(dataplane.NewState())
	for _, o := range append(dataplanetest.Peer(2, 0), dataplane.Addr{Dev: dev4, Prefix: prefix.Host(subnet4(1).Addr())}) {
		failed := f.Apply(f.Context(), []dataplane.Op{{Object: o}, {Delete: true, Object: o}})
		if len(failed) != 1 || failed[0].Op.Delete || !errors.Is(failed[0], syscall.ENODEV) {
			f.Errorf("%s: failures %v, want only the put: no such device", o, failed)
		}
	}

	link := dataplanetest.Base().Links[dev4]
	link.VXLAN.Underlay = "eth9"
	if failed := f.Apply(f.Context(), []dataplane.Op{{Object: link}}); len(failed) != 1 || !errors.Is(failed[0], syscall.ENODEV) {
		f.Errorf("link above a missing device: failures %v, want no such device", failed)
	}
	f.expect(dataplane.NewState())
}

func endedContext(f *fixture) {
	ctx, cancel := context.WithCancel(f.Context())
	cancel()
	if _, err := f.Read(ctx, dataplanetest.Scope()); !errors.Is(err, context.Canceled) {
		f.Errorf("Read: %v, want the error of the context", err)
	}
	var ops []dataplane.Op
	for _, o := range objectsOf(dataplanetest.Peers(1)) {
		ops = append(ops, dataplane.Op{Object: o})
	}
	if failed := f.Apply(ctx, ops); len(failed) != len(ops) {
		f.Errorf("%d of %d operations failed, want all", len(failed), len(ops))
	}
	f.expect(dataplane.NewState())
}

func onLink(f *fixture) {
	f.must(f.Append(
		dataplane.Route{RouteKey: dataplane.RouteKey{Dst: netip.MustParsePrefix("203.0.113.0/24"), Type: dataplane.Unicast},
			Gateway: netip.MustParseAddr("192.168.77.9"), Dev: "eth0", Protocol: protoStatic},
		dataplane.Route{RouteKey: dataplane.RouteKey{Dst: netip.MustParsePrefix("2001:db8::/32"), Type: dataplane.Unicast, Priority: 1024},
			Gateway: netip.MustParseAddr("fd00:77::9"), Dev: "eth0", Protocol: protoStatic},
		dataplane.Route{RouteKey: dataplane.RouteKey{Dst: netip.MustParsePrefix("198.18.0.0/24"), Type: dataplane.Unicast}, Dev: "eth0", Protocol: protoStatic},
	))

	for n, typ := range []dataplane.RouteType{dataplane.Unreachable, 6, 8} { // blackhole, prohibit
		r := dataplane.Route{RouteKey: dataplane.RouteKey{Dst: netip.MustParsePrefix(fmt.Sprintf("100.64.%d.0/24", n)), Type: typ}, Protocol: protoStatic}
		f.must(f.Append(r))
		r.Dst = netip.MustParsePrefix(fmt.Sprintf("2001:db9:%d::/48", n))
		r.Priority = 1024
		f.must(f.Append(r))
	}

	for dst, want := range map[string]string{
		"192.168.77.2": "eth0", "fd00:77::2": "eth0", // directly connected
		"203.0.113.1": "", "2001:db8::1": "", // through a gateway
		"198.18.0.7":  "eth0",                                 // a route without a gateway
		"192.0.2.1":   "",                                     // no route
		"2001:dba::1": "",                                     // no route
		"100.64.0.1":  "", "100.64.1.1": "", "100.64.2.1": "", // unreachable, blackhole, prohibit
		"2001:db9::1": "", "2001:db9:1::1": "", "2001:db9:2::1": "",
		"192.168.77.1": "", "fd00:77::1": "", // own addresses
	} {
		f.expectOnLink(dst, want)
	}
}

func (f *fixture) expectOnLink(dst, want string) {
	f.Helper()
	dev, err := f.OnLink(f.Context(), netip.MustParseAddr(dst), "eth0")
	if err != nil || dev != want {
		f.Errorf("OnLink(%s) = %q, %v; want %q", dst, dev, err, want)
	}
}

// defaultIsNoNetwork checks that no host counts as on-link because of a default route
// without a gateway, or because of a part of such a route that is larger than a /8. A /8
// must count.
func defaultIsNoNetwork(f *fixture) {
	for _, dsts := range [][]string{
		{"0.0.0.0/0", "::/0"}, {"0.0.0.0/1", "::/1"}, {"128.0.0.0/1", "8000::/1"}, {"192.0.0.0/3", "2000::/3"}, {"192.0.0.0/7", "2000::/7"},
	} {
		for _, dst := range dsts {
			f.must(f.Append(unicast(dst, "eth0")))
		}
		f.expectOnLink("192.0.2.1", "")
		f.expectOnLink("2001:db8::1", "")
	}

	f.expectOnLink("192.168.77.2", "eth0")
	f.expectOnLink("fd00:77::2", "eth0")
	for _, dst := range []string{"192.0.0.0/8", "2000::/8"} {
		f.must(f.Append(unicast(dst, "eth0")))
	}
	f.expectOnLink("192.0.2.1", "eth0")
	f.expectOnLink("2001:db8::1", "eth0")
}

// unicast returns a route of another program through a device and without a gateway.
func unicast(dst, dev string) dataplane.Route {
	r := dataplane.NewRoute(netip.MustParsePrefix(dst), netip.Addr{}, dev, false)
	r.Protocol = protoStatic
	return r
}

// withoutNeighbours checks that no peer is on-link on a link that does not resolve
// addresses, such as the link of a VPN: packets go to the same place with any gateway.
func withoutNeighbours(f *fixture) {
	f.must(f.Append(dataplane.Link{Name: nic, Kind: "veth", Up: true}))
	f.must(f.Append(nicAddrs()...))
	for _, arp := range []bool{true, false, true} {
		f.must(f.SetARP(nic, arp))
		want := map[bool]string{true: nic}[arp]
		f.expectOnLink("192.168.88.2", want)
		f.expectOnLink("fd00:88::2", want)
	}
}

// overAnotherDevice checks that a route to a host over a device other than the external one does not make
// that host on-link, as a VPN's route to a peer, unless the route belongs to an address of the device.
func overAnotherDevice(f *fixture) {
	f.must(f.Append(dataplane.Link{Name: nic, Kind: "veth", Up: true}))
	f.must(f.Append(nicAddrs()...))
	for _, dst := range []string{"192.168.77.2/32", "fd00:77::2/128"} {
		f.must(f.Append(unicast(dst, nic)))
	}
	f.expectOnLink("192.168.77.2", "")
	f.expectOnLink("fd00:77::2", "")
	f.expectOnLink("192.168.88.2", nic)
	f.expectOnLink("fd00:88::2", nic)
}
