// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

var network4 = netip.MustParsePrefix("10.5.0.0/16")

// link returns a device with the name "old" or "new".
func link(name string) dataplane.Link {
	return dataplane.Link{
		Name: name, Kind: dataplane.KindVXLAN, MTU: 1450, Up: true, MAC: dataplane.MAC{2, name[0]},
		VXLAN: dataplane.VXLAN{VNI: int(name[0]), Port: 8472, Local: netip.MustParseAddr("192.168.77.1"), Underlay: "eth0"},
	}
}

func subnetOf(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(n), 0}), 24)
}

// routeOf returns the route to the subnet of peer n through dev.
func routeOf(n int, dev string) dataplane.Route {
	return dataplane.NewRoute(subnetOf(n), netip.Addr{}, dev, false)
}

// wide returns the route to the whole network through dev.
func wide(dev string) dataplane.Route { return dataplane.NewRoute(network4, netip.Addr{}, dev, false) }

func stateOf(objects ...dataplane.Object) dataplane.State {
	s := dataplane.NewState()
	s.Add(objects...)
	return s
}

// newTestLayer returns a layer on a kernel in memory. The devices are "old" and "new".
func newTestLayer(t *testing.T) (*layer, *dataplanetest.Kernel) {
	t.Helper()
	k := dataplanetest.New()
	scope := dataplane.Scope{Devices: []string{"old", "new"}, Shared: []string{"eth0"}, Networks: []netip.Prefix{network4}}
	r, err := dataplane.NewReconciler(dataplane.Config{Kernel: k, Scope: scope, Resync: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return newLayer(r, []netip.Prefix{network4}), k
}

// routes returns the devices of the kernel's routes to dst, the best route first. A route that
// stands by has the suffix " standby".
func routes(ctx context.Context, t *testing.T, k *dataplanetest.Kernel, dst netip.Prefix) (all []string) {
	t.Helper()
	s, err := k.Read(ctx, dataplane.Scope{Devices: []string{"old", "new"}, Networks: []netip.Prefix{network4}})
	if err != nil {
		t.Fatal(err)
	}
	found := slices.Clone(s.Routes[dst])
	slices.SortFunc(found, func(a, b dataplane.Route) int { return a.Priority - b.Priority })
	for _, r := range found {
		text := r.Dev
		if r.Priority > 0 {
			text += " standby"
		}
		all = append(all, text)
	}
	return all
}

// TestLayer checks the routes in each step of a migration, for backends with a route to each peer
// and for backends with a route to the whole network.
func TestLayer(t *testing.T) {
	for _, tt := range []struct {
		name       string
		wide       [sides]bool
		wantWide   []string // routes to the whole network
		peer, none []string // routes to a peer that both backends reach, and to a peer that only the present one reaches
	}{
		{"routes to peers", [sides]bool{}, nil, []string{"old", "new standby"}, []string{"old"}},
		{"the next one has a route to the network", [sides]bool{next: true}, nil, []string{"old", "new standby"}, []string{"old"}},
		{"the present one has a route to the network", [sides]bool{present: true}, []string{"old"}, []string{"old", "new standby"}, []string{"old"}},
		{"both have a route to the network", [sides]bool{true, true}, []string{"old"}, []string{"old", "new standby"}, []string{"old"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l, k := newTestLayer(t)
			ctx := t.Context()
			l.deferred = true
			for i, dev := range []string{"old", "new"} {
				v := l.view(i)
				want := stateOf(link(dev), dataplane.Addr{Dev: dev, Prefix: netip.MustParsePrefix("10.5.1.0/32")})
				for n := 2; n <= 3 && (n == 2 || i == present); n++ {
					if !tt.wide[i] {
						want.Add(routeOf(n, dev))
					}
					v.serve(subnetOf(n), true)
				}
				if tt.wide[i] {
					want.Add(wide(dev))
				}
				if _, err := v.Reconcile(ctx, want, true); err != nil {
					t.Fatal(err)
				}
			}
			expect := func(when string, dst netip.Prefix, want ...string) {
				t.Helper()
				if _, err := l.apply(ctx, true); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(want, routes(ctx, t, k, dst)); diff != "" {
					t.Errorf("%s, routes to %s (-want +got):\n%s", when, dst, diff)
				}
			}
			expect("at first", subnetOf(2), tt.peer...)
			expect("at first", subnetOf(3), tt.none...)
			expect("at first", network4, tt.wantWide...)
			l.choose(subnetOf(2), next)
			expect("after the change", subnetOf(2), "new", "old standby")
			expect("after the change", network4, tt.wantWide...)
			l.choose(subnetOf(2), present)
			expect("after going back", subnetOf(2), "old", "new standby")

			l.choose(subnetOf(2), next) // and at the same time the peer leaves the present backend
			v := l.views[present]
			if !tt.wide[present] {
				if _, err := v.Update(ctx, []dataplane.Object{routeOf(2, "old")}, nil, true); err != nil {
					t.Fatal(err)
				}
			}
			v.serve(subnetOf(2), false)
			expect("after the peer has finished", subnetOf(2), "new")
		})
	}
}

// TestLayerRandomWalk makes random changes, and applies them alone or several at once. After that the
// kernel must have exactly the routes that merged returns.
func TestLayerRandomWalk(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	l, _ := newTestLayer(t)
	ctx := t.Context()
	devices := []string{"old", "new"}
	l.deferred = true
	// The next backend has one route to the network, and one to a peer only while its path is narrow.
	narrow := func(n int) dataplane.Route {
		r := routeOf(n, "new")
		r.MTU = 1300
		return r
	}
	for i, v := range l.views {
		base := stateOf(link(devices[i]))
		if i == next {
			base.Add(wide("new"))
		}
		if _, err := v.Reconcile(ctx, base, true); err != nil {
			t.Fatal(err)
		}
	}
	for step := range 2000 {
		n, side := 2+rnd.IntN(5), rnd.IntN(sides)
		v := l.views[side]
		switch rnd.IntN(5) {
		case 4:
			l.views[next].serve(subnetOf(n), true)
			if v := l.views[next]; len(v.want.Routes[subnetOf(n)]) == 0 {
				_, _ = v.Update(ctx, nil, []dataplane.Object{narrow(n)}, true)
			} else {
				_, _ = v.Update(ctx, []dataplane.Object{narrow(n)}, nil, true)
			}
		case 0:
			l.choose(subnetOf(n), side)
		case 1:
			v.serve(subnetOf(n), rnd.IntN(2) == 0)
		case 2:
			l.views[present].serve(subnetOf(n), true)
			if v := l.views[present]; len(v.want.Routes[subnetOf(n)]) == 0 {
				_, _ = v.Update(ctx, nil, []dataplane.Object{routeOf(n, "old")}, true)
			} else {
				_, _ = v.Update(ctx, []dataplane.Object{routeOf(n, "old")}, nil, true)
			}
		case 3:
			if _, err := l.apply(ctx, true); err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
			want := l.merged()
			for r := range want.AllRoutes() {
				if !l.reconciler.Has(r) {
					t.Fatalf("seed %d, step %d: the kernel has no %s", seed, step, r)
				}
			}
			wanted := 0
			for range want.AllRoutes() {
				wanted++
			}
			if got := l.reconciler.Counts()["route"]; got.Wanted != wanted || got.Present != wanted {
				t.Fatalf("seed %d, step %d: %+v routes, want %d", seed, step, got, wanted)
			}
		}
	}
}

// TestLayerReportsOwnRefusals checks that the report that a backend gets from its view names only
// refused routes of that backend.
func TestLayerReportsOwnRefusals(t *testing.T) {
	l, k := newTestLayer(t)
	bridge := dataplane.Link{Name: "br0", Kind: "bridge", Up: true}
	if err := k.Append(bridge, dataplane.Addr{Dev: "br0", Prefix: netip.MustParsePrefix("10.5.2.1/24")}); err != nil {
		t.Fatal(err)
	}
	for i, want := range []int{1, 0} {
		dev := []string{"old", "new"}[i]
		report, err := l.view(i).Reconcile(t.Context(), stateOf(link(dev), routeOf(2+i, dev)), false)
		if err != nil || len(report.Refused) != want {
			t.Errorf("%s: refused %v, %v, want %d", dev, report.Refused, err, want)
		}
	}
}
