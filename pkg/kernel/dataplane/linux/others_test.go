// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// daemon opens the kernel of w once more, like another daemon on the host.
func (w *world) daemon(t *testing.T) *Kernel {
	t.Helper()
	k, err := Open(Options{NexthopObjects: true})
	if err != nil {
		t.Fatal(err)
	}
	k.nexthops.threshold = w.nexthops.threshold
	t.Cleanup(func() { _ = k.Close() })
	return k
}

// TestKernelTwoNetworks checks that a daemon whose peers come and go does not change the
// routes of a second daemon on the host. Both have so many peers that they use nexthop
// objects, and the routes of the second one must still use the same objects.
func TestKernelTwoNetworks(t *testing.T) {
	const peers = nexthopThreshold + 20
	w := newWorld(t)
	second := w.daemon(t)
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
	defer r.Close()
	if _, err := r.Reconcile(silentContext(t), want, true); err != nil {
		t.Fatal(err)
	}
	routes := func() (all []string, through int) {
		t.Helper()
		have, err := second.Read(t.Context(), scope)
		if err != nil {
			t.Fatal(err)
		}
		for route := range have.AllRoutes() {
			all = append(all, fmt.Sprintf("%+v", route))
			if route.NexthopID != 0 {
				through++
			}
		}
		slices.Sort(all)
		return all, through
	}
	before, through := routes()
	if len(before) != peers || through == 0 {
		t.Fatalf("the second network has %d routes, %d of them on nexthop objects; want %d and some", len(before), through, peers)
	}
	first := dataplanetest.NewReconciler(t, w, 0)
	for _, n := range []int{peers, 0, peers} {
		if _, err := first.Reconcile(silentContext(t), dataplanetest.Peers(n), true); err != nil {
			t.Fatal(err)
		}
		now, _ := routes()
		if diff := cmp.Diff(before, now); diff != "" {
			t.Fatalf("routes of the other network with %d peers here (-before +now):\n%s", n, diff)
		}
	}
}

// underlayNetwork is a network whose peers are all on eth0, as with host-gw. Peers with
// the same index have the same address in all such networks.
type underlayNetwork struct {
	*Kernel
	second byte // 172.second.0.0/16
}

func (n underlayNetwork) scope() dataplane.Scope {
	return dataplane.Scope{
		Networks: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{172, n.second}), 16)},
		Shared:   []string{"eth0"},
	}
}

// routes returns the routes to the peers with these indexes.
func (n underlayNetwork) routes(peers ...int) (routes []dataplane.Object) {
	for _, i := range peers {
		dst := netip.PrefixFrom(netip.AddrFrom4([4]byte{172, n.second, byte(i), 0}), 24)
		routes = append(routes, dataplane.NewRoute(dst, netip.AddrFrom4([4]byte{192, 168, 77, 2 + byte(i)}), "eth0", false))
	}
	return routes
}

