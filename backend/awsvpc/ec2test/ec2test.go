// SPDX-License-Identifier: Apache-2.0

// Package ec2test is a server for tests that speaks EC2's Query API and that of the metadata
// service, IMDSv2. It has what emulators of EC2 lack: routes that lead to nowhere, a quota,
// throttling, rights, outages, and answers that are older than the last call.
//
//   - ec2test.go is the state of the cloud, and how tests change it.
//   - api.go answers calls. metadata.go is the metadata service.
package ec2test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// The region, VPC and table of each new Server. Tests add instances and further tables.
const (
	Region    = "eu-test-1"
	VPC       = "vpc-0a"
	MainTable = "rtb-main"
)

// VPCRange is the range of the VPC, to which each table has a route of its own.
func VPCRange() netip.Prefix { return netip.MustParsePrefix("192.168.0.0/16") }

// Instance is an instance with one network interface.
type Instance struct {
	ID, Interface, Subnet string
	Addresses             []netip.Addr
	Stopped               bool // routes to it lead to nowhere
	SourceDestCheck       bool
}

// Route is a route of a table.
type Route struct {
	Dst    netip.Prefix
	Target string // id of a network interface or gateway
	Origin string // CreateRouteTable, CreateRoute or EnableVgwRoutePropagation
}

// table is a route table.
type table struct {
	subnet string // that uses the table; empty for the main table
	tags   map[string]string
	routes []Route
}

// Call is a call that the server has answered.
type Call struct {
	Action string
	DryRun bool
	Code   string // of the error; empty if there was none
}

// Writes reports whether the call has changed something.
func (c Call) Writes() bool {
	return !strings.HasPrefix(c.Action, "Describe") && !c.DryRun && c.Code == ""
}

// Server is the cloud. It is an http.Handler for calls, and safe for concurrent use.
type Server struct {
	mu        sync.Mutex
	instances map[string]Instance
	tables    map[string]*table
	past      []snapshot // oldest first
	calls     []Call
	denied    map[string]bool
	throttled int
	away      bool
	quota     int
	lag       time.Duration
	pageSize  int
}

// snapshot contains the tables at one moment.
type snapshot struct {
	since  time.Time
	tables map[string][]Route
}

// New returns a Server with a main table and EC2's default quota.
func New() *Server {
	s := &Server{instances: map[string]Instance{}, tables: map[string]*table{}, denied: map[string]bool{}, quota: 50, pageSize: 100}
	s.AddTable(MainTable, "", nil)
	return s
}

// change runs f with the lock, and stores the tables after it.
func (s *Server) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	s.remember()
}

func (s *Server) remember() {
	now := snapshot{since: time.Now(), tables: map[string][]Route{}}
	for id, t := range s.tables {
		now.tables[id] = slices.Clone(t.routes)
	}
	s.past = append(s.past, now)
}

// AddTable adds a table for a subnet. With an empty subnet it is not associated with one.
func (s *Server) AddTable(id, subnet string, tags map[string]string) {
	s.change(func() {
		s.tables[id] = &table{subnet: subnet, tags: tags, routes: []Route{{Dst: VPCRange(), Target: "local", Origin: "CreateRouteTable"}}}
	})
}

// AddInstance adds an instance with the number n, whose source/dest check is on. It returns the
// instance.
func (s *Server) AddInstance(n int, subnet string, addresses ...netip.Addr) Instance {
	i := Instance{
		ID: fmt.Sprintf("i-%d", n), Interface: fmt.Sprintf("eni-%d", n), Subnet: subnet, Addresses: addresses, SourceDestCheck: true,
	}
	s.change(func() { s.instances[i.ID] = i })
	return i
}

// Terminate removes an instance with its network interface.
func (s *Server) Terminate(id string) { s.change(func() { delete(s.instances, id) }) }

// AddRoute adds or replaces a route, as an operator or the cloud itself does.
func (s *Server) AddRoute(id string, r Route) {
	s.change(func() { s.tables[id].put(r) })
}

// DeleteRoute deletes a route, as an operator does.
func (s *Server) DeleteRoute(id string, dst netip.Prefix) {
	s.change(func() { s.tables[id].remove(dst) })
}

