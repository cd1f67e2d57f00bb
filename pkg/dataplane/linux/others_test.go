package linux

import (
	"net/netip"
	"testing"

	"flanneld/pkg/dataplane"
	"flanneld/pkg/dataplane/dataplanetest"
)

// TestKernelTwoNetworks: two daemons on one host, each with more peers than
// plain routes are used for, leave the other's nexthop objects alone.
func TestKernelTwoNetworks(t *testing.T) {
	const peers = nexthopThreshold + 20
	w := newWorld(t)
	second, err := Open(Options{NexthopObjects: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = second.Close() })
	scope := dataplane.Scope{Networks: []netip.Prefix{netip.MustParsePrefix("172.30.0.0/15")}, Shared: []string{"eth0"}}
	want := dataplane.NewState()
	for i := range peers {
		dst := netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 30 + byte(i>>8), byte(i), 0}), 24)
		want.Add(dataplane.NewRoute(dst, netip.AddrFrom4([4]byte{192, 168, 77, 2 + byte(i%200)}), "eth0", false))
	}
	r, err := dataplane.NewReconciler(dataplane.Config{Kernel: second, Scope: scope})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Reconcile(quiet(t), want, true); err != nil {
		t.Fatal(err)
	}
	first := dataplanetest.NewReconciler(t, w, 0)
	for _, n := range []int{peers, 0, peers} {
		if _, err := first.Reconcile(quiet(t), dataplanetest.Peers(n), true); err != nil {
			t.Fatal(err)
		}
		have, err := second.Read(t.Context(), scope)
		if err != nil {
			t.Fatal(err)
		}
		through := 0
		for route := range have.AllRoutes() {
			if route.NexthopID != 0 {
				through++
			}
		}
		if len(have.Routes) != peers || through == 0 {
			t.Fatalf("with %d peers here the other network has %d routes, %d of them on nexthop objects; want %d and some", n, len(have.Routes), through, peers)
		}
	}
}
