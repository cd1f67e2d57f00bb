// SPDX-License-Identifier: Apache-2.0

package cloud_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// runAll runs test with the keeper of a leader on host 1.
func runAll(t *testing.T, test func(*bed), routes ...cloud.Route) {
	t.Helper()
	runWith(t, func(c *cloud.KeeperConfig) { c.All = true }, test, routes...)
}

// expectUnrouted expects that the report names the subnets of exactly these hosts as unrouted, with a reason
// that contains text.
func (b *bed) expectUnrouted(what, text string, hosts ...int) {
	b.Helper()
	all := b.keeper.Report().Unrouted
	for _, n := range hosts {
		if !slices.ContainsFunc(all, func(u cloud.Unrouted) bool { return u.Dst == subnet(n) && strings.Contains(u.Reason, text) }) {
			b.Errorf("%s: %v, want host %d with %q", what, all, n, text)
		}
	}
	if len(all) != len(hosts) {
		b.Errorf("%s: %v, want the hosts %v", what, all, hosts)
	}
}

func TestLeaderWritesAllRoutes(t *testing.T) {
	runAll(t, func(b *bed) {
		b.answer(2, 3)
		b.after(5 * time.Second)
		b.expectRoutes("after the leases have come", routeTo(1, 1), routeTo(2, 2), routeTo(3, 3))
		b.Do(func() { b.Hosts[target(4)] = []netip.Addr{address(4)} })
		b.answer(2, 3, 4)
		b.after(5 * time.Second)
		b.expectRoutes("after a host has come", routeTo(1, 1), routeTo(2, 2), routeTo(3, 3), routeTo(4, 4))
		b.expectUnrouted("with all routes in place", "")
		if r := b.keeper.Report(); r.Writer != cloud.WriterLeader || !r.Leading || len(r.Routes) != 1 || len(r.Routed) != 4 {
			t.Errorf("report %+v, want the own route, and four that are in order", r)
		}
		writes, sought := len(b.writes()), 0
		b.Do(func() { sought = b.Sought })
		b.hour()
		b.expectWrites("at rest", writes)
		b.Do(func() { sought = b.Sought - sought })
		if sought > 3*13 {
			t.Errorf("%d hosts were asked for in an hour, want each once in a resync period", sought)
		}
		b.Do(func() { b.DeleteByHand("table-1", subnet(3)) })
		b.comparison()
		b.expectResult("a route that was deleted by hand", "", 1)
	})
}

// TestLeaderFollowsLeases gives a subnet to another host, replaces the instance of a host, and removes the
// lease of that host. It expects that the leader changes the route after each of the first two steps, and
// removes the route after the grace period in the last step.
func TestLeaderFollowsLeases(t *testing.T) {
	runAll(t, func(b *bed) {
		b.keeper.SetPeers(cloud.Peers{Complete: true, Hosts: []cloud.Host{
			{Subnets: []netip.Prefix{subnet(2)}, Addresses: []netip.Addr{address(3)}}, lease(4),
		}})
		b.after(5 * time.Second)
		b.expectRoutes("a subnet of another host", routeTo(1, 1), routeTo(2, 3), routeTo(4, 4))
		b.Do(func() {
			delete(b.Hosts, target(4))
			b.Hosts[target(5)] = []netip.Addr{address(4)}
		})
		b.comparison()
		b.expectRoutes("another instance", routeTo(1, 1), routeTo(2, 3), routeTo(4, 5))
		b.answer(2)
		b.after(14 * time.Minute)
		b.expectRoutes("within the grace period", routeTo(1, 1), routeTo(2, 2), routeTo(4, 5))
		b.hour()
		b.expectRoutes("a host that is gone", routeTo(1, 1), routeTo(2, 2))
	}, routeTo(1, 1), routeTo(2, 2), routeTo(4, 4))
}

