// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// hops contains the number of plain IPv4 routes in the kernel, the number of IPv4 routes
// through nexthop objects, and the number of nexthop objects with flanneld's protocol
// number.
type hops struct{ plain, through, objects int }

func (w *world) hops(t *testing.T) hops {
	t.Helper()
	fresh, err := Open(Options{NexthopObjects: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = fresh.Close() }()
	have, err := fresh.Read(silentContext(t), dataplanetest.Scope())
	if err != nil {
		t.Fatal(err)
	}
	n := hops{objects: len(fresh.nexthops.byID)}
	for r := range have.AllRoutes() {
		switch {
		case r.Dst.Addr().Is6() && r.NexthopID != 0:
			t.Errorf("%s uses nexthop object %d", r, r.NexthopID)
		case r.Dst.Addr().Is6():
		case r.NexthopID != 0:
			n.through++
		default:
			n.plain++
		}
	}
	return n
}

// expectInPlace fails the test unless the kernel's state has the effect of want, and its
// routes and objects have the numbers n.
func (w *world) expectInPlace(t *testing.T, what string, want dataplane.State, n hops) {
	t.Helper()
	have, err := w.Read(silentContext(t), dataplanetest.Scope())
	if err != nil {
		t.Fatal(err)
	}
	if ops := dataplane.Plan(have, want, dataplanetest.Scope(), nil, true).Ops; len(ops) > 0 {
		t.Errorf("%s: %d changes remain, the first %s", what, len(ops), ops[0])
	}
	if got := w.hops(t); got != n {
		t.Errorf("%s: %+v, want %+v", what, got, n)
	}
}

// TestKernelNexthopThreshold checks how many routes use nexthop objects while the number of
// routes rises above the threshold and falls below it.
func TestKernelNexthopThreshold(t *testing.T) {
	for name, resync := range map[string]time.Duration{"full reads": 0, "announcements": time.Hour} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			r := dataplanetest.NewReconciler(t, w, resync)
			for _, step := range []struct {
				peers int
				want  hops
			}{
				{100, hops{plain: 100}},
				{400, hops{plain: 100, through: 300, objects: 300}}, // existing routes stay as they are
				{150, hops{plain: 100, through: 50, objects: 50}},
				{50, hops{plain: 50}},
				{nexthopThreshold, hops{plain: 50, through: nexthopThreshold - 50, objects: nexthopThreshold - 50}},
				{0, hops{}},
				{1000, hops{through: 1000, objects: 1000}},
			} {
				want := dataplanetest.Peers(step.peers)
				if _, err := r.Reconcile(silentContext(t), want, true); err != nil {
					t.Fatal(err)
				}
				w.expectInPlace(t, fmt.Sprintf("%d peers", step.peers), dataplanetest.Peers(step.peers), step.want)
			}
		})
	}
}

// TestKernelNexthopsGoWithRoutes checks that nexthop objects are deleted after their routes, if
// this process has created the objects and not read them since.
func TestKernelNexthopsGoWithRoutes(t *testing.T) {
	w := newWorld(t)
	w.nexthops.threshold = 1
	r := dataplanetest.NewReconciler(t, w, time.Hour)
	if _, err := r.Reconcile(silentContext(t), dataplanetest.Base(), true); err != nil {
		t.Fatal(err)
	}
	var puts, deletes []dataplane.Op
	for i := range 5 {
		for _, o := range dataplanetest.Peer(3+i, 0) {
			if route, ok := o.(dataplane.Route); ok && route.Dst.Addr().Is4() {
				puts = append(puts, dataplane.Op{Object: route})
			}
		}
	}
	if failed := w.Apply(silentContext(t), puts); len(failed) > 0 {
		t.Fatal(failed)
	}
	if n := w.hops(t); n != (hops{through: 5, objects: 5}) {
		t.Fatalf("%+v, want 5 routes through as many objects", n)
	}
	for _, op := range puts[:3] {
		deletes = append(deletes, dataplane.Op{Delete: true, Object: op.Object})
	}
	if failed := w.Apply(silentContext(t), deletes); len(failed) > 0 {
		t.Fatal(failed)
	}
	if n := w.hops(t); n != (hops{through: 2, objects: 2}) {
		t.Errorf("%+v, want 2 routes through as many objects", n)
	}
}

