// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// hosts is the number of peers of a walk. It is small, so that steps often concern the
// same peer.
const hosts = 8

// walk leads a Reconciler through random wanted states, while its kernel fails at times
// and other programs change the kernel.
type walk struct {
	*fixture
	rnd       *rand.Rand
	want      dataplane.State
	last      dataplane.State // the last wanted state that the Reconciler got
	sweep     bool
	failing   bool
	refused   map[netip.Prefix]bool    // wanted routes that the kernel refuses
	recorded  map[dataplane.Route]bool // routes that were wanted at some time, without the attributes that adopting ignores
	kept      map[dataplane.Route]bool // routes of other programs that must not change
	disturber disturber                // nil if the world does not implement it
	traffic   traffic                  // nil if the world does not implement it
}

// walkThrough leads a Reconciler through random steps in w, as many as the number in steps. It logs
// the random seed. resync is the interval of the Reconciler's full reads. If it is zero
// every pass reads the kernel. If it is long the Reconciler depends on the announcements of
// changes by other programs.
func walkThrough(t testing.TB, w subject, steps int, resync time.Duration) {
	t.Helper()
	walkFrom(t, w, steps, resync, uint64(time.Now().UnixNano()))
}

// walkFrom is like walkThrough, with a given seed.
func walkFrom(t testing.TB, w subject, steps int, resync time.Duration, seed uint64) {
	t.Helper()
	t.Logf("seed %d", seed)
	wk := &walk{
		fixture: newFixture(t, w, resync), last: dataplane.NewState(), rnd: rand.New(rand.NewPCG(seed, 0)), want: dataplanetest.Base(),
		recorded: map[dataplane.Route]bool{}, kept: map[dataplane.Route]bool{},
	}

	wk.spy.Fail = func(dataplane.Op) error {
		if wk.failing && wk.chance(10) {
			return syscall.EIO
		}
		return nil
	}

	wk.spy.ReadError = func() error {
		if wk.failing && wk.chance(10) {
			return syscall.EINTR
		}
		return nil
	}
	if resync > 0 {
		wk.lose = func() bool { return wk.failing && wk.chance(3) }
	}

	wk.must(wk.Append(dataplane.Link{Name: nic, Kind: "veth", Up: true}))
	wk.must(wk.Append(nicAddrs()...))
	if traffic, ok := w.(traffic); ok {
		wk.want.Add(traffic.Remote()...)
		wk.traffic = traffic
	}

	wk.disturber, _ = w.(disturber)
	for step := range steps {
		wk.step()
		if wk.chance(10) || step == steps-1 {
			wk.converge()
		}
		if t.Failed() {
			t.Fatalf("in step %d of seed %d", step, seed)
		}
	}
}

func (w *walk) chance(percent int) bool { return w.rnd.IntN(100) < percent }

func (w *walk) step() {
	for w.chance(60) {
		w.changeWant()
	}
	for w.chance(50) {
		w.disturb()
	}
	w.failing, w.sweep = w.chance(50), w.chance(60)
	_, err := w.update(w.recordWanted())
	if err != nil && !w.failing {
		w.Errorf("the kernel did not fail, but Reconcile: %v", err)
	}
	w.check()
}

// update gives the Reconciler the wanted state, either all of it or the changes since the
// last one. Both must have the same effect.
func (w *walk) update(sweep bool) (dataplane.Report, error) {
	before := w.last
	now := state(w.want)
	w.last = now
	if w.chance(30) {
		return w.reconciler.Reconcile(w.Context(), state(now), sweep)
	}

	var removed, added []dataplane.Object
	for _, o := range objectsOf(before) {
		if !now.Has(o) {
			removed = append(removed, o)
		}
	}

	for _, o := range objectsOf(now) {
		if !before.Has(o) {
			added = append(added, o)
		}
	}
	return w.reconciler.Update(w.Context(), removed, added, sweep)
}

// recordWanted adds the wanted routes to w.recorded and returns w.sweep.
func (w *walk) recordWanted() bool {
	for r := range w.want.AllRoutes() {
		w.recorded[canonical(r)] = true
	}
	return w.sweep
}