// TestLeaderNamesHosts expects that the leader names the hosts to which no route can lead, and that they do
// not affect the routes to other hosts.
func TestLeaderNamesHosts(t *testing.T) {
	runAll(t, func(b *bed) {
		b.Do(func() {
			b.Unfit = map[string]error{target(3): errors.New("it forwards no packets")}
			b.Hosts[target(3)] = []netip.Addr{address(3)}
		})
		b.answer(2, 3, 9)
		before := b.compared()
		b.hour()
		b.expectRoutes("two hosts", routeTo(1, 1), routeTo(2, 2))
		b.expectResult("on the leader", "", 0)
		if n := b.compared() - before; n > 40 {
			t.Errorf("%d comparisons in an hour, want growing pauses", n)
		}
		all := b.keeper.Report().Unrouted
		if text := fmt.Sprint(all); len(all) != 2 || !strings.Contains(text, "it forwards no packets") || !strings.Contains(text, "the cloud has no instance here with an address of [192.168.77.9]") {
			t.Errorf("unrouted %v, want hosts 3 and 9", all)
		}
		b.Do(func() { b.Unfit = nil })
		b.comparison()
		b.expectRoutes("a host that was repaired", routeTo(1, 1), routeTo(2, 2), routeTo(3, 3))
	})
}

// TestLeaderLeavesRoutesToStoppedHosts expects that the route to a host that does not run stays, because a new
// route would be lost too.
func TestLeaderLeavesRoutesToStoppedHosts(t *testing.T) {
	runAll(t, func(b *bed) {
		b.Do(func() { b.Stopped = map[string]bool{target(2): true} })
		b.answer(2)
		b.hour()
		b.expectWrites("with a host that does not run", 0)
		b.expectUnrouted("with a host that does not run", "host-2 does not run", 2)
	}, routeTo(1, 1), routeTo(2, 2))
}

// TestLeaderIgnoresRefusedLeases expects that no route is put for a lease that is refused, and that an existing
// route to its subnet stays.
func TestLeaderIgnoresRefusedLeases(t *testing.T) {
	runAll(t, func(b *bed) {
		b.keeper.SetPeers(cloud.Peers{Complete: true, Hosts: []cloud.Host{
			{Subnets: []netip.Prefix{subnet(2)}, Addresses: []netip.Addr{address(2)}, Refused: true},
			{Subnets: []netip.Prefix{subnet(3)}, Addresses: []netip.Addr{address(3)}, Refused: true},
		}})
		b.hour()
		b.expectRoutes("refused leases", routeTo(1, 1), routeTo(2, 9))
	}, routeTo(1, 1), routeTo(2, 9))
}

// TestLeaderWithAFullTable expects that each comparison makes at most one call that the quota refuses, and that
// all routes without a place have the same reason.
func TestLeaderWithAFullTable(t *testing.T) {
	runAll(t, func(b *bed) {
		peers := []int{}
		b.Do(func() {
			b.Quota = 3
			for n := 2; n < 100; n++ {
				b.Hosts[target(n)] = []netip.Addr{address(n)}
				peers = append(peers, n)
			}
		})
		b.answer(peers...)
		b.hour()
		b.Do(func() {
			if len(b.Tabs[0].Routes) != 3 || b.Refused > b.Compared {
				t.Errorf("%d routes, %d calls refused in %d comparisons", len(b.Tabs[0].Routes), b.Refused, b.Compared)
			}
		})
		if r := b.keeper.Report(); len(r.Routed) != 3 || len(r.Unrouted) != 96 || !strings.Contains(r.Unrouted[50].Reason, "limit of 3 routes") || r.Tables[0].Quota[prefix.IPv4] != 3 {
			t.Errorf("%d routes are in order, %d are not: %v", len(r.Routed), len(r.Unrouted), r.Unrouted)
		}
		b.expectResult("on the leader, which has a route", "", 0)
		if all := b.keeper.Report().Unrouted; all[50].Reason != all[51].Reason {
			t.Errorf("the reasons %q and %q, want one for all routes that the quota refuses", all[50].Reason, all[51].Reason)
		}
	})
}