// TestKernelNexthopRefused checks that a route that the kernel refuses repeatedly does not count
// as a plain route. Otherwise later routes would use nexthop objects too early.
func TestKernelNexthopRefused(t *testing.T) {
	w := newWorld(t)
	w.nexthops.threshold = 5
	r := dataplanetest.NewReconciler(t, w, time.Hour)
	want := dataplanetest.Base()
	want.Add(dataplane.NewRoute(netip.MustParsePrefix("10.5.9.0/24"), netip.MustParseAddr("192.0.2.1"), "eth0", false))
	if _, err := r.Reconcile(silentContext(t), want, true); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if report, err := r.Update(silentContext(t), nil, nil, true); err != nil || len(report.Refused) != 1 {
			t.Fatalf("refused %v (%v), want one route", report.Refused, err)
		}
	}
	good := dataplane.NewRoute(netip.MustParsePrefix("10.5.8.0/24"), netip.MustParseAddr("192.168.77.8"), "eth0", false)
	if _, err := r.Update(silentContext(t), nil, []dataplane.Object{good}, true); err != nil {
		t.Fatal(err)
	}
	if n := w.hops(t); n != (hops{plain: 1}) {
		t.Errorf("%+v, want one plain route", n)
	}
}

// TestKernelRouteWentWithItsNexthop checks that deleting a route succeeds if its nexthop object does not
// exist. That happens if another program has deleted the object, and with it the route, and the pass does
// not know that yet.
func TestKernelRouteWentWithItsNexthop(t *testing.T) {
	w := newWorld(t)
	for _, dst := range []string{"10.5.8.0/24", "fd00:5:8::/64"} {
		gone := dataplane.NewRoute(netip.MustParsePrefix(dst), netip.Addr{}, "eth0", false)
		gone.NexthopID = nexthopFirst + 1<<19
		if failed := w.Apply(silentContext(t), []dataplane.Op{{Delete: true, Object: gone}}); len(failed) > 0 {
			t.Errorf("delete %s: %v, want no failure", dst, failed)
		}
	}
}

// nexthopCompat sets whether the kernel shows gateway and device of a route through a
// nexthop object, or only the id of the object.
func (w *world) nexthopCompat(t *testing.T, on bool) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/net/ipv4/nexthop_compat_mode", []byte{'0' + map[bool]byte{true: 1}[on]}, 0); err != nil {
		t.Fatal(err)
	}
}

// TestKernelNexthopDrift checks that the Reconciler restores routes through nexthop objects if another
// program deletes a route, or deletes or replaces an object. It must read the kernel once for an object,
// and not at all for a route.
func TestKernelNexthopDrift(t *testing.T) {
	for _, compat := range []bool{true, false} {
		t.Run(fmt.Sprintf("compat mode %t", compat), func(t *testing.T) {
			w := newTrafficWorld(t)
			w.nexthopCompat(t, compat)
			reads := 0
			spy := &dataplanetest.Spy{Kernel: w, ReadError: func() error { reads++; return nil }}
			r := dataplanetest.NewReconciler(t, spy, time.Hour)
			want := dataplanetest.Peers(5)
			if _, err := r.Reconcile(silentContext(t), want, true); err != nil {
				t.Fatal(err)
			}
			gone := dataplane.NewRoute(netip.MustParsePrefix("10.5.3.0/24"), netip.Addr{}, "", false)
			for _, step := range []struct {
				name    string
				reads   int
				objects int
				do      func() error
			}{
				{"a route is deleted", 0, 5, func() error { return w.Remove(gone) }},
				{"an object is deleted", 1, 5, func() error { return w.DeleteNexthop(2) }},
				// The replaced object stays for now: a write deletes it after it was unused for some time.
				{"an object gets another gateway", 1, 6, func() error { return w.ReplaceNexthop(2) }},
			} {
				reads = 0
				if err := step.do(); err != nil {
					t.Fatal(step.name, err)
				}
				select {
				case <-r.Changed():
				case <-time.After(5 * time.Second):
					t.Fatalf("%s: no announcement", step.name)
				}
				if _, err := r.Update(silentContext(t), nil, nil, true); err != nil {
					t.Fatal(step.name, err)
				}
				if reads != step.reads {
					t.Errorf("%s: %d reads, want %d", step.name, reads, step.reads)
				}
				w.expectInPlace(t, step.name, want, hops{through: 5, objects: step.objects})
			}
		})
	}
}

