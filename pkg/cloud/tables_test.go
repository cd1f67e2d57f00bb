// SPDX-License-Identifier: Apache-2.0

package cloud_test

import (
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud"
)

// runTunnelled runs test with a network whose hosts have a tunnel, because the table has a place for only two of the
// three routes. Host 3 lacks rights.
func runTunnelled(t *testing.T, test func(*network)) {
	t.Helper()
	runNetwork(t, func(n *network) {
		n.tunnel, n.views[3].lacks = true, true
		n.Do(func() { n.Tabs[0].Own, n.Quota = true, 2 })
		n.start(1)
		n.start(3)
		n.start(2)
		test(n)
	})
}

// expectTable expects that a host reports that its packets follow table-1. routed tells whether it must report a
// route to itself in that table.
func (n *network) expectTable(what string, host int, routed bool) {
	n.Helper()
	r := n.hosts[host].Report()
	own := len(r.Tables) == 1 && r.Tables[0].Own && r.Tables[0].Name == "table-1"
	seen := len(r.Routes) == 1 && r.Routes[0].Table == "table-1" && r.Routes[0].Dst == subnet(host) && r.Routes[0].Seen && r.Routes[0].Present
	if !own || seen != routed {
		n.Errorf("%s: host %d reports the tables %+v and the routes %+v, want table-1 with a route: %v", what, host, r.Tables, r.Routes, routed)
	}
}

// expectKind expects that the error of a host has the kind want.
func (n *network) expectKind(what string, host int, want string) {
	n.Helper()
	if _, err := n.hosts[host].Result(n.Context()); cloud.Kind(err) != want {
		n.Errorf("%s: host %d has the error %v of the kind %s, want %s", what, host, err, cloud.Kind(err), want)
	}
}

func (n *network) setVacant(vacant bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.vacant = vacant
}

// looks returns how often hosts have asked for the leader.
func (n *network) looks() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.asked
}

// announce makes host 9 the leader, with the announcement text. Host 9 does not exist, so it announces nothing else.
func (n *network) announce(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.leader, n.announced = "host-9", json.RawMessage(text)
}

// TestLeaderAnnouncesTables has a table without a place for host 3. It expects that all hosts know the table and
// whether they have a route, also without a leader, with the next leader and without the store. Then the quota
// grows, and the test expects that host 3 gets a route, and keeps it when the quota is full again.
func TestLeaderAnnouncesTables(t *testing.T) {
	runTunnelled(t, func(n *network) {
		expect := func(what string) {
			t.Helper()
			for host := 1; host <= 3; host++ {
				if n.hosts[host] != nil {
					n.expectTable(what, host, host < 3)
					n.expectKind(what, host, map[bool]string{true: "ok", false: "quota"}[host < 3])
				}
			}
			n.expectWrites(what, 2)
		}
		expect("at the start")
		n.stops[1]()
		n.hosts[1] = nil
		n.setVacant(true)
		n.after(time.Second)
		expect("without a leader")
		n.after(20 * time.Minute) // host 3 asks for the leader seldom
		for host := 2; host <= 3; host++ {
			n.expectTable("long without a leader", host, host < 3)
			n.expectKind("long without a leader", host, "waiting")
		}
		passes := n.passes[3].Load()
		n.setVacant(false)
		n.after(time.Hour)
		expect("with the next leader")
		n.expectLeader("with the next leader", 2)
		if more := n.passes[3].Load() - passes; more > 1 {
			t.Errorf("the host by the tunnel has caused %d passes, want none for equal announcements", more)
		}

		n.setAway(true)
		n.after(time.Hour)
		expect("without the store")
		n.setAway(false)
		n.after(time.Hour)

		n.Do(func() { n.Quota = 3 })
		n.after(3 * resync)
		n.expectTable("with a place", 3, true)
		n.expectKind("with a place", 3, "ok")
		n.expectWrites("with a place", 3)

		n.Do(func() {
			n.Quota = 2
			n.DeleteByHand("table-1", subnet(1))
		})
		n.start(1)
		n.after(3 * resync)
		n.expectTable("without the place of another host", 3, true)
		n.expectTable("without its place", 1, false)
		n.expectKind("without its place", 1, "quota")
		n.expectWrites("without a place", 3)
	})
}

// TestPlacesGoToTheSameHosts expects that each leader puts the same routes into an empty table that has no place for
// all of them.
func TestPlacesGoToTheSameHosts(t *testing.T) {
	for leader := 1; leader <= 3; leader++ {
		runNetwork(t, func(n *network) {
			n.Do(func() { n.Quota = 2 })
			n.start(leader)
			n.Do(func() {
				if have := n.Tabs[0].Routes; len(have) != 2 || have[0].Dst != subnet(1) || have[1].Dst != subnet(2) {
					t.Errorf("the leader %d has put %v, want the routes to the hosts 1 and 2", leader, have)
				}
			})
		})
	}
}