// TestLeaderWithoutTheStore expects that no route of another host is put, replaced or removed while the store is
// away, and that missing and wrong routes are repaired when it is back.
func TestLeaderWithoutTheStore(t *testing.T) {
	runAll(t, func(b *bed) {
		b.answer(2, 3)
		b.comparison()
		b.setConnected(false)
		b.Do(func() {
			b.DeleteByHand("table-1", subnet(2))
			b.DeleteByHand("table-1", subnet(3))
			b.Tabs[0].Routes = append(b.Tabs[0].Routes, routeTo(2, 3), routeTo(7, 3), routeTo(8, 8))
		})
		b.hour()
		b.expectRoutes("without the store", routeTo(1, 1), routeTo(2, 3), routeTo(7, 3), routeTo(8, 8))
		if r := b.keeper.Report(); len(r.Routed) != 3 {
			t.Errorf("%v are in order, want what the last comparison with the store has found", r.Routed)
		}
		b.setConnected(true)
		b.comparison()
		b.expectRoutes("with the store", routeTo(1, 1), routeTo(2, 2), routeTo(3, 3), routeTo(7, 3)) // host 8 does not exist
	}, routeTo(1, 1), routeTo(2, 2), routeTo(3, 3))
}

// TestLeasesChangeTheirData expects that leases that come again with the same addresses cause no comparison, and that
// the lease of a new host causes one at once.
func TestLeasesChangeTheirData(t *testing.T) {
	runAll(t, func(b *bed) {
		b.answer(2, 3)
		b.hour()
		before := b.compared()
		for range 20 {
			b.answer(3, 2)
			b.after(3 * time.Second)
			b.answer(2, 3)
			b.after(3 * time.Second)
		}
		if n := b.compared() - before; n > 5 {
			t.Errorf("%d comparisons in two minutes, want only those of the resync period", n)
		}
		b.answer(2)
		b.answer(2, 3, 4)
		b.after(5 * time.Second)
		b.expectUnrouted("a host that has come", "no instance here", 4)
	})
}

// TestHostOutsideIsSoughtSeldom expects that the leader seldom looks for a host outside of the cloud, even if leases
// change often, and that it finds the host when this has joined the cloud.
func TestHostOutsideIsSoughtSeldom(t *testing.T) {
	runAll(t, func(b *bed) {
		b.answer(2, 9)
		b.hour()
		sought := 0
		b.Do(func() { sought = b.Sought })
		for range 30 {
			b.answer(9)
			b.after(5 * time.Second)
			b.answer(2, 9)
			b.after(5 * time.Second)
		}
		b.Do(func() { sought = b.Sought - sought })
		if sought > 6 {
			t.Errorf("%d hosts were sought in five minutes, want each once in a resync period", sought)
		}
		b.Do(func() { b.Hosts[target(9)] = []netip.Addr{address(9)} })
		b.after(4 * resync)
		b.expectRoutes("a host that has come", routeTo(1, 1), routeTo(2, 2), routeTo(9, 9))
	})
}

// TestManyHostsStart starts 100 hosts within ten seconds. It expects that the leader puts all routes without
// reading the tables for each host.
func TestManyHostsStart(t *testing.T) {
	runAll(t, func(b *bed) {
		before := b.compared()
		var peers []int
		for n := 2; n < 102; n++ {
			b.Do(func() { b.Hosts[target(n)] = []netip.Addr{address(n)} })
			peers = append(peers, n)
			b.answer(peers...)
			b.after(100 * time.Millisecond)
		}
		b.after(5 * time.Second)
		b.Do(func() {
			if len(b.Tabs[0].Routes) != 101 {
				t.Errorf("%d routes, want 101", len(b.Tabs[0].Routes))
			}
		})
		if n := b.compared() - before; n > 10 {
			t.Errorf("%d comparisons in 15 seconds, want few", n)
		}
	})
}