func (n underlayNetwork) reconciler(t *testing.T) *dataplane.Reconciler {
	t.Helper()
	r, err := dataplane.NewReconciler(dataplane.Config{Kernel: n, Scope: n.scope(), Resync: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

func (n underlayNetwork) apply(t *testing.T, ops ...dataplane.Op) {
	t.Helper()
	if failed := n.Apply(silentContext(t), ops); len(failed) > 0 {
		t.Fatal(failed[0])
	}
}

// expect fails the test unless a daemon that starts now finds routes to the number of peers
// in the parameter peers, all through nexthop objects.
func (n underlayNetwork) expect(t *testing.T, w *world, what string, peers int) {
	t.Helper()
	have, err := w.daemon(t).Read(silentContext(t), n.scope())
	if err != nil {
		t.Fatal(err)
	}
	for r := range have.AllRoutes() {
		if r.NexthopID == 0 {
			t.Errorf("%s: %s does not use a nexthop object", what, r)
		}
	}
	if len(have.Routes) != peers {
		t.Errorf("%s: %s has routes to %d peers, want %d", what, n.scope().Networks[0], len(have.Routes), peers)
	}
}

func puts(objects []dataplane.Object) (ops []dataplane.Op) {
	for _, o := range objects {
		ops = append(ops, dataplane.Op{Object: o})
	}
	return ops
}

// TestKernelTwoNetworksOfOneUnderlay checks that the second of two networks with the same
// hosts does not use nexthop objects of the first, which may delete them at any time.
func TestKernelTwoNetworksOfOneUnderlay(t *testing.T) {
	w := newWorld(t)
	w.nexthops.threshold = 1
	first, second := underlayNetwork{w.Kernel, 30}, underlayNetwork{w.daemon(t), 31}
	both := map[*underlayNetwork]*dataplane.Reconciler{}
	for _, n := range []*underlayNetwork{&first, &second} {
		both[n] = n.reconciler(t)
		want := dataplane.NewState()
		want.Add(n.routes(0, 1, 2, 3, 4)...)
		if _, err := both[n].Reconcile(silentContext(t), want, true); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := both[&first].Update(silentContext(t), first.routes(0, 1), nil, true); err != nil {
		t.Fatal(err)
	}
	first.expect(t, w, "two peers have left", 3)
	second.expect(t, w, "two peers have left the other", 5)
}

// TestKernelTwoNetworksAtOnce checks that a daemon does not delete or use the nexthop objects
// that another daemon has created, if it reads and writes before the other daemon has created
// the routes.
func TestKernelTwoNetworksAtOnce(t *testing.T) {
	w := newWorld(t)
	w.nexthops.threshold = 1
	first, second := underlayNetwork{w.Kernel, 30}, underlayNetwork{w.daemon(t), 31}
	first.apply(t, puts(first.routes(0))...)
	eth0, err := w.index("eth0")
	if err != nil {
		t.Fatal(err)
	}

	made := puts(second.routes(1, 2, 3, 4, 5))
	var ops []*dataplane.Op
	for i := range made {
		ops = append(ops, &made[i])
	}
	second.provideNexthops(silentContext(t), ops, map[string]int{"eth0": eth0})
	for range 2 { // in quick succession, as after many writes
		if _, err := first.Read(silentContext(t), first.scope()); err != nil {
			t.Fatal(err)
		}
		first.apply(t, puts(first.routes(1))...)
	}
	second.apply(t, made...)
	second.expect(t, w, "the other has written", 5)
	second.apply(t, dataplane.Op{Object: made[0].Object, Delete: true}, dataplane.Op{Object: made[1].Object, Delete: true})
	second.expect(t, w, "two peers have left", 3)
	first.expect(t, w, "two peers have left the other", 2)
}

// TestKernelSharedNexthop checks that a daemon creates another nexthop object if routes of another network
// use the one of its own routes, too: their owner may delete it at any time.
func TestKernelSharedNexthop(t *testing.T) {
	w := newWorld(t)
	w.nexthops.threshold = 1
	own, other := underlayNetwork{w.Kernel, 30}, underlayNetwork{w.Kernel, 31}
	made := puts(own.routes(1))
	own.apply(t, made...)
	id := made[0].Object.(dataplane.Route).NexthopID
	theirs := other.routes(1)[0].(dataplane.Route)
	theirs.NexthopID = id
	if err := w.request(func(m *message) { encodeRoute(m, unix.RTM_NEWROUTE, unix.NLM_F_CREATE, theirs, 0) }); err != nil || id == 0 {
		t.Fatalf("no shared nexthop object, its id is %d: %v", id, err)
	}

	restarted := underlayNetwork{w.daemon(t), 30}
	if _, err := restarted.Read(silentContext(t), restarted.scope()); err != nil {
		t.Fatal(err)
	}
	route := own.routes(1)[0].(dataplane.Route)
	route.Dst = netip.MustParsePrefix("172.30.9.0/24")
	made = []dataplane.Op{{Object: route}}
	restarted.apply(t, made...)
	if got := made[0].Object.(dataplane.Route).NexthopID; got == 0 || got == id {
		t.Errorf("the new route uses the nexthop object %d, want one other than %d", got, id)
	}
}