// Deny refuses an action for lack of a permission, or does not any more.
func (s *Server) Deny(action string, denied bool) { s.change(func() { s.denied[action] = denied }) }

// Throttle refuses the next n calls because there were too many.
func (s *Server) Throttle(n int) { s.change(func() { s.throttled = n }) }

// SetAway makes the service unavailable, or available again.
func (s *Server) SetAway(away bool) { s.change(func() { s.away = away }) }

// SetQuota sets the number of routes that calls may make in a table, for each family.
func (s *Server) SetQuota(n int) { s.change(func() { s.quota = n }) }

// SetLag makes descriptions of tables show the state that they had before that time.
func (s *Server) SetLag(lag time.Duration) { s.change(func() { s.lag = lag }) }

// SetPageSize limits the items in one answer.
func (s *Server) SetPageSize(n int) { s.change(func() { s.pageSize = n }) }

// Routes returns the routes of a table.
func (s *Server) Routes(id string) []Route {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.tables[id].routes)
}

// RouteTo returns the target of the route to dst; ok is false if there is no such route.
func (s *Server) RouteTo(id string, dst netip.Prefix) (target string, ok bool) {
	for _, r := range s.Routes(id) {
		if r.Dst == dst {
			return r.Target, true
		}
	}
	return "", false
}

// Instance returns an instance.
func (s *Server) Instance(id string) Instance {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.instances[id]
}

// Instances returns all instances, sorted by id.
func (s *Server) Instances() []Instance {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Instance
	for _, id := range slices.Sorted(maps.Keys(s.instances)) {
		all = append(all, s.instances[id])
	}
	return all
}

// SetCheck sets the source/dest check of an instance, as an operator does.
func (s *Server) SetCheck(id string, check bool) {
	s.change(func() {
		i := s.instances[id]
		i.SourceDestCheck = check
		s.instances[id] = i
	})
}

// Calls returns all calls so far.
func (s *Server) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// Writes returns the number of calls that have changed something.
func (s *Server) Writes() (n int) {
	for _, c := range s.Calls() {
		if c.Writes() {
			n++
		}
	}
	return n
}

// Forwarding returns the destinations to which the routers of the VPC deliver packets by a
// table, with the instance for each. An instance with the source/dest check gets none.
func (s *Server) Forwarding(id string) map[netip.Prefix]Instance {
	s.mu.Lock()
	defer s.mu.Unlock()
	to := map[netip.Prefix]Instance{}
	for _, r := range s.tables[id].routes {
		if i, ok := s.at(r.Target); ok && !i.Stopped && !i.SourceDestCheck {
			to[r.Dst] = i
		}
	}
	return to
}

// at returns the instance that has a network interface.
func (s *Server) at(networkInterface string) (Instance, bool) {
	for _, i := range s.instances {
		if i.Interface == networkInterface {
			return i, true
		}
	}
	return Instance{}, false
}

// lost reports whether the target of a route does not exist or does not run.
func (s *Server) lost(target string) bool {
	if !strings.HasPrefix(target, "eni-") {
		return false
	}
	i, ok := s.at(target)
	return !ok || i.Stopped
}

// visible returns the routes that descriptions show now, by table.
func (s *Server) visible() map[string][]Route {
	seen := s.past[0]
	for _, p := range s.past {
		if time.Since(p.since) >= s.lag {
			seen = p
		}
	}
	return seen.tables
}

func (s *Server) sortedTables() []string { return slices.Sorted(maps.Keys(s.tables)) }

func (t *table) put(r Route) {
	t.remove(r.Dst)
	t.routes = append(t.routes, r)
}

func (t *table) remove(dst netip.Prefix) {
	t.routes = slices.DeleteFunc(t.routes, func(r Route) bool { return r.Dst == dst && r.Origin == "CreateRoute" })
}

// count returns the number of routes of dst's family that calls have made.
func (t *table) count(dst netip.Prefix) (n int) {
	for _, r := range t.routes {
		if r.Origin == "CreateRoute" && r.Dst.Addr().BitLen() == dst.Addr().BitLen() {
			n++
		}
	}
	return n
}
