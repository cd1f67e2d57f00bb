// SPDX-License-Identifier: Apache-2.0

// Package gcetest is a server for tests. It speaks the parts of the Compute API and the Resource
// Manager API that flanneld uses, and the protocol of the metadata service. Changes are operations
// that take time.
//
//   - gcetest.go is the state of the cloud, and how tests change it.
//   - api.go answers calls. metadata.go is the metadata service.
package gcetest

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/schema"
)

// The project, zone and VPC network of each new Server.
const (
	Project = "project-a"
	Number  = "1234567890"
	Zone    = "zone-a"
	Network = "network-a"
)

// Scope is the beginning of all access scopes.
const Scope = "https://www.googleapis.com/auth/"

// NetworkRange is the range of a subnetwork of the VPC network.
func NetworkRange() netip.Prefix { return netip.MustParsePrefix("192.168.0.0/16") }

// Instance is an instance with one network interface.
type Instance struct {
	Name         string
	Network      string
	Addresses    []netip.Addr
	CanIPForward bool
	Stopped      bool
	Scopes       []string // access scopes, which the server enforces; nil means that there is no service account
}

// Target returns the target of routes to the instance, as flanneld shows it.
func (i Instance) Target() string { return Zone + "/" + i.Name }

func (i Instance) url() string {
	return "projects/" + Project + "/zones/" + Zone + "/instances/" + i.Name
}

// NetworkURL returns the path of a VPC network.
func NetworkURL(name string) string { return "projects/" + Project + "/global/networks/" + name }

// Route is a route in the form of the API.
type Route struct {
	Name        string    `json:"name"`
	Description string    `json:"description,omitempty"`
	Network     string    `json:"network"`
	DestRange   string    `json:"destRange"`
	Priority    int       `json:"priority"`
	Instance    string    `json:"nextHopInstance,omitempty"`
	Gateway     string    `json:"nextHopGateway,omitempty"`
	LocalNet    string    `json:"nextHopNetwork,omitempty"`
	VPN         string    `json:"nextHopVpnTunnel,omitempty"`
	Tags        []string  `json:"tags,omitempty"`
	Type        string    `json:"routeType,omitempty"`
	Warnings    []Warning `json:"warnings,omitempty"`
}

// Warning says why a route gets no packets.
type Warning struct {
	Code string `json:"code"`
}

// Call is a call that the server has answered.
type Call struct {
	Name   string // in the words of the API, such as routes.insert
	Reason string // of the error; empty if there was none
}

// Writes reports whether the call has succeeded and has begun a change.
func (c Call) Writes() bool {
	return c.Reason == "" && (c.Name == "routes.insert" || c.Name == "routes.delete")
}

// failure is an error of a Google API.
type failure struct {
	status          int
	reason, message string
}

func failed(status int, reason, format string, args ...any) *failure {
	return &failure{status, reason, fmt.Sprintf(format, args...)}
}

// Server is the cloud. It is an http.Handler for calls, and safe for concurrent use.
type Server struct {
	description schema.API
	mux         *http.ServeMux // knows the patterns of the calls

	mu         sync.Mutex
	instances  map[string]Instance
	routes     []Route
	operations []*operation
	calls      []Call
	denied     map[string]bool // permissions that are denied
	throttled  int
	away       bool
	noManager  bool
	quota      int
	lateQuota  bool
	delay      time.Duration
	pageSize   int
	token      int // number of the valid token
	gaps       int
	shared     int
}

// operation is a change that is applied at a certain time.
type operation struct {
	name   string
	route  string
	apply  func() *failure // nil after it was called
	at     time.Time
	failed *failure
}

// New returns a Server with a VPC network that has the default route and one range.
func New() *Server {
	s := &Server{
		description: schema.Load("gce"), mux: http.NewServeMux(), instances: map[string]Instance{}, denied: map[string]bool{},
		quota: 250, pageSize: 500, delay: 10 * time.Millisecond,
	}
	for pattern := range names() {
		s.mux.Handle(pattern, s)
	}
	s.routes = []Route{
		{Name: "default-route-1", Network: NetworkURL(Network), DestRange: "0.0.0.0/0", Priority: 1000, Gateway: "projects/" + Project + "/global/gateways/default-internet-gateway", Type: "STATIC"},
		{Name: "default-route-2", Network: NetworkURL(Network), DestRange: NetworkRange().String(), LocalNet: NetworkURL(Network), Type: "SUBNET"},
	}
	return s
}

