// SPDX-License-Identifier: Apache-2.0

package gce

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/backend/gce/gcetest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/schema"
)

var (
	own4, own6 = netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("fd00:77::1")
	peer4      = netip.MustParseAddr("192.168.77.2")
	dst        = netip.MustParsePrefix("10.5.1.0/24")
)

const (
	self = gcetest.Zone + "/host-1"
	peer = gcetest.Zone + "/host-2"
)

// open returns a fake cloud with two instances. The environment variables that it sets make this
// process the first of these instances.
func open(t *testing.T) *gcetest.Server {
	t.Helper()
	return openBehind(t, func(api http.Handler) http.Handler { return api })
}

// openBehind is like open. between returns the handler that gets the calls of the APIs in place of
// api, and may pass them on to api.
func openBehind(t *testing.T, between func(api http.Handler) http.Handler) *gcetest.Server {
	t.Helper()
	s := gcetest.New()
	s.AddInstance(1, own4, own6)
	s.AddInstance(2, peer4)
	api := cloudtest.Serve(t, between(s))
	t.Setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", api+"/compute/v1/")
	t.Setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER", api)
	t.Setenv("GCE_METADATA_HOST", strings.TrimPrefix(cloudtest.Serve(t, s.Metadata("host-1")), "http://"))
	return s
}

// newBackend returns a backend with the Backend object raw, on a dual-stack host.
func newBackend(t *testing.T, raw string) *cloudnet.Backend {
	t.Helper()
	b := backendtest.Cloud(t, New, raw, prefix.IPv4, prefix.IPv6)
	// The server needs less time for an operation than Google, so the pauses are shorter.
	v := b.Cloud.(*vpc)
	connect := v.connect
	v.connect = func(ctx context.Context) (*client, error) {
		c, err := connect(ctx)
		if err == nil {
			c.poll = wait.Backoff{Least: 20 * time.Millisecond, Most: 100 * time.Millisecond}
		}
		return c, err
	}
	return b
}

// joined returns the cloud of host 1 after Join. raw is the Backend object.
func joined(t *testing.T, raw string) cloud.Cloud {
	t.Helper()
	c := newBackend(t, raw).Cloud
	if target, err := c.Join(t.Context()); err != nil || target != self {
		t.Fatalf("target %q, error %v", target, err)
	}
	return c
}

func routeTo(target string) cloud.Route {
	return cloud.Route{Table: gcetest.Network, Dst: dst, Target: target, ByCall: true}
}

// to returns a route of the API to dst. It leads to the instance with that number.
func to(name, description string, number, priority int) gcetest.Route {
	return gcetest.Route{
		Name: name, Description: description, Network: gcetest.NetworkURL(gcetest.Network), DestRange: dst.String(), Priority: priority,
		Instance: fmt.Sprintf("projects/%s/zones/%s/instances/host-%d", gcetest.Project, gcetest.Zone, number),
	}
}

// seen returns the routes to dst that the cloud shows.
func seen(t *testing.T, c cloud.Cloud) (all []cloud.Route) {
	t.Helper()
	for _, r := range cloudtest.Routes(t, c) {
		if r.Dst == dst {
			all = append(all, r)
		}
	}
	return all
}

// expectOnly checks that there is exactly one route to dst, and that it leads to the host with that
// number.
func expectOnly(t *testing.T, s *gcetest.Server, number int) {
	t.Helper()
	all := s.RoutesTo(gcetest.Network, dst)
	if len(all) != 1 || !strings.HasSuffix(all[0].Instance, fmt.Sprintf("/host-%d", number)) {
		t.Errorf("routes %+v, want one to host %d", all, number)
	}
}

// TestSuite runs the suite of all clouds twice. In one run, a full quota refuses calls. In the other
// run, the calls succeed, and their operations fail.
func TestSuite(t *testing.T) {
	for name, late := range map[string]bool{"refused calls": false, "failing operations": true} {
		t.Run(name, func(t *testing.T) { testSuite(t, late) })
	}
}

func testSuite(t *testing.T, lateQuota bool) {
	open := func(t *testing.T) cloudtest.Fixture {
		var lose func()
		s := openBehind(t, func(api http.Handler) http.Handler {
			api, lose = cloudtest.LoseAnswers(api, func(r *http.Request, _ string) bool {
				return r.Method == http.MethodPost || r.Method == http.MethodDelete
			})
			return api
		})
		s.SetScopes("host-1", "cloud-platform") // without this scope the check cannot ask for permissions in the project
		s.SetPageSize(1)
		return cloudtest.Fixture{
			SelfAddress: own4,
			Cloud:       newBackend(t, `{"Type":"gce"}`).Cloud, Table: gcetest.Network, Peer: peer, PeerAddress: peer4,
			DeleteByHand: func(dst netip.Prefix) { s.DeleteRoutes(gcetest.Network, dst) },
			EndPeer:      func() { s.Delete("host-2") },
			StopPeer: func() {
				i := s.Instances()[1]
				i.Stopped = true
				s.SetInstance(i)
			},
			AddGateway: func(dst netip.Prefix) {
				s.AddRoute(gcetest.Route{Name: "gateway", Network: gcetest.NetworkURL(gcetest.Network), DestRange: dst.String(), Priority: 1000, VPN: "projects/project-a/regions/r/vpnTunnels/tunnel-1"})
			},
			SetQuota:   func(n int) { s.SetQuota(n, lateQuota) },
			Deny:       func() { s.Deny("compute.routes.create", true) },
			LoseAnswer: lose,
			Throttle:   s.Throttle,
			SetAway:    s.SetAway,
			Gaps:       s.Gaps,
			AddOfOther: func(netip.Prefix) { s.AddRoute(to("x", "flanneld cluster=other network=10.5.0.0/16", 2, 1000)) },
		}
	}
	cloudtest.Run(t, open)
	cloudtest.RunMarked(t, open)
}

