// SPDX-License-Identifier: Apache-2.0

package cloud_test

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
)

const resync = 5 * time.Minute

// bed is a keeper for host 1 on a cloud in memory. Both run in simulated time.
type bed struct {
	*testing.T
	*cloudtest.Memory
	keeper    *cloud.Keeper
	connected time.Time // since when the store is connected; zero if it is not; used in Do
	configure func(*cloud.KeeperConfig)
	log       func() string // of the keeper
}

// The functions address, subnet, target and lease return the data of host n.

func address(n int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("192.168.77.%d", n)) }

func subnet(n int) netip.Prefix { return netip.MustParsePrefix(fmt.Sprintf("10.5.%d.0/24", n)) }

func target(n int) string { return fmt.Sprintf("host-%d", n) }

func lease(n int) cloud.Host {
	return cloud.Host{Subnets: []netip.Prefix{subnet(n)}, Addresses: []netip.Addr{address(n)}}
}

// routeTo returns a route to the subnet of host n. Its target is the host with the number host.
func routeTo(n, host int) cloud.Route {
	return cloud.Route{Table: "table-1", Dst: subnet(n), Target: target(host), ByCall: true}
}

// run runs test with a keeper for host 1. In the cloud the hosts 1 to 3 exist, and the table has
// these routes.
func run(t *testing.T, test func(*bed), routes ...cloud.Route) {
	t.Helper()
	runWith(t, func(*cloud.KeeperConfig) {}, test, routes...)
}

// runWith is like run. configure changes the configuration of the keeper.
func runWith(t *testing.T, configure func(*cloud.KeeperConfig), test func(*bed), routes ...cloud.Route) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := &cloudtest.Memory{Self: target(1), Hosts: map[string][]netip.Addr{}, Tabs: []cloud.Table{{ID: "table-1", Own: true, Routes: routes}}}
		for n := 1; n <= 3; n++ {
			m.Hosts[target(n)] = []netip.Addr{address(n)}
		}
		b := &bed{T: t, Memory: m, connected: time.Now(), configure: configure}
		b.restart()
		test(b)
	})
}

// restart sets b.keeper to a new keeper, and starts it. The keeper ends with the test.
func (b *bed) restart() {
	c := cloud.KeeperConfig{
		Cloud: b.Memory, Own: lease(1), Networks: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}, Resync: resync, Compared: func() {},
		Connected: func() (since time.Time) { b.Do(func() { since = b.connected }); return since },
	}
	b.configure(&c)
	b.keeper = cloud.NewKeeper(c)
	logger := ktesting.NewLogger(b.T, ktesting.NewConfig(ktesting.BufferLogs(true)))
	b.log = logger.GetSink().(ktesting.Underlier).GetBuffer().String
	ctx, cancel := context.WithCancel(klog.NewContext(b.Context(), logger))
	done := make(chan struct{})
	go func() { defer close(done); b.keeper.Run(ctx) }()
	b.Cleanup(func() { cancel(); <-done })
	synctest.Wait()
}

// answer passes the leases of these hosts to the keeper, as the complete answer of the store.
func (b *bed) answer(peers ...int) {
	p := cloud.Peers{Complete: true}
	for _, n := range peers {
		p.Hosts = append(p.Hosts, lease(n))
	}
	b.keeper.SetPeers(p)
}

// setConnected makes the store connected, or not.
func (b *bed) setConnected(connected bool) {
	b.Do(func() {
		if b.connected = (time.Time{}); connected {
			b.connected = time.Now()
		}
	})
}

// hour lets more time pass than any grace period lasts.
func (b *bed) hour() { b.after(time.Hour) }

