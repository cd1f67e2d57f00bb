// SPDX-License-Identifier: Apache-2.0

package dataplane_test

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// A peer has moved from 192.0.2.7 to 192.0.2.8 and has another MAC, and another peer has
// left. Puts come first, so that no wanted destination is without a route.
func ExamplePlan() {
	peer := func(subnet, host string, mac dataplane.MAC) []dataplane.Object {
		dst := netip.MustParsePrefix(subnet)
		return []dataplane.Object{
			dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: "flannel.1", IP: dst.Addr()}, MAC: mac},
			dataplane.FDB{FDBKey: dataplane.FDBKey{Dev: "flannel.1", MAC: mac}, Dst: netip.MustParseAddr(host)},
			dataplane.NewRoute(dst, dst.Addr(), "flannel.1", true),
		}
	}
	have, want := dataplane.NewState(), dataplane.NewState()
	have.Add(peer("10.5.2.0/24", "192.0.2.7", dataplane.MAC{2, 0, 0, 0, 0, 7})...)
	have.Add(dataplane.NewRoute(netip.MustParsePrefix("10.5.9.0/24"), netip.MustParseAddr("10.5.9.0"), "flannel.1", true))
	want.Add(peer("10.5.2.0/24", "192.0.2.8", dataplane.MAC{2, 0, 0, 0, 0, 8})...)

	scope := dataplane.Scope{Devices: []string{"flannel.1"}, Networks: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}}
	for _, op := range dataplane.Plan(have, want, scope, nil, true).Ops {
		fmt.Println(op)
	}
	// Output:
	// put neighbour 10.5.2.0 lladdr 02:00:00:00:00:08 dev flannel.1
	// put FDB entry 02:00:00:00:00:08 dst 192.0.2.8 dev flannel.1
	// delete route 10.5.9.0/24 via 10.5.9.0 dev flannel.1
	// delete FDB entry 02:00:00:00:00:07 dst 192.0.2.7 dev flannel.1
}

// The Reconciler creates the route to a peer. Then another program deletes the route, the
// kernel announces that, and the Reconciler creates it again.
func ExampleReconciler() {
	kernel := dataplanetest.New() // in memory, with the device eth0
	r, err := dataplane.NewReconciler(dataplane.Config{
		Kernel: kernel,
		Scope:  dataplane.Scope{Shared: []string{"eth0"}, Networks: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}},
		Resync: time.Hour,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer r.Close()

	route := dataplane.NewRoute(netip.MustParsePrefix("10.5.3.0/24"), netip.MustParseAddr("192.168.77.3"), "eth0", false)
	want := dataplane.NewState()
	want.Add(route)
	report, err := r.Reconcile(context.Background(), want, true)
	fmt.Println(report.Puts, "put,", report.Repaired, "repaired, error:", err)

	err = kernel.Remove(route) // as another program
	fmt.Println("removed, error:", err)
	<-r.Changed()
	report, err = r.Update(context.Background(), nil, nil, true)
	fmt.Println(report.Puts, "put,", report.Repaired, "repaired, error:", err)
	fmt.Println(r.Has(route), route)
	// Output:
	// 1 put, 0 repaired, error: <nil>
	// removed, error: <nil>
	// 1 put, 1 repaired, error: <nil>
	// true route 10.5.3.0/24 via 192.168.77.3 dev eth0
}
