// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

func retireCases() []contractCase {
	return []contractCase{
		{"retire a device", retireDevice},
		{"retire everything", retireAll},
		{"retire devices in favour of direct routes", retireForDirect},
		{"retire a network on devices that stay", retireNetwork},
		{"retire direct routes", retireDirect},
		{"retire nothing that is present", retireNothing},
	}
}

// retire calls Retire twice. The first call must return the number in want, and the second
// call 0.
func (f *fixture) retire(former, present dataplane.Scope, want int) {
	f.Helper()
	for _, want := range []int{want, 0} {
		removed, err := dataplane.Retire(f.Context(), f.subject, former, present)
		if err != nil || removed != want {
			f.Errorf("retired %d objects (%v), want %d", removed, err, want)
		}
	}
}

// reconcileIn makes a Reconciler of another scope put the wanted state.
func (f *fixture) reconcileIn(scope dataplane.Scope, want dataplane.State) {
	f.Helper()
	r, err := dataplane.NewReconciler(dataplane.Config{Kernel: f.subject, Scope: scope})
	f.must(err)
	defer r.Close()
	_, err = r.Reconcile(f.Context(), want, true)
	f.must(err)
}

// otherNetwork returns a scope like dataplanetest.Scope() and a state like dataplanetest.Peers(n), but with two other
// devices that have VNI 7.
func otherNetwork(n int) (dataplane.Scope, dataplane.State) {
	scope := dataplanetest.Scope()
	s := dataplane.NewState()
	scope.Devices = []string{"flannel.7", "flannel-v6.7"}
	names := map[string]string{dev4: scope.Devices[0], dev6: scope.Devices[1]}
	for _, o := range objectsOf(dataplanetest.Peers(n)) {
		switch o := o.(type) {
		case dataplane.Link:
			o.Name = names[o.Name]
			o.VXLAN.VNI = 7
			s.Add(o)

		case dataplane.Addr:
			o.Dev = names[o.Dev]
			s.Add(o)
		case dataplane.Neigh:
			o.Dev = names[o.Dev]
			s.Add(o)

		case dataplane.FDB:
			o.Dev = names[o.Dev]
			s.Add(o)
		case dataplane.Route:
			o.Dev = names[o.Dev]
			s.Add(o)
		}
	}
	return scope, s
}

func retireDevice(f *fixture) {
	f.reconcile(dataplanetest.Peers(3), true)
	scope, want := otherNetwork(2)
	f.reconcileIn(scope, want)
	f.retire(dataplanetest.Scope(), scope, 2)
	have := f.readAll()
	if len(have.Links) > 0 {
		f.Errorf("%v still exist", have.Links)
	}

	for _, o := range objectsOf(want) {
		if r, ok := o.(dataplane.Route); ok && !f.has(r) {
			f.Errorf("%s was deleted", r)
		}
	}
}

// retireAll checks that Retire deletes only the devices of a network that is not used any more, because
// the objects on them go with them.
func retireAll(f *fixture) {
	f.reconcile(dataplanetest.Peers(3), true)
	f.retire(dataplanetest.Scope(), dataplane.Scope{}, 2)
	f.expect(dataplane.NewState())
}

func retireForDirect(f *fixture) {
	f.reconcile(dataplanetest.Peers(3), true)
	want := dataplane.NewState()
	for _, r := range directRoutes(2, 9) {
		want.Add(r)
	}
	present := dataplane.Scope{Networks: dataplanetest.Scope().Networks, Shared: []string{"eth0"}}
	f.reconcileIn(present, want)
	f.retire(dataplanetest.Scope(), present, 2)
	f.expect(want)
}