// after lets time pass.
func (b *bed) after(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// comparison lets enough time pass for a comparison.
func (b *bed) comparison() { b.after(2 * resync) }

// deleteOwn deletes the route of host 1 by hand.
func (b *bed) deleteOwn() { b.Do(func() { b.DeleteByHand("table-1", subnet(1)) }) }

func (b *bed) setFails(err error) { b.Do(func() { b.Fails = err }) }

func (b *bed) compared() (n int) {
	b.Do(func() { n = b.Compared })
	return n
}

func (b *bed) writes() (all []string) {
	b.Do(func() { all = slices.Clone(b.Writes) })
	return all
}

func (b *bed) expectRoutes(what string, want ...cloud.Route) {
	b.Helper()
	b.Do(func() { b.compareRoutes(what, want) })
}

func (b *bed) compareRoutes(what string, want []cloud.Route) {
	b.Helper()
	for _, r := range want {
		if !slices.Contains(b.Tabs[0].Routes, r) {
			b.Errorf("%s: no route %s", what, r)
		}
	}
	if len(b.Tabs[0].Routes) != len(want) {
		b.Errorf("%s: the table has %v, want %v", what, b.Tabs[0].Routes, want)
	}
}

func (b *bed) expectWrites(what string, n int) {
	b.Helper()
	if all := b.writes(); len(all) != n {
		b.Errorf("%s: %d writes, want %d: %q", what, len(all), n, all)
	}
}

func (b *bed) expectResult(what, text string, repaired int) {
	b.Helper()
	n, err := b.keeper.Result(b.Context())
	if text == "" && err != nil || text != "" && (err == nil || !strings.Contains(err.Error(), text)) || n != repaired {
		b.Errorf("%s: %d repairs, error %v, want %d and %q", what, n, err, repaired, text)
	}
}

func TestRouteIsPutAtTheStart(t *testing.T) {
	run(t, func(b *bed) {
		b.expectRoutes("at the start", routeTo(1, 1))
		b.expectResult("at the start", "", 0)
		b.comparison()
		b.expectWrites("later", 1)
	})
}

func TestRightRouteIsAdopted(t *testing.T) {
	run(t, func(b *bed) {
		b.comparison()
		b.expectWrites("with a right route", 0)
		if r := b.keeper.Report(); r.Good.IsZero() || len(r.Routes) != 1 || !r.Routes[0].Present {
			b.Errorf("report %+v, want the route in place", r)
		}
	}, routeTo(1, 1))
}

func TestWrongRouteIsReplaced(t *testing.T) {
	run(t, func(b *bed) {
		b.answer(2)
		b.comparison()
		b.expectRoutes("a route to another host", routeTo(1, 1))
		b.expectResult("a route to another host", "", 0)
	}, routeTo(1, 2))
}

// TestZombie starts a host whose subnet may have gone to another host. It expects that a route to the other host
// stays while the store has not answered or is not connected, and is replaced when it has answered and is
// connected. A missing or lost route must be put regardless of that.
func TestZombie(t *testing.T) {
	run(t, func(b *bed) {
		b.comparison()
		b.expectRoutes("before the store has answered", routeTo(1, 2))
		b.expectResult("before the store has answered", "leave route 10.5.1.0/24 to host-2 in table table-1: the store has not answered", 0)
		b.setConnected(false)
		b.answer(2)
		b.comparison()
		b.expectRoutes("without a connection", routeTo(1, 2))
		b.deleteOwn()
		b.after(time.Minute)
		b.expectRoutes("a missing route", routeTo(1, 1))
		b.Do(func() {
			b.DeleteByHand("table-1", subnet(1))
			b.Tabs[0].Routes = append(b.Tabs[0].Routes, routeTo(1, 9))
		})
		b.comparison()
		b.expectRoutes("a route to nowhere", routeTo(1, 1))
		b.Do(func() {
			b.DeleteByHand("table-1", subnet(1))
			b.Tabs[0].Routes = append(b.Tabs[0].Routes, routeTo(1, 2))
		})
		b.comparison()
		b.expectRoutes("still without a connection", routeTo(1, 2))
		b.setConnected(true)
		b.comparison()
		b.expectRoutes("with a connection", routeTo(1, 1))
	}, routeTo(1, 2))
}

// TestZombieBesideALostRoute has a lost route before a route to another host that runs. A call would
// replace both, so the test expects no call until the store has answered.
func TestZombieBesideALostRoute(t *testing.T) {
	run(t, func(b *bed) {
		b.comparison()
		b.expectRoutes("before the store has answered", routeTo(1, 9), routeTo(1, 2))
		b.expectResult("before the store has answered", "leave route 10.5.1.0/24 to host-2 in table table-1: the store has not answered", 0)
		b.answer(2)
		b.comparison()
		b.expectRoutes("after the store has answered", routeTo(1, 1))
	}, routeTo(1, 9), routeTo(1, 2))
}

// TestRouteAppears adds a route to another host between the reading of the table and the call that
// puts this host's route. It expects that the route is replaced only if the store is connected.
func TestRouteAppears(t *testing.T) {
	for _, connected := range []bool{false, true} {
		run(t, func(b *bed) {
			b.answer(2)
			b.setConnected(connected)
			b.deleteOwn()
			b.Do(func() {
				b.Appears = func() {
					b.Appears = nil
					b.Tabs[0].Routes = append(b.Tabs[0].Routes, routeTo(1, 2))
				}
			})
			b.comparison()
			if connected {
				b.expectRoutes("with the store", routeTo(1, 1))
				return
			}
			b.expectRoutes("without the store", routeTo(1, 2))
		}, routeTo(1, 1))
	}
}

func TestLostRouteIsPutBack(t *testing.T) {
	run(t, func(b *bed) {
		b.deleteOwn()
		b.comparison()
		b.expectRoutes("after a deletion by hand", routeTo(1, 1))
		b.expectResult("after a deletion by hand", "", 1)
		b.expectResult("the next time", "", 0)
	}, routeTo(1, 1))
}

// TestOtherRoutesStay expects that a keeper leaves routes that are not its own, unless no host has a lease of them.
func TestOtherRoutesStay(t *testing.T) {
	learned := routeTo(7, 9)
	learned.ByCall = false
	outside := routeTo(7, 9)
	outside.Dst = netip.MustParsePrefix("10.6.7.0/24")
	size := routeTo(7, 9)
	size.Dst = netip.MustParsePrefix("10.5.7.0/25")
	gateway := routeTo(8, 9)
	gateway.Target = "gateway-1"
	gateway.Foreign = "which leads to no host"
	others := []cloud.Route{routeTo(1, 1), learned, outside, size, gateway, routeTo(2, 3)}
	run(t, func(b *bed) {
		b.Do(func() { b.Hosts[target(9)] = []netip.Addr{address(9)} })
		b.answer(2, 3)
		b.hour()
		b.expectRoutes("others", others...)
		b.expectWrites("others", 0)
	}, others...)
}

// TestFormerSubnets expects that routes to former subnets of hosts go, although their targets run and have leases: an
// instance may have been created again under the same name. A host removes those to itself also without the store.
func TestFormerSubnets(t *testing.T) {
	run(t, func(b *bed) {
		b.answer(2)
		b.after(14 * time.Minute)
		b.expectRoutes("within the grace period", routeTo(1, 1), routeTo(2, 2), routeTo(5, 2), routeTo(6, 1))
		b.hour()
		b.expectRoutes("after it", routeTo(1, 1), routeTo(2, 2))
	}, routeTo(1, 1), routeTo(2, 2), routeTo(5, 2), routeTo(6, 1))
	run(t, func(b *bed) {
		b.setConnected(false)
		b.after(16 * time.Minute)
		b.expectRoutes("without the store", routeTo(1, 1), routeTo(5, 2))
	}, routeTo(1, 1), routeTo(5, 2), routeTo(6, 1))
}

// TestFullTableOfDeadHosts expects that a new host gets a place in a full table, at the cost of a host that is gone,
// although the lease of that host lives. A host that is only stopped keeps its route.
func TestFullTableOfDeadHosts(t *testing.T) {
	full := func(c *cloud.KeeperConfig) {
		m := c.Cloud.(*cloudtest.Memory)
		m.Quota = 4
		m.Stopped = map[string]bool{target(3): true}
		m.Hosts = map[string][]netip.Addr{target(1): {address(1)}, target(3): {address(3)}, target(4): {address(4)}, target(5): {address(5)}}
	}
	runWith(t, full, func(b *bed) {
		b.answer(2, 3, 4, 5)
		b.after(30 * time.Second)
		b.expectResult("at the start", "table table-1 has reached its limit of 4 routes", 0)
		b.after(2 * time.Minute)
		b.expectRoutes("later", routeTo(1, 1), routeTo(3, 3), routeTo(4, 4), routeTo(5, 5))
		b.expectResult("later", "", 0)
		b.expectWrites("later", 2)
	}, routeTo(2, 2), routeTo(3, 3), routeTo(4, 4), routeTo(5, 5))
}

// TestForeignRoute expects that a host leaves the route of another program to its subnet, and names it.
func TestForeignRoute(t *testing.T) {
	gateway := routeTo(1, 9)
	gateway.Target = "tgw-1"
	gateway.Foreign = "which leads to no host"
	run(t, func(b *bed) {
		b.answer(2)
		b.hour()
		b.expectRoutes("the route of an operator", gateway)
		b.expectResult("the route of an operator", "leave route 10.5.1.0/24 to tgw-1 in table table-1, which leads to no host: flanneld does not replace it", 0)
		b.Do(func() { b.Tabs[0].Routes = nil })
		b.comparison()
		b.expectRoutes("without it", routeTo(1, 1))
		b.expectResult("without it", "", 0)
	}, gateway)
}

// TestRouteThatTheCloudChanges expects that a route counts only when the cloud has finished its change.
func TestRouteThatTheCloudChanges(t *testing.T) {
	run(t, func(b *bed) {
		b.Do(func() { b.Changing = map[netip.Prefix]bool{subnet(1): true} })
		b.comparison()
		b.expectResult("while it changes", "which the cloud is changing: waiting until the cloud has finished", 0)
		if r := b.keeper.Report().Routes[0]; r.Present || r.Seen {
			b.Errorf("the report has %+v, want no route in place", r)
		}
		b.expectWrites("while it changes", 0)
		b.Do(func() { b.Changing = nil })
		b.after(time.Minute)
		b.expectResult("after the change", "", 0)
	}, routeTo(1, 1))
}

// TestSeparateTables has a host whose packets follow another table. It expects that this host is named after a short
// time, and not a host without a route in the same table. A tunnel carries the packets in that case.
func TestSeparateTables(t *testing.T) {
	for _, tunnel := range []bool{false, true} {
		runWith(t, func(c *cloud.KeeperConfig) { c.Tunnel = tunnel }, func(b *bed) {
			b.Do(func() { b.Follow = map[string]string{target(3): "table-b"} })
			b.answer(2, 3)
			b.after(30 * time.Second)
			b.expectResult("at the start", "", 0)
			b.comparison()
			if tunnel {
				b.expectResult("with a tunnel", "", 0)
				return
			}
			b.expectResult("later", "no packets reach 10.5.3.0/24: their hosts follow the route tables table-b, and this host another one: let all hosts write all tables", 0)
			b.Do(func() { b.Sought = 0 })
			b.hour()
			b.Do(func() {
				if b.Sought > 30 {
					b.Errorf("the host has asked for %d hosts in an hour, want each once in a resync period", b.Sought)
				}
				b.Tabs[0].Routes = append(b.Tabs[0].Routes, routeTo(3, 3))
			})
			b.comparison()
			b.expectResult("with a route in the own table", "", 0)
		})
	}
}

// TestNoNeedToLook has a host that has ended and whose route is still there. The keeper must not look for it: the leases
// of preemptible instances outlive them by a day, and all hosts would make calls.
func TestNoNeedToLook(t *testing.T) {
	run(t, func(b *bed) {
		b.Do(func() {
			b.Tabs[0].Routes = append(b.Tabs[0].Routes, routeTo(2, 2))
			delete(b.Hosts, target(2))
		})
		b.answer(2)
		b.hour()
		b.expectResult("an ended host", "", 0)
		b.Do(func() {
			if b.Sought > 0 {
				b.Errorf("the keeper has looked for %d hosts, want none", b.Sought)
			}
		})
	})
}

// TestOverlapIsLogged is about routes of others in the network.
func TestOverlapIsLogged(t *testing.T) {
	wide := cloud.Route{Table: "table-1", Dst: netip.MustParsePrefix("10.0.0.0/8"), Target: "vgw-1"}
	everything := cloud.Route{Table: "table-1", Dst: netip.MustParsePrefix("0.0.0.0/0"), Target: "igw-1"}
	run(t, func(b *bed) {
		b.hour()
		if text := b.log(); strings.Count(text, "overlap the network") != 1 || !strings.Contains(text, "10.0.0.0/8 to vgw-1 in table table-1") || strings.Contains(text, "igw-1") {
			b.Errorf("the log is %q, want one warning about the route to vgw-1", text)
		}
	}, wide, everything)
}

func TestRoutesOfHostsThatAreGone(t *testing.T) {
	stranger := routeTo(5, 9) // to a host without a lease
	lost := routeTo(4, 4)     // to a host that does not exist
	run(t, func(b *bed) {
		b.Do(func() { b.Hosts[target(9)] = []netip.Addr{address(9)} })
		b.keeper.SetPeers(cloud.Peers{Hosts: []cloud.Host{lease(2)}})
		b.hour()
		b.expectRoutes("before the store has answered", routeTo(1, 1), routeTo(2, 2), stranger, lost)
		b.answer(2)
		b.after(14 * time.Minute)
		b.expectRoutes("after it has answered", routeTo(1, 1), routeTo(2, 2), stranger)
		b.hour()
		b.expectRoutes("much later", routeTo(1, 1), routeTo(2, 2))
		b.expectWrites("in total", 2)
	}, routeTo(1, 1), routeTo(2, 2), stranger, lost)
}

// TestLeaseArrivesLater expects that a route stays if its lease arrives after it, within the grace period.
func TestLeaseArrivesLater(t *testing.T) {
	run(t, func(b *bed) {
		b.answer(2)
		b.after(12 * time.Minute) // the time after which a store that sends nothing counts as disconnected
		b.answer(2, 3)
		b.hour()
		b.expectRoutes("at the end", routeTo(1, 1), routeTo(3, 3))
	}, routeTo(1, 1), routeTo(3, 3))
}

// TestNothingIsRemovedWithoutTheStore loses the store, and then the route of a new host appears. It
// expects that no route is removed while the store is away, and that the grace period begins again
// each time the store is back.
func TestNothingIsRemovedWithoutTheStore(t *testing.T) {
	run(t, func(b *bed) {
		b.answer(2)
		b.comparison()
		b.setConnected(false)
		b.Do(func() { b.Tabs[0].Routes = append(b.Tabs[0].Routes, routeTo(3, 3), routeTo(9, 9)) })
		b.hour()
		for range 6 {
			b.setConnected(true)
			b.after(time.Minute - time.Second)
			b.setConnected(false) // for less than the time between two comparisons
			b.after(time.Second)
		}
		b.expectRoutes("while the store is away", routeTo(1, 1), routeTo(3, 3), routeTo(9, 9))
		b.setConnected(true)
		b.answer(2)
		b.after(14 * time.Minute)
		b.expectRoutes("after its return", routeTo(1, 1), routeTo(3, 3))
		b.answer(2, 3)
		b.hour()
		b.expectRoutes("with the lease", routeTo(1, 1), routeTo(3, 3))
	}, routeTo(1, 1))
}

// TestUnreadableLease expects that routes without a lease stay while the store has a lease that cannot
// be read. The own route must be put nevertheless.
func TestUnreadableLease(t *testing.T) {
	run(t, func(b *bed) {
		b.keeper.SetPeers(cloud.Peers{Complete: true, Unreadable: true})
		b.hour()
		b.expectRoutes("with an unreadable lease", routeTo(1, 1), routeTo(4, 4))
	}, routeTo(1, 2), routeTo(4, 4))
}

// TestManyRemovals has more routes of hosts that are gone than one comparison removes. It expects that
// all of them are removed in few comparisons, except one whose lease arrives between two removals.
func TestManyRemovals(t *testing.T) {
	routes := []cloud.Route{routeTo(1, 1)}
	for n := 100; n < 150; n++ {
		routes = append(routes, routeTo(n, n))
	}
	run(t, func(b *bed) {
		b.answer()
		b.Do(func() {
			b.Removed = func(left int) {
				if left == 40 {
					b.answer(115) // its route is one of the first 20
				}
			}
		})
		before := b.compared()
		b.hour()
		b.expectRoutes("after an hour", routeTo(1, 1), routeTo(115, 115))
		b.expectWrites("after an hour", 49)
		if n := b.compared() - before; n > 25 {
			b.Errorf("%d comparisons in an hour, want few", n)
		}
	}, routes...)
}

// TestSlowRemovals deletes this host's route by hand while the keeper removes routes, and each removal takes long. It
// expects that this host's route is put before all removals are done.
func TestSlowRemovals(t *testing.T) {
	routes := []cloud.Route{routeTo(1, 1)}
	for n := 100; n < 119; n++ {
		routes = append(routes, routeTo(n, n))
	}
	run(t, func(b *bed) {
		b.Slow = 25 * time.Second
		b.answer()
		for len(b.writes()) == 0 { // until the first removal
			b.after(time.Second)
		}
		b.deleteOwn()
		b.after(2 * time.Minute)
		b.Do(func() {
			if !slices.Contains(b.Tabs[0].Routes, routeTo(1, 1)) {
				b.Error("this host's route waits for the removals")
			}
		})
		b.hour()
		b.expectRoutes("after an hour", routeTo(1, 1))
	}, routes...)
}

// TestRemovalIsDenied expects that a host that may not remove routes names the missing right for each
// route, and tries to remove the routes less and less often.
func TestRemovalIsDenied(t *testing.T) {
	run(t, func(b *bed) {
		b.answer()
		b.Do(func() { b.Denied = map[string]bool{"remove": true} })
		b.after(10 * time.Minute)
		b.expectResult("without the right", "remove route 10.5.5.0/24 to host-5 in table table-1, which leads to nowhere: permission memory:remove is missing: page.md has the policy to paste; remove route 10.5.4.0/24", 0)
		b.hour()
		b.Do(func() {
			if b.Denials < 2 || b.Denials > 60 {
				b.Errorf("%d tries to remove two routes in 70 minutes, want growing pauses", b.Denials)
			}
		})
	}, routeTo(1, 1), routeTo(5, 5), routeTo(4, 4))
}

func TestOutage(t *testing.T) {
	run(t, func(b *bed) {
		b.deleteOwn()
		b.setFails(cloud.ErrUnavailable)
		before := b.compared()
		b.after(10 * time.Minute)
		b.expectResult("while the cloud is away", "does not answer", 0)
		if tries := b.compared() - before; tries > 60 {
			b.Errorf("%d tries in ten minutes, want growing pauses", tries)
		}
		good := b.keeper.Report().Good
		b.setFails(nil)
		b.after(time.Minute)
		b.expectRoutes("after the outage", routeTo(1, 1))
		b.expectResult("after the outage", "", 1)
		if later := b.keeper.Report().Good; !later.After(good) {
			b.Errorf("last good comparison at %v, and %v before the outage", later, good)
		}
	}, routeTo(1, 1))
}

func TestQuotaIsNamed(t *testing.T) {
	run(t, func(b *bed) {
		b.deleteOwn()
		b.Do(func() { b.Quota = 2 })
		before := b.compared()
		b.hour()
		if n := b.compared() - before; n > 30 {
			b.Errorf("%d tries in an hour, want growing pauses", n)
		}
		b.expectResult("with a full table", "put route 10.5.1.0/24 to host-1 in table table-1: table table-1 has reached its limit of 2 routes", 0)
		if r := b.keeper.Report(); r.Tables[0].Quota[prefix.IPv4] != 2 || r.Routes[0].Present {
			b.Errorf("report %+v, want the quota and the missing route", r)
		}
		b.Do(func() { b.DeleteByHand("table-1", subnet(3)) })
		b.comparison()
		b.expectResult("with place in the table", "", 0)
		if r := b.keeper.Report(); r.Tables[0].Quota[prefix.IPv4] != 2 {
			b.Errorf("report %+v, want the quota that is known", r)
		}
		b.Do(func() { b.Tabs[0].Routes = append(b.Tabs[0].Routes, routeTo(3, 3)) })
		b.comparison()
		if r := b.keeper.Report(); len(r.Tables[0].Quota) > 0 {
			b.Errorf("report %+v, want no quota after it was raised", r)
		}
		b.Do(func() { b.DeleteByHand("table-1", subnet(3)) })
		b.expectRoutes("with place in the table", routeTo(2, 2), routeTo(1, 1))
	}, routeTo(1, 1), routeTo(2, 2), routeTo(3, 3))
}

// TestQuotaOfOneFamilyIsKept has more routes of IPv6 in the table than the quota of IPv4 permits. It expects that the
// report keeps the known quota of IPv4.
func TestQuotaOfOneFamilyIsKept(t *testing.T) {
	routes := []cloud.Route{routeTo(1, 1), routeTo(2, 2)}
	for n := range 3 {
		routes = append(routes, cloud.Route{Table: "table-1", Dst: netip.MustParsePrefix(fmt.Sprintf("fd00:10:5:%d::/64", n)), Target: target(2), ByCall: true})
	}
	run(t, func(b *bed) {
		expect := func(what string, want map[prefix.Family]int) {
			b.Helper()
			if got := b.keeper.Report().Tables[0]; !maps.Equal(got.Quota, want) || got.Used[prefix.IPv6] != 3 {
				b.Errorf("%s: quotas %v with %v routes, want %v and 3 routes of IPv6", what, got.Quota, got.Used, want)
			}
		}
		expect("at the start", map[prefix.Family]int{})
		b.deleteOwn()
		b.Do(func() {
			b.Quota = 2
			b.Tabs[0].Routes = append(b.Tabs[0].Routes, routeTo(3, 3))
		})
		b.hour()
		expect("with a full table", map[prefix.Family]int{prefix.IPv4: 2})
		b.Do(func() { b.DeleteByHand("table-1", subnet(3)) })
		b.comparison()
		expect("with place in the table", map[prefix.Family]int{prefix.IPv4: 2})
	}, routes...)
}

func TestRightIsRevoked(t *testing.T) {
	run(t, func(b *bed) {
		b.deleteOwn()
		b.Do(func() { b.Denied = map[string]bool{"put": true} })
		b.comparison()
		b.expectResult("without the right", "permission memory:put is missing", 0)
		b.Do(func() { b.Denied = nil })
		b.comparison()
		b.expectRoutes("with the right again", routeTo(1, 1))
	}, routeTo(1, 1))
}

// TestWriteIsConfirmed deletes a route right after it was put. It expects that the keeper does not wait
// for the next resync to put the route again.
func TestWriteIsConfirmed(t *testing.T) {
	run(t, func(b *bed) {
		b.deleteOwn()
		b.after(30 * time.Second)
		b.expectRoutes("half a minute after the start", routeTo(1, 1))
		b.expectResult("a route that no reading has shown", "", 0)
	})
}

// TestWriteIsSeenLater expects that a route that was put is reported as seen only after the table was
// read again.
func TestWriteIsSeenLater(t *testing.T) {
	run(t, func(b *bed) {
		for _, seen := range []bool{false, true} {
			if r := b.keeper.Report().Routes[0]; !r.Present || r.Seen != seen {
				b.Errorf("route %+v, want it present, and seen: %v", r, seen)
			}
			b.after(30 * time.Second)
		}
	})
}

// TestContestedRoute lets another program replace this host's route every second. It expects that the
// pauses of the keeper grow, so that it does not use up the calls that the cloud allows for all hosts.
func TestContestedRoute(t *testing.T) {
	run(t, func(b *bed) {
		b.answer(2)
		for range 3600 {
			b.Do(func() {
				b.DeleteByHand("table-1", subnet(1))
				b.Tabs[0].Routes = append(b.Tabs[0].Routes, routeTo(1, 2))
			})
			b.after(time.Second)
		}
		if n := len(b.writes()); n < 5 || n > 40 {
			b.Errorf("%d writes in an hour, want some, with growing pauses", n)
		}
	}, routeTo(1, 1))
}

func TestResultWaitsForTheFirstComparison(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := cloud.NewKeeper(cloud.KeeperConfig{Cloud: &cloudtest.Memory{}, Resync: resync, Compared: func() {}}) // not run
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, compared, _ := k.Last(); compared {
			t.Error("a comparison that nothing has made")
		}
		if _, err := k.Result(ctx); err == nil {
			t.Error("no error although nothing was compared")
		}
	})
}
