// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

func linkCases() []contractCase {
	cases := []contractCase{
		{"devices change in place", changeInPlace},
		{"a new MAC", changeMAC},
		{"devices of another flannel daemon are adopted", adoptDevices},
		{"a device without underlay and address is completed", completeDevice},
		{"checksum offload", checksumOffload},
		{"a second device with the same VNI is refused", sameVNI},
		{"a link goes down", linkDown},
		{"a link is deleted", linkGone},
	}

	for name, change := range incompatible() {
		cases = append(cases, contractCase{"replaced for its " + name, func(f *fixture) { replaceDevice(f, change) }})
	}
	return cases
}

func changeInPlace(f *fixture) {
	want := dataplanetest.Peers(5)
	f.put(objectsOf(want)...)
	for dev, local := range map[string]string{dev4: "192.168.77.2", dev6: "fd00:77::2"} {
		for _, change := range []func(*dataplane.Link){
			func(l *dataplane.Link) { l.MTU = 1300 },
			func(l *dataplane.Link) { l.VXLAN.Local = netip.MustParseAddr(local) },
			func(l *dataplane.Link) { l.VXLAN.Learning = true },
			func(l *dataplane.Link) { l.VXLAN.Learning, l.MTU = false, 1400 },
		} {
			l := want.Links[dev]
			change(&l)
			want.Add(l)
			f.put(l)
			f.expect(want) // all objects on the device are still there
		}
	}
}

// changeMAC checks that the Reconciler changes the MAC of a device, and then puts only the
// neighbours of the device again, because the kernel has deleted them.
func changeMAC(f *fixture) {
	want := dataplanetest.Peers(5)
	f.reconcile(want, true)
	for _, dev := range dataplanetest.Scope().Devices {
		l := want.Links[dev]
		l.MAC[5]++
		want.Add(l)
	}

	f.spy.Take()
	f.reconcile(want, true)
	f.expect(want)
	for _, op := range f.spy.Take() {
		switch op.Object.(type) {
		case dataplane.Link, dataplane.Neigh:
		default:
			f.Errorf("%s, want changes of neighbours only", op)
		}
	}
}

// adoptDevices checks that the Reconciler leaves correct objects alone, even if another
// program has created them.
func adoptDevices(f *fixture) {
	want := dataplanetest.Peers(5)
	for _, o := range objectsOf(want) {
		if r, ok := o.(dataplane.Route); ok {
			r.Protocol = protoBoot
			o = r
		}
		f.must(f.Append(o))
	}

	f.reconcile(want, false)
	f.reconcile(want, true)
	f.expectUntouched()
	f.reconcile(dataplanetest.Base(), true)
	f.expect(dataplanetest.Base())
}

func completeDevice(f *fixture) {
	want := dataplanetest.Base()
	l := want.Links[dev4]
	l.VXLAN.Local = netip.Addr{}
	l.VXLAN.Underlay = ""
	l.Up = false
	f.must(f.Append(l))
	f.reconcile(want, true)
	f.expect(want)
	f.expectPuts()
}

// checksumOffload checks that a device gets the checksum offload of the wanted link. If the wanted
// link has OffloadAuto, the device keeps its setting.
func checksumOffload(f *fixture) {
	offload := func(want dataplane.Offload) {
		f.Helper()
		scope := dataplanetest.Scope()
		scope.TxChecksum = true
		s, err := f.Read(f.Context(), scope)
		f.must(err)
		for _, dev := range scope.Devices {
			if got := s.Links[dev].TxChecksum; got != want {
				f.Errorf("checksum offload of %s is %d, want %d", dev, got, want)
			}
		}
	}

	put := func(o dataplane.Offload) {
		want := dataplanetest.Base()
		for _, dev := range dataplanetest.Scope().Devices {
			l := want.Links[dev]
			l.TxChecksum = o
			f.put(l)
		}
		f.expect(linksOf(want))
	}

	put(dataplane.OffloadAuto)
	offload(dataplane.OffloadOn) // the default of a vxlan device
	put(dataplane.OffloadOff)
	offload(dataplane.OffloadOff)
	put(dataplane.OffloadAuto)
	offload(dataplane.OffloadOff)
	put(dataplane.OffloadOn)
	offload(dataplane.OffloadOn)
	for _, dev := range dataplanetest.Scope().Devices {
		f.must(f.Remove(dataplanetest.Base().Links[dev]))
	}
	put(dataplane.OffloadOff)
	offload(dataplane.OffloadOff)
}