func retireNetwork(f *fixture) {
	f.reconcile(dataplanetest.Peers(3), true)
	present := dataplane.Scope{Devices: dataplanetest.Scope().Devices, Networks: []netip.Prefix{
		netip.MustParsePrefix("172.30.0.0/16"), netip.MustParsePrefix("fd00:11::/32")}}
	kept := []dataplane.Object{
		dataplane.Addr{Dev: dev4, Prefix: netip.MustParsePrefix("172.30.1.0/32")},
		dataplane.Addr{Dev: dev6, Prefix: netip.MustParsePrefix("fd00:11::/128")},
		dataplane.NewRoute(netip.MustParsePrefix("172.30.2.0/24"), netip.MustParseAddr("172.30.2.0"), dev4, true),
	}

	f.put(kept...)
	mac := dataplane.MAC{2, 7}
	f.put(dataplane.FDB{FDBKey: dataplane.FDBKey{Dev: dev4, MAC: mac}, Dst: netip.MustParseAddr("198.18.0.1")})
	// FDB entries do not depend on networks, so they belong to the scope of present and
	// stay. Two addresses and four objects of each peer go.
	f.retire(dataplanetest.Scope(), present, 2+3*4)
	have, err := f.Read(f.Context(), dataplane.Scope{Devices: dataplanetest.Scope().Devices, Networks: append(dataplanetest.Scope().Networks, present.Networks...)})
	f.must(err)
	for r := range have.AllRoutes() {
		if r.Protocol == protoKernel {
			have.Remove(r)
		}
	}

	want := state(dataplane.NewState(), kept...)
	for _, o := range objectsOf(dataplanetest.Peers(3)) {
		switch o.(type) {
		case dataplane.Link, dataplane.FDB:
			want.Add(o)
		}
	}

	want.Add(dataplane.FDB{FDBKey: dataplane.FDBKey{Dev: dev4, MAC: mac}, Dst: netip.MustParseAddr("198.18.0.1")})
	if diff := diffStates(want, have); diff != "" {
		f.Errorf("kernel state (-want +have):\n%s", diff)
	}
}

func retireDirect(f *fixture) {
	ours := directRoutes(2, 9)
	theirs := ofOther(protoBoot, directRoutes(3, 9))
	outside := directRoutes(4, 9)
	outside[0].Dst = netip.MustParsePrefix("172.30.0.0/16")
	outside[1].Dst = netip.MustParsePrefix("fd00:11::/48")
	f.must(f.Append(append(objects(ours), append(objects(theirs), objects(outside)...)...)...))
	f.retire(dataplane.Scope{Networks: dataplanetest.Scope().Networks, Shared: []string{"eth0"}}, dataplane.Scope{}, 2)
	if !f.has(theirs...) || !f.has(outside...) || f.has(ours[:1]...) || f.has(ours[1:]...) {
		f.Errorf("routes are %v, want only ours deleted", f.readAll().Routes)
	}
}

// retireNothing checks that Retire removes nothing in the scope of present. It must also
// keep a device with the name of a former one that flanneld did not create, but not the
// addresses and neighbours of the former network on it. Covers must tell such scopes apart.
func retireNothing(f *fixture) {
	want := dataplanetest.Peers(3)
	f.reconcile(want, true)
	f.retire(dataplanetest.Scope(), dataplanetest.Scope(), 0)
	f.expect(want)
	f.must(f.Append(dataplane.Link{Name: "flannel.7", Kind: "bridge", MTU: 1500, Up: true}))
	former, _ := otherNetwork(0)
	f.must(f.Append(
		dataplane.Addr{Dev: "flannel.7", Prefix: prefix.Host(subnet4(9).Addr())},
		dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: "flannel.7", IP: subnet4(10).Addr()}, MAC: dataplane.MAC{2, 9}}))
	f.retire(former, dataplanetest.Scope(), 2)
	f.expect(want)

	for _, tc := range []struct {
		a, b   dataplane.Scope
		covers bool
	}{
		{dataplanetest.Scope(), dataplanetest.Scope(), true},
		{dataplanetest.Scope(), dataplane.Scope{}, true},
		{dataplanetest.Scope(), former, false},
		{dataplanetest.Scope(), dataplane.Scope{Networks: []netip.Prefix{prefix.Host(subnet4(1).Addr())}}, true},
		{dataplanetest.Scope(), dataplane.Scope{Networks: []netip.Prefix{netip.MustParsePrefix("172.30.0.0/16")}}, false},
	} {
		if got := tc.a.Covers(tc.b); got != tc.covers {
			f.Errorf("%v covers %v: %t, want %t", tc.a, tc.b, got, tc.covers)
		}
	}
}