func (w *walk) changeWant() {
	i := 2 + w.rnd.IntN(hosts)
	variant := w.rnd.IntN(2)
	for _, o := range objectsOf(w.want) { // remove the peer
		switch o := o.(type) {
		case dataplane.Neigh:
			if o.IP == subnet4(i).Addr() || o.IP == subnet6(i).Addr() {
				delete(w.want.FDB, dataplane.FDBKey{Dev: o.Dev, MAC: o.MAC})
				delete(w.want.Neighs, o.NeighKey)
			}
		case dataplane.Route:
			if o.Dst == subnet4(i) || o.Dst == subnet6(i) {
				w.want.Remove(o)
			}
		}
	}

	switch n := w.rnd.IntN(10); {
	case n < 5:
		for _, o := range dataplanetest.Peer(i, variant) {
			if r, ok := o.(dataplane.Route); ok && w.chance(30) {
				r.MTU = 1300 + w.rnd.IntN(2)
				o = r
			}
			w.want.Add(o)
		}

	case n < 6:
		w.want.Add(dataplanetest.Peer(i, variant)[3*variant : 3*variant+3]...) // only one family
	case n < 7:
		w.want.Add(objects(w.anyDirectRoutes(i, 10+variant))...)
	case n < 8: // the gateway is unreachable (variant 0) or is not another host (variant 1)
		gateways := [][]string{{"192.0.2.1", "2001:db8::1"}, {"192.168.77.255", "fd00:77::1"}}[variant]
		for f, subnet := range []netip.Prefix{subnet4(i), subnet6(i)} {
			w.want.Add(dataplane.NewRoute(subnet, netip.MustParseAddr(gateways[f]), "eth0", false))
		}
	case n < 9:
		w.want.Add(w.anyLink())
	}
}

// anyDirectRoutes returns routes through a random interface.
func (w *walk) anyDirectRoutes(i, n int) []dataplane.Route {
	if w.chance(50) {
		return directRoutesOnNIC(i, n)
	}
	return directRoutes(i, n)
}

// anyLink returns one of the scope's devices with random parameters. Some differ from Base
// so that the device must be replaced, others so that the kernel can change it in place.
func (w *walk) anyLink() dataplane.Link {
	l := dataplanetest.Base().Links[dataplanetest.Scope().Devices[w.rnd.IntN(2)]]
	l.MTU -= 10 * w.rnd.IntN(2)
	l.MAC[0] += byte(4 * w.rnd.IntN(2))
	l.VXLAN.Learning = w.chance(50)
	if w.chance(20) {
		l.VXLAN.GBP = true
	}
	return l
}

// disturb lets another program change something. The change may fail.
func (w *walk) disturb() {
	i := 2 + w.rnd.IntN(hosts)
	n := w.rnd.IntN(20)
	dev := dataplanetest.Scope().Devices[w.rnd.IntN(2)]
	switch w.rnd.IntN(20) {
	case 0:
		_ = w.Remove(dataplane.Link{Name: dev})
	case 1:
		_ = w.SetUp(dev, false)
	case 2:
		_ = w.SetUp(dev, w.chance(50))
	case 3:
		_ = w.Append(w.anyLink())
	case 4, 5, 6:
		w.addDuplicate(i, n)
	case 7:
		_ = w.Append(dataplanetest.Peer(i, n%3)[w.rnd.IntN(6)])
	case 8:
		_ = w.Remove(dataplanetest.Peer(i, n%2)[w.rnd.IntN(6)])
	case 9:
		e := peer[dataplane.FDB](i, n%3)[n%2]
		e.Override = w.chance(50)
		_ = w.Append(e)

	case 10:
		if w.realKernel != nil {
			_ = w.Learn(peer[dataplane.Neigh](i, n%2)[n%2])
		}
	case 11:
		_ = w.Append(dataplane.Addr{Dev: dev4, Prefix: netip.PrefixFrom(subnet4(i).Addr(), 32)},
			dataplane.Addr{Dev: dev6, Prefix: netip.PrefixFrom(subnet6(1).Addr(), 64+64*(n%2))})

	case 12:
		r := directRoutes(100+n, 10)[n%2]
		r.Protocol = protoBoot
		_ = w.Append(r)
		w.kept[r] = true

	case 16:
		if w.realKernel != nil {
			w.must(w.SetCarrier([]string{"eth0", nic}[n%2], w.chance(50)))
		}
	case 17:
		w.flap(n)
	case 18:
		if w.realKernel != nil {
			w.useNexthops()
		}
	case 19:
		_ = w.Append(dataplane.NewDetour(peer[dataplane.FDB](i, n%3)[n%2].Dst, dataplanetest.Scope().Devices[n%2]))
	case 14:
		if w.disturber != nil && w.chance(30) {
			w.must(w.disturber.Overflow())
		}

	case 15:
		if w.disturber != nil {
			w.must(w.disturber.DeleteNexthop(w.rnd.IntN(hosts)))
			_ = w.disturber.ReplaceNexthop(w.rnd.IntN(2 * hosts))
		}

	case 13:
		bridge := dataplane.Link{Name: "cni0", Kind: "bridge", Up: true}
		_ = w.Remove(bridge)
		if w.chance(50) {
			_ = w.Append(bridge, dataplane.Addr{Dev: "cni0", Prefix: netip.PrefixFrom(subnet4(i).Addr().Next(), 24)})
		}
	}
}