// TestReplace checks that Put replaces a route to another host. There must be a route at all times,
// and two routes must never share the packets.
func TestReplace(t *testing.T) {
	for name, was := range map[string]gcetest.Route{
		"a route of flanneld":              to("flannel-10-5-1-0-24-0a0a0a0a", "flanneld cluster= network=10.5.0.0/16", 2, 1000),
		"a route of a former Network":      to("flannel-10-5-1-0-24-0a0a0a0a", "flanneld cluster= network=10.0.0.0/8", 2, 1000),
		"a route that has replaced one":    to("flannel-10-5-1-0-24-0a0a0a0a", "flanneld cluster= network=10.5.0.0/16", 2, 990),
		"a route of flannel":               to("flannel-10-5-1-0-24", "", 2, 1000),
		"a route with a high number":       to("flannel-10-5-1-0-24", "", 2, 5000),
		"a route to an instance that ends": to("flannel-10-5-1-0-24", "", 9, 1000),
	} {
		s := open(t)
		s.AddRoute(was)
		c := joined(t, `{}`)
		if err := c.Put(t.Context(), routeTo(self), true); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		expectOnly(t, s, 1)
		if s.Gaps() > 0 || s.Shared() > 0 {
			t.Errorf("%s: %d gaps, %d times two routes with the same priority, want none", name, s.Gaps(), s.Shared())
		}
		if got := seen(t, c); len(got) != 1 || got[0] != routeTo(self) {
			t.Errorf("%s: routes %v, want the one that was put", name, got)
		}
	}
}

// TestReplaceInAFullNetwork checks that Put replaces a route if the quota of the VPC network has no
// place for a second route, and that the error for a route to another destination names the quota.
func TestReplaceInAFullNetwork(t *testing.T) {
	s := open(t)
	s.AddRoute(to("flannel-10-5-1-0-24", "", 2, 1000))
	s.SetQuota(1, false)
	c := joined(t, `{}`)
	if err := c.Put(t.Context(), routeTo(self), true); err != nil {
		t.Error(err)
	}
	expectOnly(t, s, 1)
	err := c.Put(t.Context(), cloud.Route{Table: gcetest.Network, Dst: netip.MustParsePrefix("10.5.2.0/24"), Target: self, ByCall: true}, false)
	if quota, ok := errors.AsType[*cloud.QuotaError](err); !ok || quota.Quota != "ROUTES" || quota.Limit != 1 || !strings.Contains(err.Error(), "table network-a has reached its limit of 1 routes, quota ROUTES") {
		t.Errorf("error %v, want one that names quota, limit and network", err)
	}
}

// failing returns a function for openBehind. That function passes the nth call about routes with
// this method to the handler fail, and all other calls to the API. nth counts from 1.
func failing(method string, nth int, fail http.HandlerFunc) func(http.Handler) http.Handler {
	return func(api http.Handler) http.Handler {
		var n atomic.Int64
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == method && strings.Contains(r.URL.Path, "/global/routes") && n.Add(1) == int64(nth) {
				fail(w, r)
				return
			}
			api.ServeHTTP(w, r)
		})
	}
}

