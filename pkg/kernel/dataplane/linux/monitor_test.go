// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// TestKernelBusyBridge checks that pods that come and go do not cause a full read, even if
// there are routes to them in the scope's networks. A bridge that goes down, or loses or
// gets its carrier, must cause one.
func TestKernelBusyBridge(t *testing.T) {
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
	// A bridge without ports has no carrier.
	port := dataplane.Link{Name: "eth1", Kind: "veth", Up: true}
	bridge, pod := dataplane.Link{Name: "cni0", Kind: "bridge", Up: true}, dataplane.Link{Name: "pod0", Kind: "bridge", Up: true}
	toPod := dataplane.NewRoute(netip.MustParsePrefix("10.5.1.7/32"), netip.Addr{}, "pod0", false)
	toPod.Protocol = 3
	err = w.Append(bridge, dataplane.Addr{Dev: "cni0", Prefix: netip.MustParsePrefix("10.5.1.1/24")}, pod, toPod)
	if err != nil {
		t.Fatal(err)
	}
	cni0, err := w.links.LinkByName("cni0")
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Append(port); err != nil {
		t.Fatal(err)
	}
	eth1, err := w.links.LinkByName("eth1")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.links.LinkSetMaster(eth1, cni0), w.awaitCarrier("cni0", true)); err != nil {
		t.Fatal(err)
	}
	expect := func(what string, want bool, change func() error) {
		t.Helper()
		expectLost(t, m, what, want, change)
	}
	for _, how := range []string{"announced", "read"} {
		expect(how+": a pod is deleted", false, func() error { return w.Remove(pod) })
		expect(how+": a bridge changes", false, func() error { return w.links.LinkSetMTU(cni0, 1400) })
		expect(how+": a bridge changes", false, func() error { return w.links.LinkSetMTU(cni0, 1450) })
		expect(how+": a bridge goes down", true, func() error { return w.SetUp("cni0", false) })
		expect(how+": a bridge that is down changes", false, func() error { return w.links.LinkSetMTU(cni0, 1300) })
		if err := errors.Join(w.SetUp("cni0", true), w.awaitCarrier("cni0", true)); err != nil {
			t.Fatal(err)
		}
		for _, on := range []bool{false, true} {
			expect(fmt.Sprintf("%s: a bridge has a carrier: %t", how, on), true, func() error {
				return errors.Join(w.SetCarrier("eth1", on), w.awaitCarrier("cni0", on))
			})
		}
		if err := w.Append(pod, toPod); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Read(silentContext(t), dataplanetest.Scope()); err != nil {
			t.Fatal(err)
		}
	}
}

// expectLost calls change, and fails the test unless the next Drain returns want as lost.
func expectLost(t *testing.T, m listener, what string, want bool, change func() error) {
	t.Helper()
	m.Drain()
	if err := change(); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	select {
	case <-m.changed:
	case <-time.After(5 * time.Second):
		t.Fatalf("%s: no announcement", what)
	}
	if _, _, lost := m.Drain(); lost != want {
		t.Errorf("%s: lost %t, want %t", what, lost, want)
	}
}

