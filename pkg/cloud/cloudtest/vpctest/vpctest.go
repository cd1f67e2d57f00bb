// SPDX-License-Identifier: Apache-2.0

// Package vpctest is the state of a cloud in which each subnet of the cloud has a route table. Several test
// servers use it, and add the protocols of their clouds. The state has routes that lead to nowhere, a quota,
// throttling, rights, outages, paging, and answers that are older than the last call.
//
//   - vpctest.go contains the functions for tests.
//   - answer.go contains the functions for servers, which they use during a call.
package vpctest

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// The region, VPC and table of each new State. Tests add instances and further tables.
const (
	Region    = "eu-test-1"
	VPC       = "vpc-0a"
	MainTable = "rtb-main"
)

// The keys that the metadata service gives to every instance. Tests check that no message contains Secret or
// Token.
const (
	KeyID  = "id-of-the-role"
	Secret = "secret-key-of-the-role"
	Token  = "token-of-the-role"
)

// VPCRange is the address range of the VPC. Each table has a System route to it.
func VPCRange() netip.Prefix { return netip.MustParsePrefix("192.168.0.0/16") }

// Instance is an instance with one network interface.
type Instance struct {
	ID, Subnet string // the subnet is one of the cloud
	Addresses  []netip.Addr
	Stopped    bool
	// Restricted is set if the cloud delivers to the instance only packets to the instance's own
	// addresses. Then routes to the instance carry no packets. In EC2 the source/dest check does that.
	Restricted bool
}

// IPv4 returns the first IPv4 address of the instance, or the zero Addr if it has none.
func (i Instance) IPv4() netip.Addr {
	for _, a := range i.Addresses {
		if a.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// Route is a route of a table.
type Route struct {
	Number int // identifies the route
	Dst    netip.Prefix
	Target string // in the words of the cloud
	Kind   Kind
	// More contains the other targets of a route with several targets.
	More        []string
	Disabled    bool // an operator has disabled the route, so it carries no packets
	Description string
	Changed     time.Time // the last call that made or changed the route; zero if none did
	// Service is the service of the cloud that manages the route; empty if none does.
	Service string
}

// Kind is the origin of a route.
type Kind string

// Kinds of routes.
const (
	System  Kind = "system"  // the cloud itself has made it
	Custom  Kind = "custom"  // a call has made it
	Learned Kind = "learned" // a gateway has learned it
)

// Call is a call that the server has answered.
type Call struct {
	Name   string
	DryRun bool
	Failed bool // the call has returned an error, as each dry run does
}

// table is a route table.
type table struct {
	subnet string // the subnet that uses the table; empty for the main table, and if none does
	routes []Route
}

// State is the cloud. It is safe for concurrent use.
type State struct {
	// Writing contains the names of the calls that change something.
	Writing []string
	// TargetOf returns the target of routes to an instance.
	TargetOf func(Instance) string

	mu        sync.Mutex
	instances map[string]Instance
	tables    map[string]*table
	past      []snapshot // all states of the tables since New, oldest first
	calls     []Call
	denied    map[string]bool
	throttled int
	away      bool
	quota     int
	lag       time.Duration
	pending   time.Duration
	pageSize  int
	last      int             // number of the last route
	nonces    map[string]bool // nonces of earlier calls
}

// snapshot contains the tables after one change.
type snapshot struct {
	since  time.Time // when the change was made
	tables map[string][]Route
}

// New returns a State with a main table, and a quota of 50 routes of each family in a table. targetOf and writing
// are the fields TargetOf and Writing.
func New(targetOf func(Instance) string, writing ...string) *State {
	s := &State{
		Writing: writing, TargetOf: targetOf, instances: map[string]Instance{}, tables: map[string]*table{},
		denied: map[string]bool{}, nonces: map[string]bool{}, quota: 50, pageSize: 100,
	}
	s.AddTable(MainTable, "")
	return s
}

// change runs f while it holds the lock, and then stores the tables for View.Visible.
func (s *State) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	s.remember()
}

func (s *State) remember() {
	now := snapshot{since: time.Now(), tables: map[string][]Route{}}
	for id, t := range s.tables {
		now.tables[id] = slices.Clone(t.routes)
	}
	s.past = append(s.past, now)
}

// Gaps returns how often a change left a destination in a table without an enabled route, although the destination
// had one before.
func (s *State) Gaps() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var before map[place]bool
	for _, p := range s.past {
		now := p.enabled()
		for to := range before {
			if !now[to] {
				n++
			}
		}
		before = now
	}
	return n
}

// place is a destination in a table.
type place struct {
	table string
	dst   netip.Prefix
}

// enabled returns the destinations that have an enabled route.
func (p snapshot) enabled() map[place]bool {
	all := map[place]bool{}
	for id, routes := range p.tables {
		for _, r := range routes {
			if !r.Disabled {
				all[place{id, r.Dst}] = true
			}
		}
	}
	return all
}

// AddTable adds a table that a subnet uses. If subnet is empty, no subnet uses the table. All subnets for which no
// table was added use MainTable.
func (s *State) AddTable(id, subnet string) {
	s.change(func() {
		s.last++
		s.tables[id] = &table{subnet: subnet, routes: []Route{{Number: s.last, Dst: VPCRange(), Target: "local", Kind: System}}}
	})
}