// TestFullNetworkKeepsRoutes checks replacements that fail in a VPC network whose quota has no
// place for a second route. At the end there must be a route that works.
func TestFullNetworkKeepsRoutes(t *testing.T) {
	refuse := func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, `{"error":{"message":"The resource is in use","errors":[{"reason":"resourceInUse"}]}}`, http.StatusBadRequest)
	}
	elsewhere := to("elsewhere", "flanneld cluster= network=10.5.0.0/16", 2, 1000)
	for name, test := range map[string]struct {
		routes  []gcetest.Route
		quota   int
		between func(http.Handler) http.Handler
		err     string
		left    []string // names of the routes that must be left; empty means a new route
	}{
		"the new route is refused after the deletion": {[]gcetest.Route{elsewhere}, 1, failing(http.MethodPost, 2, refuse), "resourceInUse", []string{"elsewhere"}},
		"the quota is far exceeded":                   {[]gcetest.Route{elsewhere, to("far", "", 2, 1000)}, 1, nil, "its limit of 1 routes", []string{"elsewhere", "far"}},
		"only the useful route could go": {
			[]gcetest.Route{to("self", "flanneld cluster= network=10.5.0.0/16", 1, 1000), to("by-hand", "", 1, 1000)}, 2, nil, "its limit of 2 routes", []string{"self", "by-hand"},
		},
		"a route to nowhere goes first": {
			[]gcetest.Route{elsewhere, to("nowhere", "flanneld cluster= network=10.5.0.0/16", 9, 1000)}, 2, failing(http.MethodDelete, 2, refuse), "resourceInUse", []string{"elsewhere", ""},
		},
	} {
		between := test.between
		if between == nil {
			between = func(api http.Handler) http.Handler { return api }
		}
		s := openBehind(t, between)
		for _, r := range test.routes {
			s.AddRoute(r)
		}
		s.SetQuota(test.quota, false)
		c := joined(t, `{}`)
		if err := c.Put(t.Context(), routeTo(self), true); err == nil || !strings.Contains(err.Error(), test.err) {
			t.Errorf("%s: error %v, want %q", name, err, test.err)
		}
		var left []string
		for _, r := range s.RoutesTo(gcetest.Network, dst) {
			if !slices.ContainsFunc(test.routes, func(was gcetest.Route) bool { return was.Name == r.Name }) {
				r.Name = ""
			}
			left = append(left, r.Name)
		}
		if !slices.Equal(left, test.left) {
			t.Errorf("%s: the routes %q are left, want %q", name, left, test.left)
		}
		if s.Forwarding(gcetest.Network)[dst].Name == "" {
			t.Errorf("%s: no route is left that works", name)
		}
	}
}

// TestLostAnswerInAFullNetwork loses the answer to the deletion that makes place for a new route.
// The same Put must insert the new route all the same.
func TestLostAnswerInAFullNetwork(t *testing.T) {
	var s *gcetest.Server
	s = openBehind(t, failing(http.MethodDelete, 1, func(_ http.ResponseWriter, r *http.Request) {
		s.ServeHTTP(httptest.NewRecorder(), r)
		panic(http.ErrAbortHandler)
	}))
	s.AddRoute(to("flannel-10-5-1-0-24", "", 2, 1000))
	s.SetQuota(1, false)
	s.SetDelay(0) // the deletion has ended when the next call comes
	c := joined(t, `{}`)
	if err := c.Put(t.Context(), routeTo(self), true); err != nil {
		t.Error(err)
	}
	expectOnly(t, s, 1)
}

// TestInterruptedReplacement checks a replacement that fails after the new route was inserted, and
// before the old one was deleted. The next Put must only delete the old route.
func TestInterruptedReplacement(t *testing.T) {
	s := open(t)
	s.AddRoute(to("flannel-10-5-1-0-24", "", 2, 1000))
	s.Deny("compute.routes.delete", true)
	c := joined(t, `{}`)
	if err := c.Put(t.Context(), routeTo(self), true); err == nil || !strings.Contains(err.Error(), "permission compute.routes.delete is missing") {
		t.Errorf("error %v, want one about the permission", err)
	}
	if got := seen(t, c); len(got) != 2 {
		t.Errorf("routes %v, want both", got)
	}
	if i := s.Forwarding(gcetest.Network)[dst]; i.Name != "host-1" {
		t.Errorf("packets go to %s, want host-1", i.Name)
	}
	s.Deny("compute.routes.delete", false)
	before := s.Writes()
	if err := c.Put(t.Context(), routeTo(self), true); err != nil {
		t.Error(err)
	}
	expectOnly(t, s, 1)
	if n := s.Writes() - before; n != 1 {
		t.Errorf("%d calls, want only a deletion", n)
	}
}

// TestForeignRoutes checks that routes of other programs, clusters and VPC networks stay.
func TestForeignRoutes(t *testing.T) {
	other := to("flannel-10-5-1-0-24", "", 2, 1000)
	other.Network = gcetest.NetworkURL("network-b")
	tagged := to("tagged", "flanneld cluster= network=10.5.0.0/16", 2, 900)
	tagged.Tags = []string{"some"}
	for name, test := range map[string]struct {
		route   gcetest.Route
		foreign string // part of Route.Foreign; empty if the wanted route can exist beside that of the other program
	}{
		"another VPC network":      {other, ""},
		"for some instances":       {tagged, ""},
		"another cluster":          {to("x", "flanneld cluster=blue network=10.5.0.0/16", 2, 1000), `which belongs to another cluster by its description "flanneld cluster=blue network=10.5.0.0/16"`},
		"a blank description":      {to("x", " ", 2, 1000), "is not of this cluster"},
		"another program":          {to("kubernetes-1", "k8s-node-route", 2, 1000), `whose description "k8s-node-route" is not of this cluster`},
		"a name like that of us":   {to("flannel-10-5-2-0-24", "", 2, 1000), "is not of this cluster"},
		"one that leads nowhere":   {to("x", "k8s-node-route", 9, 1000), ""},
		"nowhere with priority 0":  {to("x", "k8s-node-route", 9, 0), ""},
		"preferred to one of ours": {to("x", "k8s-node-route", 2, 10), "is not of this cluster"},
		"equal to one of ours":     {to("x", "k8s-node-route", 2, 1000), "is not of this cluster"},
		"less than one of ours":    {to("x", "k8s-node-route", 2, 1001), ""},
		"a long description":       {to("x", strings.Repeat("x", 2000), 2, 1000), "xx…\" is not"},
	} {
		s := open(t)
		c := joined(t, `{}`)
		if strings.HasSuffix(name, "one of ours") {
			if err := c.Put(t.Context(), routeTo(self), false); err != nil {
				t.Fatal(err)
			}
		}
		s.AddRoute(test.route)
		err := c.Put(t.Context(), routeTo(self), true)
		if test.foreign == "" && err != nil || test.foreign != "" && !errors.Is(err, cloud.ErrExists) {
			t.Errorf("%s: error %v, want ErrExists %v", name, err, test.foreign != "")
		}
		got := seen(t, c)
		if test.foreign == "" != slices.Contains(got, routeTo(self)) {
			t.Errorf("%s: routes %v", name, got)
		}
		// Only a foreign route that takes packets may count as one that does.
		blocks := func(r cloud.Route) bool { return r.Foreign != "" && r.State == cloud.Carrying && r.Dst == dst }
		if at := slices.IndexFunc(got, blocks); at >= 0 != (test.foreign != "") || at >= 0 && !strings.Contains(got[at].Foreign, test.foreign) {
			t.Errorf("%s: routes %v, want a foreign one: %q", name, got, test.foreign)
		}
		for _, target := range []string{self, peer} {
			if err := c.Remove(t.Context(), routeTo(target)); err != nil {
				t.Error(err)
			}
		}
		network := test.route.Network[strings.LastIndex(test.route.Network, "/")+1:]
		if left := s.RoutesTo(network, dst); len(left) != 1 || left[0].Name != test.route.Name {
			t.Errorf("%s: %+v is left, want the route of the other", name, left)
		}
	}
}