// flap makes the second interface lose its routes. If n is even, it sets the link down and up.
// If n is odd, it removes the addresses of the link. Finally it restores the addresses.
func (w *walk) flap(n int) {
	if n%2 == 0 {
		w.must(w.SetUp(nic, false))
		w.must(w.SetUp(nic, true))
	} else {
		w.must(w.Remove(nicAddrs()...))
		w.must(w.Append(nicAddrs()[0]))
	}
	w.must(w.Append(nicAddrs()[1])) // the IPv6 address, which the kernel deletes when the link goes down
}

// useNexthops lets another program delete its nexthop objects, and replace wanted routes by
// routes through such objects.
func (w *walk) useNexthops() {
	for i := range hosts {
		for f, dst := range []netip.Prefix{subnet4(2 + i), subnet6(2 + i)} {
			id := uint32(200 + 2*i + f)
			if w.chance(50) {
				w.must(w.RemoveNexthop(id))
			}

			for _, r := range w.want.Routes[dst] {
				if w.chance(50) {
					_ = w.Remove(r)
					r.NexthopID = id
					r.Protocol = protoStatic
					r.MTU = 0
					_ = w.Append(r)
				}
			}
		}
	}
}

// addDuplicate adds a route to a subnet of host i, as another program. n selects the family and
// the gateway.
func (w *walk) addDuplicate(i, n int) {
	ways := duplicates()
	names := slices.Sorted(maps.Keys(ways))
	r := w.anyDirectRoutes(i, 10+n)[n%2]
	if n%5 == 0 {
		r = peer[dataplane.Route](i, 0)[n%2]
	}
	r.Protocol = []uint8{protoBoot, protoStatic, dataplane.Protocol}[w.rnd.IntN(3)]
	if ways[names[w.rnd.IntN(len(names))]](&r) {
		_ = w.Append(r)
	}
}

// check tests that the Reconciler was allowed to make each of the changes that it has made
// since the last check.
func (w *walk) check() {
	w.Helper()
	for _, op := range w.spy.Take() {
		if op.Delete && !w.mayDelete(op.Object) || !op.Delete && !w.wanted(op.Object) {
			w.Errorf("%s (sweep %t) is a change that the Reconciler must not make", op, w.sweep)
		}
	}
}

func (w *walk) wanted(o dataplane.Object) bool {
	return slices.Contains(objectsOf(w.want), o)
}