// change takes the lock, applies the operations that are due, and then runs f.
func (s *Server) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.applyDue()
	f()
}

// applyDue applies the operations that are due. It counts the destinations that lose their last working
// route by a change, and those with two routes between which the routers choose for each connection.
func (s *Server) applyDue() {
	for _, op := range s.operations {
		if op.apply == nil || time.Now().Before(op.at) {
			continue
		}

		before := s.forwarding()
		op.failed = op.apply()
		op.apply = nil
		after := s.forwarding()
		for key := range before {
			if len(after[key]) == 0 {
				s.gaps++
			}
		}

		for _, to := range after {
			if len(to) > 1 {
				s.shared++
			}
		}
	}
}

// place is a destination in a VPC network.
type place struct {
	network string
	dst     netip.Prefix
}

// forwarding returns the instances to which the routers deliver packets, by destination, in the
// order of their names. Several instances of a destination share the packets.
func (s *Server) forwarding() map[place][]Instance {
	best := map[place]int{}
	to := map[place][]Instance{}
	for _, r := range s.routes {
		i, ok := s.instances[path.Base(r.Instance)]
		if r.Instance == "" || !ok || len(r.Tags) > 0 || s.warning(r) != "" {
			continue
		}

		key := place{path.Base(r.Network), netip.MustParsePrefix(r.DestRange)}
		priority, found := best[key]
		switch {
		case !found || r.Priority < priority:
			best[key] = r.Priority
			to[key] = []Instance{i}
		case r.Priority == priority:
			to[key] = append(to[key], i)
		}
	}

	for _, some := range to {
		slices.SortFunc(some, func(a, b Instance) int { return cmp.Compare(a.Name, b.Name) })
	}
	return to
}

// warning returns the reason why a route gets no packets, or "".
func (s *Server) warning(r Route) string {
	i, ok := s.instances[path.Base(r.Instance)]
	switch {
	case r.Instance == "":
		return ""
	case !ok:
		return "NEXT_HOP_INSTANCE_NOT_FOUND"
	case i.Network != path.Base(r.Network):
		return "NEXT_HOP_INSTANCE_NOT_ON_NETWORK"
	case i.Stopped:
		return "NEXT_HOP_NOT_RUNNING"
	case !i.CanIPForward:
		return "NEXT_HOP_CANNOT_IP_FORWARD"
	}
	return ""
}

// AddInstance adds the instance with the number n, and returns it. The instance can forward
// packets.
func (s *Server) AddInstance(n int, addresses ...netip.Addr) Instance {
	i := Instance{
		Name: fmt.Sprintf("host-%d", n), Network: Network, Addresses: addresses, CanIPForward: true,
		Scopes: []string{Scope + "compute", Scope + "logging.write"},
	}
	s.SetInstance(i)
	return i
}

// SetInstance adds or replaces an instance.
func (s *Server) SetInstance(i Instance) { s.change(func() { s.instances[i.Name] = i }) }

// Delete deletes an instance.
func (s *Server) Delete(name string) { s.change(func() { delete(s.instances, name) }) }

// update changes an instance.
func (s *Server) update(name string, f func(*Instance)) {
	s.change(func() {
		i := s.instances[name]
		f(&i)
		s.instances[name] = i
	})
}

// SetForward sets canIpForward of an instance.
func (s *Server) SetForward(name string, can bool) {
	s.update(name, func(i *Instance) { i.CanIPForward = can })
}

// SetScopes replaces the access scopes of an instance. scopes are without their beginning, Scope.
func (s *Server) SetScopes(name string, scopes ...string) {
	s.update(name, func(i *Instance) {
		i.Scopes = nil
		for _, scope := range scopes {
			i.Scopes = append(i.Scopes, Scope+scope)
		}
	})
}