// TestRivalsOfTheSameRoute checks a route of another program to the same destination. It must have
// the same effect on Put whether the wanted route exists or not.
func TestRivalsOfTheSameRoute(t *testing.T) {
	for name, test := range map[string]struct {
		route gcetest.Route
		place bool // the wanted route can exist beside that of the other program
	}{
		"preferred":           {to("x", "other", 2, 999), false},
		"equal":               {to("x", "other", 2, 1000), false},
		"less preferred":      {to("x", "other", 2, 1001), true},
		"preferred, nowhere":  {to("x", "other", 9, 10), true},
		"priority 0, nowhere": {to("x", "other", 9, 0), true},
	} {
		s := open(t)
		c := joined(t, `{}`)
		if err := c.Put(t.Context(), routeTo(self), false); err != nil {
			t.Fatal(err)
		}
		s.AddRoute(test.route)
		if there := slices.Contains(seen(t, c), routeTo(self)); there != test.place {
			t.Errorf("%s: the route is there: %v, want %v", name, there, test.place)
		}
		for _, what := range []string{"there", "missing"} {
			if err := c.Put(t.Context(), routeTo(self), true); (err == nil) != test.place {
				t.Errorf("%s, and the route is %s: error %v", name, what, err)
			}
			s.DeleteRoutes(gcetest.Network, dst)
			s.AddRoute(test.route)
		}
		if all := s.RoutesTo(gcetest.Network, dst); len(all) != 1 || all[0].Priority != test.route.Priority {
			t.Errorf("%s: routes %+v", name, all)
		}
	}
}

// TestPriorityZero checks that Put returns an error for a route with the priority 0, because no
// route can be preferred to it.
func TestPriorityZero(t *testing.T) {
	s := open(t)
	s.AddRoute(to("flannel-10-5-1-0-24", "", 2, 0))
	if err := joined(t, `{}`).Put(t.Context(), routeTo(self), true); err == nil || !strings.Contains(err.Error(), "has the priority 0, which no other route can precede") {
		t.Errorf("error %v, want one about the priority", err)
	}
}

// manyRoutes returns n routes of a VPC network. Half of them are of another program.
func manyRoutes(n int) (all []route) {
	for i := range n {
		dst := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
		r := route{Name: fmt.Sprint(i), Network: gcetest.NetworkURL(gcetest.Network), DestRange: dst.String(), Priority: 1000, Type: "STATIC", Instance: "projects/p/zones/z/instances/i"}
		r.Description = cloud.Describe("", []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, dst)
		if i%2 == 0 {
			r.Description = "other"
		}
		all = append(all, r)
	}
	return all
}

// TestManyRoutes checks that tableOf returns as many routes as the largest VPC networks have.
func TestManyRoutes(t *testing.T) {
	open(t)
	all := manyRoutes(20_000)
	if table := joined(t, `{}`).(*vpc).tableOf(all); len(table.Routes) != len(all) {
		t.Errorf("the table has %d of %d routes, want all", len(table.Routes), len(all))
	}
}

// BenchmarkTableOf shows whether the time grows with the square of the number of routes.
func BenchmarkTableOf(b *testing.B) {
	for _, n := range []int{1000, 20_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			v := &vpc{}
			all := manyRoutes(n)
			for b.Loop() {
				v.tableOf(all)
			}
		})
	}
}