// TestRouteCountsWhenItIsSeen expects that a host does not count a route as seen that a call has just put, because
// the routers may not follow it yet. Announcements without tables must leave the state of the host as it was.
func TestRouteCountsWhenItIsSeen(t *testing.T) {
	runNetwork(t, func(n *network) {
		n.tunnel, n.views[2].lacks = true, true
		n.leader = "host-9"
		for _, step := range []struct {
			what, announced string
			present, seen   bool
			own             bool
			kind            string
			most            time.Duration // time after which the host must know the announcement
		}{
			{"before a comparison", `{"routed":null}`, false, false, false, "waiting", time.Minute},
			{"a full table", `{"routed":[],"unrouted":[{"reason":"full","kind":"quota","subnets":["10.5.2.0/24"]}],"tables":[{"name":"table-1","hosts":["10.5.2.0/24"]}]}`, false, false, true, "quota", time.Minute},
			{"put", `{"routed":["10.5.2.0/24"],"tables":[{"name":"table-1","hosts":["10.5.2.0/24"],"less":["10.5.2.0/24"]}]}`, true, false, true, "ok", 2 * resync},
			{"seen", `{"routed":["10.5.2.0/24"],"tables":[{"name":"table-1","hosts":["10.5.2.0/24"]}]}`, true, true, true, "ok", 20 * time.Second},
			{"too many to announce", `{"routed":[],"rest":true}`, true, true, true, "ok", 2 * resync},
			{"a leader without a tunnel", `{"routed":["10.5.2.0/24"]}`, true, true, true, "ok", 2 * resync},
			{"a leader that has not compared yet", `{"routed":null,"error":"the cloud does not answer"}`, true, true, true, "ok", 2 * resync},
			{"another subnet of the cloud", `{"routed":["10.5.2.0/24"],"tables":[{"name":"table-1"}]}`, true, true, false, "ok", 2 * resync},
			{"one of two tables", `{"routed":[],"unrouted":[{"reason":"full","kind":"nonsense","subnets":["10.5.2.0/24"]}],"tables":[{"name":"table-1","hosts":["10.5.2.0/24"],"more":["10.5.2.0/24"]}]}`, true, true, true, "failed", 2 * resync},
		} {
			n.mu.Lock()
			n.announced = json.RawMessage(step.announced)
			n.mu.Unlock()
			if n.hosts[2] == nil {
				n.start(2)
			}
			n.after(step.most)
			r := n.hosts[2].Report()
			own := slices.ContainsFunc(r.Tables, func(t cloud.TableReport) bool { return t.Own })
			present := slices.ContainsFunc(r.Routes, func(r cloud.RouteReport) bool { return r.Present })
			seen := slices.ContainsFunc(r.Routes, func(r cloud.RouteReport) bool { return r.Seen })
			if own != step.own || present != step.present || seen != step.seen {
				t.Errorf("%s: own table %v, present %v, seen %v, want %+v", step.what, own, present, seen, step)
			}
			n.expectKind(step.what, 2, step.kind)
		}
	})
}

// TestUnknownHostsOfTheLeader expects that hosts know that no route leads to them if they are not in the VPC of the
// leader, or may not forward packets. A host that follows another table must know its route, and no own table.
func TestUnknownHostsOfTheLeader(t *testing.T) {
	runNetwork(t, func(n *network) {
		n.tunnel = true
		n.Do(func() {
			n.Tabs[0].Own = true
			delete(n.Hosts, target(3))
			n.Unfit = map[string]error{target(2): &cloud.DroppedError{Err: errors.New("it forwards no packets")}}
		})
		n.start(1)
		n.start(2, 3)
		for host, kind := range map[int]string{2: "failed", 3: "outside"} {
			n.expectKind("at the start", host, kind)
			if r := n.hosts[host].Report(); len(r.Tables) != 1 || r.Tables[0].Own || len(r.Routes) != 1 || r.Routes[0].Present {
				t.Errorf("host %d reports %+v, want no table that it follows, and no route", host, r)
			}
		}
		n.Do(func() {
			n.Unfit, n.Follow = nil, map[string]string{target(2): "table-9"}
		})
		n.after(3 * resync)
		n.expectKind("in another table", 2, "ok")
		if r := n.hosts[2].Report(); r.Tables[0].Own || !r.Routes[0].Seen {
			t.Errorf("host 2 reports %+v, want a route, and no table that it follows", r)
		}
	})
}

