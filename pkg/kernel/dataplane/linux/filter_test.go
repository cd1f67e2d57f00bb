// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	mdlayher "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// TestKernelFilter checks that the monitor ignores own changes of routes and their nexthop
// objects, neighbours that this process creates, and neighbours on devices of other programs.
// The monitor must receive routes and neighbours of another program on the scope's devices,
// also on a device that was created again.
func TestKernelFilter(t *testing.T) {
	w := newWorld(t)
	r := dataplanetest.NewReconciler(t, w, 0)
	if _, err := r.Reconcile(silentContext(t), dataplanetest.Base(), true); err != nil {
		t.Fatal(err)
	}
	m, err := w.listen(dataplanetest.Scope())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	m.Drain()

	var routes, neighs []dataplane.Object
	for i := range 20 {
		for _, o := range dataplanetest.Peer(i+3, 0) {
			switch o.(type) {
			case dataplane.Route:
				routes = append(routes, o)
			case dataplane.Neigh:
				neighs = append(neighs, o)
			}
		}
	}
	ops := func(objects []dataplane.Object, del bool) (ops []dataplane.Op) {
		for _, o := range objects {
			ops = append(ops, dataplane.Op{Object: o, Delete: del})
		}
		return ops
	}
	announced := func() int {
		events, _, lost := m.Drain()
		if lost {
			t.Error("announcements were lost")
		}
		return len(events)
	}
	expectNoWake := func(what string) {
		t.Helper()
		select {
		case <-m.changed:
			t.Errorf("%s wake the monitor, want them filtered out", what)
		case <-time.After(100 * time.Millisecond):
		}
	}
	for quiet := false; !quiet; { // a wake-up may remain from drained announcements
		select {
		case <-m.changed:
			m.Drain()
		case <-time.After(100 * time.Millisecond):
			quiet = true
		}
	}
	w.nexthops.threshold = 1
	through := ops(routes, false)
	for range 2 {
		if failed := w.Apply(silentContext(t), through); len(failed) > 0 {
			t.Fatal(failed)
		}
		expectNoWake("own routes through nexthop objects")
		for i := range through {
			through[i].Delete = true
		}
	}
	w.nexthops.threshold = nexthopThreshold
	// The kernel does not set a port when a neighbour is deleted, so the last batch may be announced.
	for i, own := range [][]dataplane.Op{ops(neighs, false), ops(routes, false), ops(routes, true), ops(neighs, true)} {
		if failed := w.Apply(silentContext(t), own); len(failed) > 0 {
			t.Fatal(failed)
		}
		if n := announced(); n != 0 && i < 3 {
			t.Errorf("%d of %d own changes such as %s are announced, want none", n, len(own), own[0])
		}
	}
	for quiet := false; !quiet; { // a wake-up may remain from drained announcements
		select {
		case <-m.changed:
			m.Drain()
		case <-time.After(100 * time.Millisecond):
			quiet = true
		}
	}
	peer, err := w.index("peer0")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		err := w.request(func(m *message) {
			m.begin(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, ndmsg(unix.AF_INET, peer, unix.NUD_REACHABLE, 0)...)
			m.addr(unix.NDA_DST, netip.AddrFrom4([4]byte{10, 5, 99, byte(i)}))
			m.attr(unix.NDA_LLADDR, []byte{2, 0, 0, 0, 0, byte(i)})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	expectNoWake("neighbours of another device")
	for _, o := range append(neighs[:2:2], routes[:2]...) {
		if err := w.Append(o); err != nil {
			t.Fatal(err)
		}
		select {
		case <-m.changed:
		case <-time.After(5 * time.Second):
			t.Fatalf("%s of another program does not wake the monitor", o)
		}
		if n := announced(); n != 1 {
			t.Errorf("%d events for %s of another program, want 1", n, o)
		}
	}

	// The first entry on a device that was created again must be announced.
	if err := w.links.LinkDel(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Name: neighs[0].(dataplane.Neigh).Dev}}); err != nil {
		t.Fatal(err)
	}
	m.Drain()
	if _, err := r.Reconcile(silentContext(t), dataplanetest.Base(), true); err != nil {
		t.Fatal(err)
	}
	m.Drain()
	if err := w.Append(neighs[0]); err != nil {
		t.Fatal(err)
	}
	if n := announced(); n != 1 {
		t.Errorf("%d events for a neighbour on the new device, want 1", n)
	}
}

// TestFilterOfManyDevices checks that a filter is removed when there are more devices than it can compare.
// Otherwise it would drop the announcements of the new devices.
func TestFilterOfManyDevices(t *testing.T) {
	conn, err := mdlayher.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	many := make([]int, maxFiltered+1)
	for range 2 {
		for _, devices := range [][]int{many[1:], many} {
			if err := filter(conn, 1, devices); err != nil {
				t.Fatalf("%d devices: %v", len(devices), err)
			}
		}
		if err := conn.RemoveBPF(); !errors.Is(err, unix.ENOENT) {
			t.Errorf("removing the filter returned %v, want ENOENT, because there is none", err)
		}
	}
}