// AddInstance adds an instance, and returns it. Its id is i- and the number n.
func (s *State) AddInstance(n int, subnet string, addresses ...netip.Addr) Instance {
	i := Instance{ID: fmt.Sprintf("i-%d", n), Subnet: subnet, Addresses: addresses}
	s.change(func() { s.instances[i.ID] = i })
	return i
}

// Terminate removes an instance.
func (s *State) Terminate(id string) { s.change(func() { delete(s.instances, id) }) }

// Stop stops an instance.
func (s *State) Stop(id string) {
	s.change(func() { s.update(id, func(i *Instance) { i.Stopped = true }) })
}

// Restrict sets the field Restricted of an instance, as an operator does.
func (s *State) Restrict(id string, restricted bool) {
	s.change(func() { s.update(id, func(i *Instance) { i.Restricted = restricted }) })
}

func (s *State) update(id string, f func(*Instance)) {
	if i, ok := s.instances[id]; ok {
		f(&i)
		s.instances[id] = i
	}
}

// Instance returns the instance with an id, or the zero Instance if there is none.
func (s *State) Instance(id string) Instance {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.instances[id]
}

// Instances returns all instances, sorted by id.
func (s *State) Instances() (all []Instance) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sortedInstances()
}

func (s *State) sortedInstances() (all []Instance) {
	for _, id := range slices.Sorted(maps.Keys(s.instances)) {
		all = append(all, s.instances[id])
	}
	return all
}

// AddRoute adds r to a table, as an operator or the cloud itself does. r replaces Custom routes to the same
// destination.
func (s *State) AddRoute(id string, r Route) {
	s.change(func() {
		s.tables[id].remove(r.Dst)
		s.add(s.tables[id], r)
	})
}

// AddSecond adds a route without replacing routes to the same destination.
func (s *State) AddSecond(id string, r Route) {
	s.change(func() { s.add(s.tables[id], r) })
}

// DeleteRoute deletes the Custom routes to dst, as an operator does.
func (s *State) DeleteRoute(id string, dst netip.Prefix) {
	s.change(func() { s.tables[id].remove(dst) })
}

// Deny sets whether the permission for the call with this name is missing.
func (s *State) Deny(call string, denied bool) { s.change(func() { s.denied[call] = denied }) }

// Throttle makes the cloud refuse the next n calls because there were too many.
func (s *State) Throttle(n int) { s.change(func() { s.throttled = n }) }

// SetAway makes the service unavailable, or available again.
func (s *State) SetAway(away bool) { s.change(func() { s.away = away }) }

// SetQuota sets the number of routes that calls may make in a table, for each family.
func (s *State) SetQuota(n int) { s.change(func() { s.quota = n }) }

// SetLag makes View.Visible show the tables as they were lag ago.
func (s *State) SetLag(lag time.Duration) { s.change(func() { s.lag = lag }) }

// SetPending makes routes carry packets only some time after the call that makes or changes them.
func (s *State) SetPending(pending time.Duration) { s.change(func() { s.pending = pending }) }

// isPending reports whether r carries no packets yet.
func (s *State) isPending(r Route) bool { return time.Since(r.Changed) < s.pending }

// SetPageSize limits the items in one answer.
func (s *State) SetPageSize(n int) { s.change(func() { s.pageSize = n }) }

// Routes returns the present routes of a table.
func (s *State) Routes(id string) []Route {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.tables[id].routes)
}

// RouteTo returns the target of the route to dst; ok is false if there is no such route.
func (s *State) RouteTo(id string, dst netip.Prefix) (target string, ok bool) {
	for _, r := range s.Routes(id) {
		if r.Dst == dst {
			return r.Target, true
		}
	}
	return "", false
}

// Calls returns all calls so far.
func (s *State) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// Writes returns the number of calls that have changed something.
func (s *State) Writes() int { return s.Succeeded(s.Writing...) }

// Succeeded returns the number of calls with one of these names that have succeeded and were no dry runs.
func (s *State) Succeeded(names ...string) (n int) {
	for _, c := range s.Calls() {
		if slices.Contains(names, c.Name) && !c.DryRun && !c.Failed {
			n++
		}
	}
	return n
}

// Forwarding returns the instances to which the routers of the VPC deliver packets by a table, by
// destination.
func (s *State) Forwarding(id string) map[netip.Prefix]Instance {
	s.mu.Lock()
	defer s.mu.Unlock()
	to := map[netip.Prefix]Instance{}
	for _, r := range s.tables[id].routes {
		for _, i := range s.instances {
			if r.Target == s.TargetOf(i) && !i.Stopped && !i.Restricted && !r.Disabled && !s.isPending(r) {
				to[r.Dst] = i
			}
		}
	}
	return to
}

// add adds a route, and gives it the next number.
func (s *State) add(t *table, r Route) {
	s.last++
	r.Number = s.last
	t.routes = append(t.routes, r)
}

func (t *table) remove(dst netip.Prefix) {
	t.routes = slices.DeleteFunc(t.routes, func(r Route) bool { return r.Dst == dst && r.Kind == Custom })
}

func (s *State) sortedTables() []string { return slices.Sorted(maps.Keys(s.tables)) }