// TestKernelEveryAnnouncementWithoutCarrier checks that each announcement of a device that is up
// and has no carrier invalidates the cache, even one that equals the last: see lacksCarrier.
func TestKernelEveryAnnouncementWithoutCarrier(t *testing.T) {
	w := newWorld(t)
	err := w.Append(dataplane.Link{Name: "eth1", Kind: "veth", Up: true},
		dataplane.Addr{Dev: "eth1", Prefix: netip.MustParsePrefix("192.168.88.1/24")})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.awaitUp("eth1"); err != nil {
		t.Fatal(err)
	}
	scope := dataplanetest.Scope()
	scope.Shared = []string{"eth0"} // eth1 is not in the scope, but a route uses it

	want := dataplanetest.Base()
	want.Add(dataplane.NewRoute(netip.MustParsePrefix("10.5.3.0/24"), netip.MustParseAddr("192.168.88.9"), "eth1", false))
	if _, err := dataplanetest.NewReconciler(t, w, 0).Reconcile(silentContext(t), want, true); err != nil {
		t.Fatal(err)
	}
	m, err := w.listen(scope)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()

	for _, dev := range []string{"eth0", "eth1"} {
		link, err := w.links.LinkByName(dev)
		if err != nil {
			t.Fatal(err)
		}
		alias := 0
		same := func() error { // an announcement that differs from the last only in what does not matter
			alias++
			return w.links.LinkSetAlias(link, fmt.Sprintf("alias %d", alias))
		}

		expectLost(t, m, dev+" loses its carrier", true, func() error { return w.SetCarrier(dev, false) })
		for range 2 {
			expectLost(t, m, dev+" is announced without a carrier again", true, same)
		}
		expectLost(t, m, dev+" has a carrier again", true, func() error { return w.SetCarrier(dev, true) })
		expectLost(t, m, dev+" is announced with a carrier again", false, same)
	}
}

// TestKernelLinkDetails checks that changes that matter for a scope's device are
// reported, and that other changes do not cause a full read, which may return a million
// routes.
func TestKernelLinkDetails(t *testing.T) {
	w := newWorld(t)
	r := dataplanetest.NewReconciler(t, w, 0)
	if _, err := r.Reconcile(silentContext(t), dataplanetest.Base(), true); err != nil {
		t.Fatal(err)
	}
	scope := dataplanetest.Scope()
	m, err := w.listen(scope)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	dev := scope.Devices[0]
	link, err := w.links.LinkByName(dev)
	if err != nil {
		t.Fatal(err)
	}
	changes := []struct {
		what string
		up   bool // whether the device is up: the kernel does not announce every change of one that is down
		do   func() error
	}{
		{"MTU", true, func() error { return w.links.LinkSetMTU(link, 1300) }},
		{"MAC", true, func() error { return w.links.LinkSetHardwareAddr(link, net.HardwareAddr{2, 0, 0, 0, 0, 77}) }},
		{"vxlan", true, func() error {
			have := dataplane.VXLAN{Underlay: "eth0"}
			want := have
			want.Learning = true
			return w.changeVXLAN(silentContext(t), link.Attrs().Index, have, want)
		}},
		{"checksum offload", true, func() error { return w.setTxChecksum(dev, dataplane.OffloadOff) }},
		{"down", true, func() error { return w.SetUp(dev, false) }},
		{"name", false, func() error { return w.links.LinkSetName(link, "other") }},
		{"name again", false, func() error { return w.links.LinkSetName(link, dev) }},
		{"up", false, func() error { return w.SetUp(dev, true) }},
	}
	alias := 0
	other := func() error { alias++; return w.links.LinkSetAlias(link, fmt.Sprintf("alias %d", alias)) }
	expectLost(t, m, "the first announcement", true, other)
	for _, c := range changes {
		if c.up {
			expectLost(t, m, "another alias before "+c.what, false, other)
		}
		expectLost(t, m, c.what, true, c.do)
	}

	// The monitor misses that the device is up again. So the announcement that it is down must
	// count, although the last one that the monitor has received was equal.
	if err := w.SetUp(dev, false); err != nil {
		t.Fatal(err)
	}
	m.missed(t, func() {
		if err := errors.Join(other(), other(), other(), w.SetUp(dev, true)); err != nil {
			t.Fatal(err)
		}
	})
	expectLost(t, m, "down again", true, func() error { return w.SetUp(dev, false) })
}