// TestInstanceThatCannotForward checks that a route to another instance without canIpForward is not
// lost. The flanneld on that instance reports the fault.
func TestInstanceThatCannotForward(t *testing.T) {
	s := open(t)
	s.AddRoute(to("flannel-10-5-1-0-24", "", 2, 1000))
	s.SetForward("host-2", false)
	c := joined(t, `{}`)
	if got := seen(t, c); len(got) != 1 || got[0] != routeTo(peer) {
		t.Errorf("routes %v, want one that is not lost", got)
	}
	if err := c.Put(t.Context(), routeTo(self), false); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want ErrExists", err)
	}
}

// TestFleet lets managed instances live in the cloud: a new one has the name of an old one, to which routes lead. After
// eight days the routes of all of them would fill the quota of 250.
//
//stages:rest the days of a fleet take half a minute
func TestFleet(t *testing.T) {
	s := open(t)
	s.Delete("host-1")
	s.Delete("host-2")
	cloudtest.Connectionless(t, s)
	cloudtest.Live(t, cloudtest.Fleet{
		Start: func(t *testing.T, _, number int, address netip.Addr) cloud.Cloud {
			metadata := &access.Metadata{
				URL: "http://metadata", Root: "computeMetadata/v1/", Flavor: "Google", Token: account + "token",
				HTTP: &http.Client{Transport: cloudtest.InProcess{Handler: s.Metadata(s.AddInstance(number, address).Name)}},
			}
			c := &client{
				Client: access.NewClient(metadata, &cloud.Calls{}), endpoints: endpoints{compute: "https://compute.googleapis.com/compute/v1/"},
				poll: wait.Backoff{Least: leastPoll, Most: mostPoll}, project: gcetest.Project, number: gcetest.Number, zone: gcetest.Zone,
				instance: fmt.Sprintf("host-%d", number),
			}
			return backendtest.CloudAt(t, func(raw json.RawMessage, env backend.Env) (backend.Backend, []string, error) {
				b, warnings, err := New(raw, env)
				if err == nil {
					b.(*cloudnet.Backend).Cloud.(*vpc).connect = func(context.Context) (*client, error) { return c, nil }
				}
				return b, warnings, err
			}, address)
		},
		End:      func(number int) { s.Delete(fmt.Sprintf("host-%d", number)) },
		SetQuota: func(n int) { s.SetQuota(n, false) },
		Resync:   24 * time.Hour,
		Routes:   func() int { return s.Count(gcetest.Network) },
	}, 9, false)
}

// TestAdoption checks that a route to this host stays, even if another program has made it.
func TestAdoption(t *testing.T) {
	for _, r := range []gcetest.Route{to("flannel-10-5-1-0-24", "", 1, 1000), to("by-hand", "made by an operator", 1, 700)} {
		s := open(t)
		s.AddRoute(r)
		c := joined(t, `{"Cluster":"blue"}`)
		if got := seen(t, c); len(got) != 1 || got[0] != routeTo(self) {
			t.Errorf("%s: routes %v, want a right one", r.Name, got)
		}
		if err := c.Put(t.Context(), routeTo(self), false); err != nil || s.Writes() > 0 {
			t.Errorf("%s: error %v, %d writes, want none", r.Name, err, s.Writes())
		}
	}
}

// TestNames checks that routes have different names if they are in different VPC networks, or of
// different clusters or priorities, because names are unique in a project. A name must have at most
// 63 bytes.
func TestNames(t *testing.T) {
	seen := map[string]bool{}
	six := netip.MustParsePrefix("fd00:1111:2222:3333:4444:5555:6666:7777/128")
	for _, network := range []string{"a", "b"} {
		for _, cluster := range []string{"", "blue"} {
			for _, priority := range []int{1000, 999} {
				for _, dst := range []netip.Prefix{dst, six} {
					name := route{Network: network, Instance: "i", DestRange: dst.String(), Priority: priority}.name(cluster)
					if seen[name] || len(name) > 63 {
						t.Errorf("the name %s is too long or exists twice", name)
					}
					seen[name] = true
				}
			}
		}
	}
}

func TestDescription(t *testing.T) {
	s := open(t)
	if err := joined(t, `{"Cluster":"blue"}`).Put(t.Context(), routeTo(self), false); err != nil {
		t.Fatal(err)
	}
	r := s.RoutesTo(gcetest.Network, dst)[0]
	if r.Description != "flanneld cluster=blue network=10.5.0.0/16" || !strings.HasPrefix(r.Name, "flannel-10-5-1-0-24-") || r.Priority != 1000 {
		t.Errorf("route %+v", r)
	}
}