func linksOf(s dataplane.State) dataplane.State {
	links := dataplane.NewState()
	links.Links = s.Links
	return links
}

func sameVNI(f *fixture) {
	other := dataplanetest.Base().Links[dev4]
	other.Name = "vxlan0"
	f.must(f.Append(other))
	if failed := f.Apply(f.Context(), []dataplane.Op{{Object: dataplanetest.Base().Links[dev4]}}); len(failed) != 1 {
		f.Errorf("failures %v, want one", failed)
	}
	f.expect(dataplane.NewState())
}

func linkDown(f *fixture) {
	want := dataplanetest.Peers(5)
	f.reconcile(want, true)
	for _, dev := range dataplanetest.Scope().Devices {
		f.must(f.SetUp(dev, false))
	}

	have := f.read()
	for r := range have.AllRoutes() {
		f.Errorf("%s survived its link", r)
	}
	if len(have.Neighs) > 0 || len(have.FDB) != len(want.FDB) {
		f.Errorf("%d neighbours and %d FDB entries, want 0 and %d", len(have.Neighs), len(have.FDB), len(want.FDB))
	}
	if _, ok := have.Addrs[dataplane.Addr{Dev: dev6, Prefix: prefix.Host(subnet6(1).Addr())}]; ok || len(have.Addrs) != 1 {
		f.Errorf("addresses %v, want only the IPv4 one", have.Addrs)
	}
	f.reconcile(want, false)
	f.expect(want)
}

func linkGone(f *fixture) {
	want := dataplanetest.Peers(5)
	f.reconcile(want, true)
	for _, dev := range dataplanetest.Scope().Devices {
		f.must(f.Remove(want.Links[dev]))
	}
	f.expect(dataplane.NewState())
	f.reconcile(want, false)
	f.expect(want)
	f.must(f.Remove(want.Links[dev6]))
	f.reconcile(want, false)
	f.expect(want)
}

// incompatible returns changes of a device that require its replacement, by the name of the
// attribute.
func incompatible() map[string]func(*dataplane.Link) {
	return map[string]func(*dataplane.Link){
		"VNI":     func(l *dataplane.Link) { l.VXLAN.VNI = 7 },
		"port":    func(l *dataplane.Link) { l.VXLAN.Port = 4789 },
		"GBP":     func(l *dataplane.Link) { l.VXLAN.GBP = true },
		"foreign": func(l *dataplane.Link) { l.VXLAN.Foreign = true },
		"family":  func(l *dataplane.Link) { l.VXLAN.Local, l.MTU = otherFamily(l.VXLAN.Local), 1400 },
		"kind":    func(l *dataplane.Link) { l.Kind, l.VXLAN = "bridge", dataplane.VXLAN{} },
	}
}

func otherFamily(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.MustParseAddr("fd00:77::1")
	}
	return netip.MustParseAddr("192.168.77.1")
}

func replaceDevice(f *fixture, change func(*dataplane.Link)) {
	want := dataplanetest.Peers(3)
	for _, dev := range dataplanetest.Scope().Devices {
		l := want.Links[dev]
		change(&l)
		f.must(f.Append(l, dataplane.Addr{Dev: dev, Prefix: netip.MustParsePrefix("172.30.0.1/24")}))
		if failed := f.Apply(f.Context(), []dataplane.Op{{Object: want.Links[dev]}}); len(failed) != 1 {
			f.Errorf("changing it to %s: failures %v, want one", dev, failed)
		}
		if diff := diffLinks(l, f.read().Links[dev]); diff != "" {
			f.Errorf("after a failed put (-want +have):\n%s", diff)
		}

		f.reconcile(state(dataplane.NewState(), want.Links[dev]), false)
		if diff := diffLinks(want.Links[dev], f.read().Links[dev]); diff != "" {
			f.Errorf("after a pass (-want +have):\n%s", diff)
		}

		// The loop replaces a changed device by the wanted one. The part after the loop
		// replaces the wanted device by a changed one, with peers on it.
		f.must(f.Remove(l))
	}

	f.reconcile(want, true)
	for _, dev := range dataplanetest.Scope().Devices {
		l := want.Links[dev]
		change(&l)
		if l.Kind == "vxlan" && !l.VXLAN.Foreign && l.VXLAN.Local == want.Links[dev].VXLAN.Local {
			want.Add(l)
		}
	}
	f.reconcile(want, false)
	f.expect(want)
}