func (w *walk) mayDelete(o dataplane.Object) bool {
	ours := func(dev string) bool { return slices.Contains(dataplanetest.Scope().Devices, dev) }
	switch o := o.(type) {
	case dataplane.Link:
		want, ok := w.want.Links[o.Name]
		return ok && !o.Compatible(want)

	case dataplane.Addr:
		_, wanted := w.want.Addrs[o]
		return !wanted && (w.sweep || w.inTheWay(o)) && ours(o.Dev) && w.inNetworks(prefix.Host(o.Prefix.Addr()))
	case dataplane.Neigh:
		_, wanted := w.want.Neighs[o.NeighKey]
		return !wanted && w.sweep && ours(o.Dev) && w.inNetworks(prefix.Host(o.IP))

	case dataplane.FDB:
		_, wanted := w.want.FDB[o.FDBKey]
		return !wanted && w.sweep && ours(o.Dev)
	case dataplane.Route:
		if o.IsDetour() && ours(o.Dev) {
			return true
		}
		if o.Protocol == protoKernel || !w.inNetworks(o.Dst) {
			return false
		}
		for r := range w.want.AllRoutes() {
			if r.Dst == o.Dst { // another route to a wanted destination
				return true
			}
		}
		return w.sweep && (o.Protocol == dataplane.Protocol || ours(o.Dev) || w.recorded[canonical(o)])
	}
	return false
}

// inTheWay reports whether a conflicts with a wanted object: it is the same IPv6 address
// with another prefix length, or the gateway of a route.
func (w *walk) inTheWay(a dataplane.Addr) bool {
	for _, o := range objectsOf(w.want) {
		switch o := o.(type) {
		case dataplane.Addr:
			if o.Prefix.Addr() == a.Prefix.Addr() && o.Prefix.Addr().Is6() {
				return true
			}
		case dataplane.Route:
			if o.Gateway == a.Prefix.Addr() {
				return true
			}
		}
	}
	return false
}

func (w *walk) inNetworks(p netip.Prefix) bool {
	return slices.ContainsFunc(dataplanetest.Scope().Networks, func(n netip.Prefix) bool { return prefix.Contains(n, p) })
}

// converge tests that an update with sweep and without failures reaches the wanted state,
// that packets then pass if the world implements traffic, and that the routes in w.kept stay.
func (w *walk) converge() {
	w.Helper()
	w.failing = false
	w.sweep = true
	report, err := w.update(w.recordWanted())
	if err != nil {
		w.Fatalf("the kernel no longer fails, but Reconcile: %v", err)
	}
	w.check()
	again, err := w.update(true)
	if err != nil || (again.Puts+again.Deletes > 0 && !again.Unreachable) {
		w.Fatalf("the second pass made %d puts and %d deletes (%v), want none", again.Puts, again.Deletes, err)
	}
	w.check()
	w.refused = map[netip.Prefix]bool{}
	for _, r := range report.Refused {
		w.refused[r.Route.Dst] = true
	}

	w.compare()
	if w.traffic != nil {
		w.must(w.SetCarrier("eth0", true))
		if _, err := w.update(true); err != nil {
			w.Fatalf("the carrier is back, but Reconcile: %v", err)
		}
		w.check()
		if err := w.traffic.Exchange(w.Context(), w.want); err != nil {
			w.Errorf("the kernel has the wanted state, but packets do not pass: %v", err)
		}
	}
	if !w.has(slices.Collect(maps.Keys(w.kept))...) {
		w.Errorf("a route of another program on eth0 was deleted")
	}
}

// compare compares the kernel's state with the wanted one. It ignores refused routes, and
// routes of other programs that may stay.
func (w *walk) compare() {
	w.Helper()
	have := w.read()
	dsts := map[netip.Prefix]bool{}
	expected := state(w.want)
	for r := range w.want.AllRoutes() {
		dsts[r.Dst] = true
	}

	for r := range have.AllRoutes() {
		switch {
		case r.Protocol == protoKernel, w.refused[r.Dst], w.kept[r]:
			have.Remove(r)
		case !dsts[r.Dst] && r.Protocol != dataplane.Protocol && !slices.Contains(dataplanetest.Scope().Devices, r.Dev):
			have.Remove(r) // a route of another program, to a destination that is not wanted
		default: // a wanted route, which may be adopted
			have.Remove(r)
			have.Add(canonical(r))
		}
	}

	for r := range expected.AllRoutes() {
		expected.Remove(r)
		if !w.refused[r.Dst] {
			expected.Add(canonical(r))
		}
	}
	if diff := diffStates(expected, have); diff != "" {
		w.Errorf("kernel state (-want +have):\n%s", diff)
	}
}