func TestCheckNamesEveryMissingPermission(t *testing.T) {
	all := []string{
		"compute.instances.get", "compute.instances.use", "compute.routes.list", "compute.routes.create", "compute.routes.delete",
		"compute.networks.updatePolicy", "compute.globalOperations.get",
	}
	s := open(t)
	s.SetScopes("host-1", "cloud-platform")
	for _, p := range all {
		s.Deny(p, true)
	}
	cloudtest.Lacks(t, "without all of them", newBackend(t, `{}`).Cloud, all...)
	if s.Writes() > 0 {
		t.Errorf("the check has changed something: %v", s.Calls())
	}
	// Without the Resource Manager API, the error of a call names the missing permission.
	s.DisableManager()
	for _, p := range all {
		s.Deny(p, p == "compute.routes.list")
	}
	cloudtest.Lacks(t, "without the Resource Manager API", newBackend(t, `{}`).Cloud, "compute.routes.list")
	s.Deny("compute.routes.list", false)
	if err := newBackend(t, `{}`).Cloud.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestScopes checks Check with different access scopes. The scope that is sufficient for routes is
// not sufficient to ask about permissions in the project. The log must say so.
func TestScopes(t *testing.T) {
	for scope, want := range map[string]struct{ err, log string }{
		"compute":          {"", `reason="projects.testIamPermissions: permission https://www.googleapis.com/auth/cloud-platform is missing`},
		"cloud-platform":   {},
		"compute.readonly": {"permission https://www.googleapis.com/auth/compute is missing", ""},
	} {
		s := open(t)
		s.SetScopes("host-1", scope)
		var out bytes.Buffer
		ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&out))))
		err := newBackend(t, `{}`).Cloud.Check(ctx)
		if want.err == "" && err != nil || want.err != "" && (err == nil || !strings.Contains(err.Error(), want.err)) {
			t.Errorf("%s: error %v, want %q", scope, err, want.err)
		}
		if got := out.String(); !strings.Contains(got, want.log) || want.log == "" && got != "" {
			t.Errorf("%s: log %q, want %q", scope, got, want.log)
		}
	}
	// The scope is taken away from a running host.
	s := open(t)
	c := joined(t, `{}`)
	s.SetScopes("host-1", "compute.readonly")
	err := c.Put(t.Context(), routeTo(self), false)
	if missing, ok := errors.AsType[*cloud.MissingError](err); !ok || !slices.Equal(missing.Permissions, []string{computeScope}) {
		t.Errorf("error %v, want one about the scope", err)
	}
}

// TestRefusedHosts checks that Check returns the reason for an instance that cannot use the
// backend.
func TestRefusedHosts(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*gcetest.Instance)
		err    string
	}{
		"cannot forward":     {func(i *gcetest.Instance) { i.CanIPForward = false }, "instance zone-a/host-1 cannot forward packets of pods, because its canIpForward is off"},
		"no service account": {func(i *gcetest.Instance) { i.Scopes = nil }, "the instance has no service account"},
		"no scope":           {func(i *gcetest.Instance) { i.Scopes = []string{"https://www.googleapis.com/auth/compute.readonly"} }, "permission https://www.googleapis.com/auth/compute is missing"},
		"a shared network":   {func(i *gcetest.Instance) { i.Network = "999/shared" }, "the VPC network shared is shared by project 999"},
		"another address":    {func(i *gcetest.Instance) { i.Addresses = []netip.Addr{peer4} }, "the metadata service does not know [192.168.77.1 fd00:77::1]"},
	} {
		s := open(t)
		i := s.Instances()[0]
		test.change(&i)
		s.SetInstance(i)
		cloudtest.CheckFails(t, name, newBackend(t, `{}`).Cloud, test.err, false)
	}
}

func TestCheckRefusesTheRangeOfTheNetwork(t *testing.T) {
	open(t)
	c := backendtest.CloudOn(t, New, "192.168.128.0/17").Cloud
	cloudtest.CheckFails(t, "a network in the VPC network", c, "192.168.128.0/17 overlaps 192.168.0.0/16 of the VPC network network-a", false)
}

// TestLongOperation checks that Put waits for the end of its operation. If the operation does not
// end, Put must return an error for which cloud.Transient is true.
func TestLongOperation(t *testing.T) {
	s := open(t)
	s.SetDelay(600 * time.Millisecond)
	c := joined(t, `{}`)
	begin := time.Now()
	if err := c.Put(t.Context(), routeTo(self), false); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took < 600*time.Millisecond {
		t.Errorf("put has returned after %v, before the operation was done", took)
	}
	expectOnly(t, s, 1)
	s.SetDelay(time.Hour)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := c.Put(ctx, routeTo(peer), true); !cloud.Transient(err) || !strings.Contains(err.Error(), "has not ended") {
		t.Errorf("error %v, want one about the operation", err)
	}
	if err := c.Put(t.Context(), routeTo(peer), false); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want ErrExists", err)
	}
}

// TestPolls checks how often flanneld asks for the status of an operation that takes as long as one of
// Google.
func TestPolls(t *testing.T) {
	s := open(t)
	s.SetDelay(2500 * time.Millisecond)
	b, _, err := New([]byte(`{}`), backendtest.Env(1500, prefix.IPv4))
	if err != nil {
		t.Fatal(err)
	}
	c := b.(*cloudnet.Backend).Cloud
	if _, err := c.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Put(t.Context(), routeTo(self), false); err != nil {
		t.Fatal(err)
	}
	polls := 0
	for _, call := range s.Calls() {
		if call.Name == "globalOperations.get" {
			polls++
		}
	}
	if polls < 1 || polls > 3 {
		t.Errorf("%d looks at an operation of 2.5 s, want 1 to 3", polls)
	}
}