// TestKernelNexthopOfARestoredRoute deletes a route as another program, and puts it again with the same nexthop
// object, as `ip route restore` does. A later write must not delete the object: the kernel would delete the route
// with it, without an announcement.
func TestKernelNexthopOfARestoredRoute(t *testing.T) {
	w := newWorld(t)
	w.nexthops.threshold = 1
	r := dataplanetest.NewReconciler(t, w, time.Hour)
	want := dataplanetest.Peers(5)
	if _, err := r.Reconcile(silentContext(t), want, true); err != nil {
		t.Fatal(err)
	}
	have, err := w.Read(silentContext(t), dataplanetest.Scope())
	if err != nil {
		t.Fatal(err)
	}
	route := have.Routes[netip.MustParsePrefix("10.5.3.0/24")][0]
	index := w.nexthops.byID[route.NexthopID].index
	for _, typ := range []uint16{unix.RTM_DELROUTE, unix.RTM_NEWROUTE} {
		if err := w.request(func(m *message) { encodeRoute(m, typ, unix.NLM_F_CREATE, route, index) }); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Update(silentContext(t), nil, nil, true); err != nil {
		t.Fatal(err)
	}

	more := dataplanetest.Peers(6)
	if _, err := r.Reconcile(silentContext(t), more, true); err != nil {
		t.Fatal(err)
	}
	w.expectInPlace(t, "after the restored route, and another peer", dataplanetest.Peers(6), hops{through: 6, objects: 6})
}

// nexthopObject creates a nexthop object as another program, on the device with the given index.
func (w *world) nexthopObject(id uint32, protocol uint8, gateway string, index int) error {
	return w.request(func(m *message) {
		m.begin(unix.RTM_NEWNEXTHOP, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nhmsg(unix.AF_INET, protocol, unix.RTNH_F_ONLINK)...)
		m.attr32(unix.NHA_ID, id)
		m.attr32(unix.NHA_OIF, uint32(index))
		m.addr(unix.NHA_GATEWAY, netip.MustParseAddr(gateway))
	})
}

func (w *world) deleteNexthop(id uint32) error {
	return w.request(func(m *message) {
		m.begin(unix.RTM_DELNEXTHOP, 0, nhmsg(unix.AF_UNSPEC, 0, 0)...)
		m.attr32(unix.NHA_ID, id)
	})
}

// TestKernelNexthopsOfOthers checks that ids that another program uses are skipped, that objects
// that a killed process has left behind are deleted, and that routes are restored if another
// program deletes their objects.
func TestKernelNexthopsOfOthers(t *testing.T) {
	w := newWorld(t)
	w.nexthops.linger = 0
	r := dataplanetest.NewReconciler(t, w, time.Hour)
	if _, err := r.Reconcile(silentContext(t), dataplanetest.Base(), true); err != nil {
		t.Fatal(err)
	}
	index, err := w.index("flannel.1")
	if err != nil {
		t.Fatal(err)
	}
	const foreign, left = nexthopFirst + 7, nexthopFirst + 1<<19
	if err := w.nexthopObject(foreign, unix.RTPROT_STATIC, "172.30.0.1", index); err != nil {
		t.Fatal(err)
	}
	if err := w.nexthopObject(left, dataplane.Protocol, "172.30.0.2", index); err != nil {
		t.Fatal(err)
	}

	// A new process does not know the objects.
	fresh := dataplanetest.NewReconciler(t, w, time.Hour)
	if _, err := fresh.Reconcile(silentContext(t), dataplanetest.Peers(300), true); err != nil {
		t.Fatal(err)
	}
	w.expectInPlace(t, "ids in use by another program", dataplanetest.Peers(300), hops{through: 300, objects: 300})
	if err := w.nexthopObject(foreign, unix.RTPROT_STATIC, "172.30.0.1", index); err == nil {
		t.Error("the object of another program was deleted")
	}

	have, err := w.Read(silentContext(t), dataplanetest.Scope())
	if err != nil {
		t.Fatal(err)
	}
	deleted := 0
	for route := range have.AllRoutes() {
		if route.NexthopID != 0 && deleted < 10 {
			if err := w.deleteNexthop(route.NexthopID); err != nil {
				t.Fatal(err)
			}
			deleted++
		}
	}
	select {
	case <-fresh.Changed():
	case <-time.After(5 * time.Second):
		t.Fatal("deleted nexthop objects were not announced")
	}
	report, err := fresh.Update(silentContext(t), nil, nil, true)
	if err != nil || report.Puts != deleted {
		t.Errorf("%d puts (%v) after %d objects were deleted", report.Puts, err, deleted)
	}
	// Ten routes are too few to use objects.
	w.expectInPlace(t, "after deletions", dataplanetest.Peers(300), hops{plain: 10, through: 290, objects: 290})
}

// TestKernelWithoutNexthopObjects checks that all routes are plain if nexthop objects are
// off, as they are without Options.NexthopObjects or on a kernel that does not support
// them.
func TestKernelWithoutNexthopObjects(t *testing.T) {
	w := newWorld(t)
	w.nexthops.enabled = false
	r := dataplanetest.NewReconciler(t, w, time.Hour)
	if _, err := r.Reconcile(silentContext(t), dataplanetest.Peers(400), true); err != nil {
		t.Fatal(err)
	}
	w.expectInPlace(t, "400 peers", dataplanetest.Peers(400), hops{plain: 400})
}

// TestKernelNexthopLeftOver checks that an object is deleted if its process died before
// it created the route. It is kept for some time first, because its creator may be about
// to use it.
func TestKernelNexthopLeftOver(t *testing.T) {
	w := newWorld(t)
	w.nexthops.threshold = 1
	n := underlayNetwork{w.Kernel, 30}
	eth0, err := w.index("eth0")
	if err != nil {
		t.Fatal(err)
	}
	const left = nexthopFirst + 1<<19
	if err := w.nexthopObject(left, dataplane.Protocol, "192.168.77.99", eth0); err != nil {
		t.Fatal(err)
	}
	for i, age := range []time.Duration{0, nexthopLinger / 2, nexthopLinger} {
		for _, o := range w.nexthops.byID {
			o.unused = time.Now().Add(-age)
		}
		if _, err := n.Read(silentContext(t), n.scope()); err != nil {
			t.Fatal(err)
		}
		n.apply(t, puts(n.routes(i))...)
		if _, err := n.Read(silentContext(t), n.scope()); err != nil {
			t.Fatal(err)
		}
		if _, there := w.nexthops.byID[left]; there != (age < nexthopLinger) {
			t.Errorf("object unused for %s: exists %t", age, there)
		}
	}
}

// TestKernelPlainRoutes checks which routes use no nexthop object, even if there are many routes: those
// that must be plain, have an MTU or no gateway, and those of IPv6.
func TestKernelPlainRoutes(t *testing.T) {
	w := newWorld(t)
	w.nexthops.threshold = 1
	dst := netip.MustParsePrefix("10.5.3.0/24")
	route := dataplane.NewRoute(dst, netip.MustParseAddr("192.168.77.9"), "eth0", false)
	short := route
	short.MTU = 1300
	for name, tc := range map[string]struct {
		route   dataplane.Route
		through bool
	}{
		"ordinary":   {route, true},
		"plain":      {route.AsPlain(), false},
		"own MTU":    {short, false},
		"no gateway": {dataplane.NewRoute(dst, netip.Addr{}, "eth0", false), false},
		"IPv6":       {dataplane.NewRoute(netip.MustParsePrefix("fd00:10:5:3::/64"), netip.MustParseAddr("fd00:77::9"), "eth0", false), false},
	} {
		ops := []dataplane.Op{{Object: tc.route}}
		if failed := w.Apply(silentContext(t), ops); len(failed) > 0 {
			t.Fatal(failed[0])
		}
		if id := ops[0].Object.(dataplane.Route).NexthopID; (id != 0) != tc.through {
			t.Errorf("%s: the route uses the nexthop object %d, want one: %t", name, id, tc.through)
		}
		if failed := w.Apply(silentContext(t), []dataplane.Op{{Object: ops[0].Object, Delete: true}}); len(failed) > 0 {
			t.Fatal(failed[0])
		}
	}
}