// TestKernelSharedBridge checks that the timers of a bridge cause no full read: each announcement of the
// bridge contains them with other values. A change of its flags must still cause one.
func TestKernelSharedBridge(t *testing.T) {
	w := newWorld(t)
	const dev = "br0"
	if err := w.Append(dataplane.Link{Name: dev, Kind: "bridge", Up: true}); err != nil {
		t.Fatal(err)
	}
	link, err := w.links.LinkByName(dev)
	if err != nil {
		t.Fatal(err)
	}
	m, err := w.listen(dataplane.Scope{Shared: []string{dev}, Networks: dataplanetest.Scope().Networks})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	alias := 0
	other := func() error { alias++; return w.links.LinkSetAlias(link, fmt.Sprintf("alias %d", alias)) }
	expectLost(t, m, "the first announcement", true, other)
	tick := time.NewTicker(20 * time.Millisecond) // the timers count hundredths of a second
	defer tick.Stop()
	for range 3 {
		<-tick.C
		expectLost(t, m, "another alias", false, other)
	}
	expectLost(t, m, "down", true, func() error { return w.SetUp(dev, false) })
}

// TestKernelOneFamily checks that the monitor of a scope with networks of one family announces the routes
// of this family.
func TestKernelOneFamily(t *testing.T) {
	w := newWorld(t)
	if _, err := dataplanetest.NewReconciler(t, w, 0).Reconcile(silentContext(t), dataplanetest.Base(), true); err != nil {
		t.Fatal(err)
	}
	all := dataplanetest.Scope()
	for i := range all.Networks {
		scope := dataplane.Scope{Devices: all.Devices[i : i+1], Networks: all.Networks[i : i+1]}
		m, err := w.listen(scope)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		m.Drain()
		route := dataplanetest.Peer(3, 0)[2+3*i]
		if err := w.Append(route); err != nil {
			t.Fatal(err)
		}
		if events, _, _ := m.Drain(); !slices.ContainsFunc(events, func(e dataplane.Event) bool { return e.Object == route }) {
			t.Errorf("%s was not announced, only %v", route, events)
		}
	}
}

// TestDecode checks what decode reports about the messages of a datagram, in their order: whether they may
// affect OnLink, and whether one is malformed or a change that no event describes.
func TestDecode(t *testing.T) {
	message := func(typ uint16, length int, payload ...byte) []byte {
		b := binary.NativeEndian.AppendUint32(nil, uint32(length))
		b = binary.NativeEndian.AppendUint16(b, typ)
		return append(append(b, make([]byte, unix.NLMSG_HDRLEN-len(b))...), payload...)
	}
	neigh := message(unix.RTM_NEWNEIGH, unix.NLMSG_HDRLEN)
	gone := message(unix.RTM_DELNEIGH, unix.NLMSG_HDRLEN)
	link := message(unix.RTM_NEWLINK, unix.NLMSG_HDRLEN)
	body := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(body[4:], 7)
	deleted := message(unix.RTM_DELLINK, unix.NLMSG_HDRLEN+len(body), body...)
	for name, tc := range map[string]struct {
		datagram       []byte
		rerouted, lost bool
	}{
		"nothing":                         {nil, false, false},
		"neighbours":                      {slices.Concat(neigh, gone), false, false},
		"a link without content":          {link, true, false},
		"a link before a neighbour":       {slices.Concat(link, neigh), true, false},
		"a deleted device":                {deleted, true, true},
		"a deleted device before another": {slices.Concat(deleted, link), true, true},
		"a length that is too small":      {message(unix.RTM_NEWNEIGH, unix.NLMSG_HDRLEN-1), true, true},
		"a length that is too large":      {message(unix.RTM_NEWNEIGH, unix.NLMSG_HDRLEN+1), true, true},
	} {
		t.Run(name, func(t *testing.T) {
			m := &monitor{names: map[int]string{7: "flannel.1"}, others: map[int]string{}, links: map[int]linkDetails{}}
			var events []dataplane.Event
			rerouted, lost := m.decode(tc.datagram, &events)
			if rerouted != tc.rerouted || lost != tc.lost || len(events) > 0 {
				t.Errorf("rerouted %t, lost %t, events %v; want %t, %t and none", rerouted, lost, events, tc.rerouted, tc.lost)
			}
		})
	}
}