// TestConnections checks that no connection to the metadata service stays open, because each change
// of the configuration creates a new client.
func TestConnections(t *testing.T) {
	s := open(t)
	var connected atomic.Int64
	server := httptest.NewUnstartedServer(s.Metadata("host-1"))
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			connected.Add(1)
		}
		if state == http.StateClosed {
			connected.Add(-1)
		}
	}
	server.Start()
	t.Cleanup(server.Close)
	t.Setenv("GCE_METADATA_HOST", strings.TrimPrefix(server.URL, "http://"))
	for range 3 {
		if err := newBackend(t, `{}`).Cloud.Check(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	waittest.Eventually(t, 5*time.Second, "connections to the metadata service", func() error {
		if n := connected.Load(); n > 0 {
			return fmt.Errorf("%d are open, want none", n)
		}
		return nil
	})
}

// TestEndpoints checks which URLs New accepts in the environment variables that replace the endpoints of the
// API. New must accept https URLs, and http URLs of localhost or a loopback address. It must refuse others,
// because flanneld sends its token to these URLs.
func TestEndpoints(t *testing.T) {
	for _, variable := range []string{"CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER"} {
		for url, ok := range map[string]bool{
			"https://psc.example.org/compute/v1/": true, "http://127.0.0.1:8080/": true, "http://[::1]/": true, "http://localhost:1/": true,
			"http://192.168.77.1/": false, "http://127.0.0.1.example.org/": false, "http://": false, "https:///": false, "ftp://127.0.0.1/": false, "compute": false, "http://user@10.0.0.1/": false,
		} {
			open(t)
			t.Setenv(variable, url)
			_, _, err := New([]byte(`{}`), backendtest.Env(1500, prefix.IPv4))
			if ok && err != nil || !ok && (err == nil || !strings.Contains(err.Error(), variable+" is invalid: expected an https URL, or an http URL of this host")) {
				t.Errorf("%s=%s: error %v", variable, url, err)
			}
		}
	}
}

// TestMessagesAreOneLine checks that a message of the API with line breaks and of any length
// becomes an error of one short line, in an answer and in an operation.
func TestMessagesAreOneLine(t *testing.T) {
	long := `no\nplace \u001b[2J` + strings.Repeat("ü", 100_000)
	answer := `{"error":{"code":400,"message":"` + long + `","errors":[{"reason":"` + long + `"}]}}`
	operation := `{"name":"x","status":"DONE","httpErrorStatusCode":400,"error":{"errors":[{"code":"` + long + `","message":"` + long + `"}]}}`
	for name, reply := range map[string]http.HandlerFunc{
		"an answer":    func(w http.ResponseWriter, _ *http.Request) { http.Error(w, answer, http.StatusBadRequest) },
		"an operation": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, operation) },
	} {
		openBehind(t, failing(http.MethodPost, 1, reply))
		err := joined(t, `{}`).Put(t.Context(), routeTo(self), false)
		if err == nil || !strings.Contains(err.Error(), "no place") || strings.ContainsAny(err.Error(), "\n\x1b") || len(err.Error()) > 3*300 {
			t.Errorf("%s: error of %d bytes: %.400q, want one short line", name, len(err.Error()), err)
		}
	}
}

// TestNewToken checks that flanneld gets a new token if its token becomes invalid before it
// expires.
func TestNewToken(t *testing.T) {
	s := open(t)
	c := joined(t, `{}`)
	s.RotateToken()
	if _, err := c.Tables(t.Context()); err != nil {
		t.Error(err)
	}
	for _, call := range s.Calls() {
		if call.Reason != "" && call.Reason != "authError" {
			t.Errorf("call %+v", call)
		}
	}
}

// TestRedirect checks that a token is not sent to another server after a redirect.
func TestRedirect(t *testing.T) {
	s := open(t)
	backendtest.Redirect(t, New, "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", func() int { return len(s.Calls()) })
}