// Announcements about host 2.
const (
	noRoute = `{"routed":[],"unrouted":[{"reason":"full","kind":"quota","subnets":["10.5.2.0/24"]}]}`
	inTable = `{"routed":["10.5.2.0/24"],"tables":[{"name":"table-1","hosts":["10.5.2.0/24"]}]}`
)

// TestNoRouteWithoutTables expects that a host follows an announcement that says that the host has no route, even if
// the announcement has no tables. The report must then have Dropped.
func TestNoRouteWithoutTables(t *testing.T) {
	runNetwork(t, func(n *network) {
		n.tunnel, n.views[2].lacks = true, true
		for _, step := range []struct {
			what, announced string
			dropped         bool
			kind            string
		}{
			{"after a restart", noRoute, true, "quota"},
			{"before a comparison", `{"routed":null}`, true, "waiting"},
			{"without tables", `{"routed":["10.5.2.0/24"]}`, false, "waiting"},
			{"with tables", inTable, false, "ok"},
			{"a route that is gone", noRoute, true, "quota"},
			{"a route that is back", `{"routed":["10.5.2.0/24"]}`, false, "ok"},
			{"a route that comes", `{"routed":[],"unrouted":[{"reason":"soon","kind":"waiting","subnets":["10.5.2.0/24"]}]}`, false, "waiting"},
			{"a route that is gone again", noRoute, true, "quota"},
			{"with tables again", inTable, false, "ok"},
		} {
			n.announce(step.announced)
			if n.hosts[2] == nil {
				n.start(2)
			}
			n.after(2 * resync)
			if r := n.hosts[2].Report(); r.Dropped != step.dropped {
				t.Errorf("%s: the report %+v has Dropped %v, want %v", step.what, r, r.Dropped, step.dropped)
			}
			n.expectKind(step.what, 2, step.kind)
		}
	})
}

// TestHostsWithoutTablesReadSeldom expects that a host that stays without tables reads the announcement after growing
// pauses, because all such hosts read the whole announcement.
func TestHostsWithoutTablesReadSeldom(t *testing.T) {
	for _, announced := range []string{noRoute, `{"routed":["10.5.2.0/24"]}`} {
		runNetwork(t, func(n *network) {
			n.tunnel, n.views[2].lacks = true, true
			n.announce(announced)
			n.start(2)
			if announced != noRoute {
				n.expect("without tables", 2, "the leader host-9 has not announced which tables hosts follow")
			}
			n.after(time.Hour)
			if asked := n.looks(); asked > 60 {
				t.Errorf("%s: the host has read %d times in an hour, want growing pauses", announced, asked)
			}
		})
	}
}

// TestNewHostReadsOften expects that a new host reads the announcement often, because it may be about the host that
// had the subnet before. A host that has been in order for some time must read it seldom.
func TestNewHostReadsOften(t *testing.T) {
	runNetwork(t, func(n *network) {
		n.tunnel, n.views[2].lacks = true, true
		n.announce(inTable)
		n.start(2)
		n.expectKind("by the old announcement", 2, "ok")
		n.announce(noRoute)
		n.after(20 * time.Second)
		n.expectKind("by the new announcement", 2, "quota")
		n.announce(inTable)
		n.after(2 * resync)
		asked := n.looks()
		n.after(time.Hour)
		// Each pause is half a resync period at least.
		if more, most := n.looks()-asked, int(time.Hour/(resync/2)); more > most {
			t.Errorf("a host in order has read %d times in an hour, want at most %d", more, most)
		}
	})
}

// TestLeaderWhosePacketsAreDropped expects that a host does not lead any more when the cloud drops its packets, and
// that it reports Dropped until the next leader announces its route and the tables.
func TestLeaderWhosePacketsAreDropped(t *testing.T) {
	runNetwork(t, func(n *network) {
		n.tunnel = true
		n.Do(func() { n.Tabs[0].Own = true })
		n.start(1)
		n.expectTable("at the start", 1, true)
		n.Do(func() { n.views[1].unjoined = &cloud.DroppedError{Err: errors.New("the check of the source is on")} })
		n.after(2 * resync)
		if r := n.hosts[1].Report(); r.Leading || !r.Dropped {
			t.Errorf("leading %v, dropped %v, want a host that leads no more, and whose packets are dropped", r.Leading, r.Dropped)
		}
		n.announce(`{"routed":["10.5.1.0/24"],"tables":[{"name":"table-1","hosts":["10.5.1.0/24"]}]}`)
		n.after(2 * resync)
		if n.expectTable("with another leader", 1, true); n.hosts[1].Report().Dropped {
			t.Error("packets count as dropped, want them by the cloud, as the leader announces")
		}
	})
}