// AddRoute adds a route, as an operator or another program does.
func (s *Server) AddRoute(r Route) {
	r.Type = cmp.Or(r.Type, "STATIC")
	s.change(func() { s.routes = append(s.routes, r) })
}

// DeleteRoutes deletes the static routes to dst, as an operator does.
func (s *Server) DeleteRoutes(network string, dst netip.Prefix) {
	s.change(func() {
		s.routes = slices.DeleteFunc(s.routes, func(r Route) bool {
			return path.Base(r.Network) == network && r.DestRange == dst.String() && r.Type == "STATIC"
		})
	})
}

// Deny takes a permission away, or gives it back.
func (s *Server) Deny(permission string, denied bool) {
	s.change(func() { s.denied[permission] = denied })
}

// Throttle refuses the next n calls because there were too many.
func (s *Server) Throttle(n int) { s.change(func() { s.throttled = n }) }

// SetAway makes the API unavailable, or available again.
func (s *Server) SetAway(away bool) { s.change(func() { s.away = away }) }

// DisableManager disables the Resource Manager API, as it is in new projects.
func (s *Server) DisableManager() { s.change(func() { s.noManager = true }) }

// SetQuota sets the number of static routes that a VPC network may have. If late is set, the call
// for a further route succeeds, and its operation fails.
func (s *Server) SetQuota(n int, late bool) {
	s.change(func() { s.quota, s.lateQuota = n, late })
}

// SetDelay sets the time that an operation takes.
func (s *Server) SetDelay(delay time.Duration) { s.change(func() { s.delay = delay }) }

// SetPageSize limits the items in one answer.
func (s *Server) SetPageSize(n int) { s.change(func() { s.pageSize = n }) }

// RotateToken makes the present token invalid. The metadata service has a new one.
func (s *Server) RotateToken() { s.change(func() { s.token++ }) }

// RoutesTo returns the static routes to dst in a VPC network.
func (s *Server) RoutesTo(network string, dst netip.Prefix) (all []Route) {
	s.change(func() {
		for _, r := range s.routes {
			if path.Base(r.Network) == network && r.DestRange == dst.String() && r.Type == "STATIC" {
				all = append(all, r)
			}
		}
	})
	return all
}

// Calls returns all calls so far.
func (s *Server) Calls() (all []Call) {
	s.change(func() { all = slices.Clone(s.calls) })
	return all
}

// Writes returns the number of calls that have begun a change.
func (s *Server) Writes() (n int) {
	for _, c := range s.Calls() {
		if c.Writes() {
			n++
		}
	}
	return n
}

// Gaps returns how often a change by a call left a destination without a route that it had before.
func (s *Server) Gaps() (n int) {
	s.change(func() { n = s.gaps })
	return n
}

// Shared returns how often a change by a call left a destination with two instances that share
// its packets.
func (s *Server) Shared() (n int) {
	s.change(func() { n = s.shared })
	return n
}

// Forwarding returns the destinations to which the routers of a VPC network deliver packets, with
// the instance for each.
func (s *Server) Forwarding(network string) map[netip.Prefix]Instance {
	to := map[netip.Prefix]Instance{}
	s.change(func() {
		for key, some := range s.forwarding() {
			if key.network == network {
				to[key.dst] = some[0]
			}
		}
	})
	return to
}

// Instances returns all instances, sorted by name.
func (s *Server) Instances() (all []Instance) {
	s.change(func() {
		for _, name := range slices.Sorted(maps.Keys(s.instances)) {
			all = append(all, s.instances[name])
		}
	})
	return all
}

// Count returns the number of static routes in a VPC network, without the default route.
func (s *Server) Count(network string) (n int) {
	s.change(func() { n = s.count(network) })
	return n
}

func (s *Server) count(network string) (n int) {
	for _, r := range s.routes {
		if r.Type == "STATIC" && path.Base(r.Network) == network && !strings.HasPrefix(r.Name, "default-route") {
			n++
		}
	}
	return n
}