// TestEndlessPages checks that a list ends with an error if the token of the next page is always
// the same.
func TestEndlessPages(t *testing.T) {
	open(t)
	c := joined(t, `{}`)
	c.(*vpc).api.compute = cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"nextPageToken":"again"}`) }))
	if _, err := c.Tables(t.Context()); err == nil || !strings.Contains(err.Error(), "refers to itself") {
		t.Errorf("error %v, want one about the pages", err)
	}
}

// TestErrors checks what an error means in each of the forms that Google's APIs use.
func TestErrors(t *testing.T) {
	for text, want := range map[string]struct {
		status int
		err    string
		result string // the result that cloud.Calls counts
	}{
		`{"error":{"code":403,"message":"Required 'compute.networks.updatePolicy' permission for 'x'","errors":[{"reason":"forbidden"}]}}`:                                                                                         {403, "permission compute.networks.updatePolicy is missing", "denied"},
		`{"error":{"code":403,"message":"No.","status":"PERMISSION_DENIED"}}`:                                                                                                                                                      {403, "permission compute.routes.create is missing", "denied"},
		`{"error":{"code":403,"message":"Request had insufficient authentication scopes.","errors":[{"reason":"insufficientPermissions"}],"status":"PERMISSION_DENIED","details":[{"reason":"ACCESS_TOKEN_SCOPE_INSUFFICIENT"}]}}`: {403, "permission https://www.googleapis.com/auth/compute is missing", "denied"},
		`{"error":{"code":403,"message":"Rate Limit Exceeded","errors":[{"reason":"rateLimitExceeded"}]}}`:                                                                                                                         {403, "too many (rateLimitExceeded)", "throttled"},
		`{"error":{"code":403,"message":"Quota exceeded","details":[{"reason":"RATE_LIMIT_EXCEEDED"}]}}`:                                                                                                                           {403, "too many", "throttled"},
		`{"error":{"code":403,"message":"Quota 'ROUTES' exceeded.  Limit: 250.0 globally.","errors":[{"reason":"quotaExceeded"}]}}`:                                                                                                {403, "its limit of 250 routes, quota ROUTES", "quota"},
		`{"error":{"code":400,"message":"The resource is not ready","errors":[{"reason":"resourceNotReady"}]}}`:                                                                                                                    {400, "does not answer", "unavailable"},
		`{"error":{"code":403,"message":"API has not been used in project","errors":[{"reason":"accessNotConfigured"}]}}`:                                                                                                          {403, "403 accessNotConfigured: API has not been used", "failed"},
		`<html>proxy</html>`: {502, "the cloud does not answer: 502 Bad Gateway", "unavailable"},
		``:                   {429, "too many", "throttled"},
		`{}`:                 {404, "404 Not Found", "failed"},
	} {
		err := classify("routes.insert", decodeError(want.status, []byte(text)))
		var calls cloud.Calls
		calls.Count("x", err)
		if !strings.Contains(err.Error(), want.err) || calls.Counts()[0].Result != want.result {
			t.Errorf("%s: %v (%s), want %q (%s)", text, err, calls.Counts()[0].Result, want.err, want.result)
		}
	}
}

func TestSecretsAreNeverShown(t *testing.T) {
	with := func(set func(*gcetest.Server)) backendtest.Fault[*gcetest.Server] {
		return backendtest.Fault[*gcetest.Server]{Raw: `{}`, Set: set}
	}
	backendtest.Leaks[*gcetest.Server]{
		New: New, Open: open, Secrets: []string{gcetest.Token}, Shown: []string{"permission compute.instances.get is missing", "502"},
		Faults: []backendtest.Fault[*gcetest.Server]{
			with(func(*gcetest.Server) {}),
			with(func(s *gcetest.Server) { s.SetAway(true) }),
			with(func(s *gcetest.Server) { s.Deny("compute.instances.get", true) }),
			with(func(s *gcetest.Server) { s.Delete("host-1") }),
			with(func(*gcetest.Server) { t.Setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", "http://127.0.0.1:1") }),
			with(func(*gcetest.Server) { // a proxy whose answer contains the token
				t.Setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					http.Error(w, r.Header.Get("Authorization"), http.StatusBadGateway)
				})))
			}),
		},
	}.Run(t)
}

func TestConfig(t *testing.T) {
	backendtest.Config(t, New, map[string]backendtest.Want{
		`{"Type":"gce"}`:                {},
		`{"Cluster":"blue-1"}`:          {},
		`{"Cluster":"Blue"}`:            {Err: `Backend.Cluster is "Blue": want 1 to 63 characters`},
		`{"Cluster":"a b"}`:             {Err: `Backend.Cluster is "a b"`},
		`{"Cluster":7}`:                 {Err: "Cluster"},
		`{"Clutser":"a"}`:               {Warning: `unknown key "Clutser" is ignored, the nearest known key is "Cluster"`},
		`{"AccessToken":"very-secret"}`: {Warning: `key "AccessToken" may contain a secret`},
	})
}

// TestAPIDescription holds the fields that are read and written, and the states of a route, against the description of the
// Compute API.
func TestAPIDescription(t *testing.T) {
	api := schema.Load("gce")
	for name, answer := range map[string]any{"Route": route{}, "Instance": instance{}, "Operation": operation{}} {
		if err := api.CheckType(name, reflect.TypeOf(answer)); err != nil {
			t.Error(err)
		}
	}
	for _, status := range api.Values("Route.routeStatus") {
		if _, ok := statuses()[status]; !ok {
			t.Errorf("the status %s has no state", status)
		}
	}
	for _, code := range api.Values("Route.warnings.code") {
		if _, ok := nextHops()[code]; ok != strings.HasPrefix(code, "NEXT_HOP_") {
			t.Errorf("the warning %s has a state: %v", code, ok)
		}
	}
	for want, r := range map[cloud.State]route{
		cloud.Carrying: {Warnings: []warning{{"NEXT_HOP_CANNOT_IP_FORWARD"}, {"DEPRECATED_RESOURCE_USED"}}},
		cloud.Changing: {Status: "PENDING"},
		cloud.Idle:     {Warnings: []warning{{"NEXT_HOP_CANNOT_IP_FORWARD"}, {"NEXT_HOP_NOT_RUNNING"}}},
		cloud.Gone:     {Status: "ACTIVE", Warnings: []warning{{"NEXT_HOP_INSTANCE_NOT_FOUND"}}},
	} {
		if got := r.state(); got != want {
			t.Errorf("%+v: %v, want %v", r, got, want)
		}
	}
}
