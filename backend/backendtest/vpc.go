// SPDX-License-Identifier: Apache-2.0

package backendtest

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
	"github.com/flanneld/flanneld/subnet"
)

// VPC is a backend for a cloud in which each subnet of the cloud can have its own route table, and
// the server of that cloud. Its methods test what all these backends must do.
type VPC struct {
	New      backend.Factory
	Type     string // name of the backend
	Page     string // path of the documentation page about permissions
	Families []prefix.Family
	// Open returns a new cloud with the instances i-1 and i-2, and its server. It makes this process
	// the host i-1.
	Open func(*testing.T) (*vpctest.State, http.Handler)
	// Metadata returns the metadata service of an instance.
	Metadata func(vpctest.Instance) http.Handler

	API, MetadataAPI string // environment variables with the addresses of the API and of the metadata service
	Create, Delete   string // calls that make and delete a route
	Right            string // permission that Create needs
	Self, Peer       string // targets of routes to i-1 and i-2
	Gateway          string // target of a route to something that is not an instance
	Unmarked         bool   // the routes of the cloud have no mark of their cluster
}

// Subnet is the destination of routes of these tests.
func Subnet() netip.Prefix { return netip.MustParsePrefix("10.5.1.0/24") }

// RouteTo returns the route to Subnet() that leads to target, in the main table.
func RouteTo(target string) cloud.Route {
	return cloud.Route{Table: vpctest.MainTable, Dst: Subnet(), Target: target, ByCall: true}
}

// Backend returns the backend with that Backend object.
func (v VPC) Backend(t *testing.T, raw string) *cloudnet.Backend {
	t.Helper()
	return Cloud(t, v.New, raw, v.Families...)
}

// Joined creates a backend, calls Join on its Cloud, and returns that Cloud. The caller must call
// v.Open first, which makes this process the host i-1. The test fails if Join does not return v.Self,
// the target of routes to i-1.
func (v VPC) Joined(t *testing.T) cloud.Cloud {
	t.Helper()
	c := v.Backend(t, `{}`).Cloud
	if self, err := c.Join(t.Context()); err != nil || self != v.Self {
		t.Fatalf("target %q, error %v, want %s", self, err, v.Self)
	}
	return c
}

// Suite runs the tests that all clouds must pass. changes reports whether a request changes a
// route.
func (v VPC) Suite(t *testing.T, changes func(r *http.Request, body string) bool) {
	open := func(t *testing.T) cloudtest.Fixture {
		s, h := v.Open(t)
		api, lose := cloudtest.LoseAnswers(h, changes)
		t.Setenv(v.API, cloudtest.Serve(t, api))
		return cloudtest.Fixture{
			AddOfOther: func(dst netip.Prefix) {
				s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: dst, Target: v.Peer, Kind: vpctest.Custom, Description: ofOther})
			},
			Cloud: v.Backend(t, `{"Type":"`+v.Type+`","Overflow":"vxlan"}`).Cloud, Table: vpctest.MainTable, Peer: v.Peer, PeerAddress: s.Instance("i-2").IPv4(),
			IPv4Only:     !slices.Contains(v.Families, prefix.IPv6),
			DeleteByHand: func(dst netip.Prefix) { s.DeleteRoute(vpctest.MainTable, dst) },
			SelfAddress:  s.Instance("i-1").IPv4(),
			EndPeer:      func() { s.Terminate("i-2") },
			StopPeer:     func() { s.Stop("i-2") },
			AddGateway: func(dst netip.Prefix) {
				s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: dst, Target: v.Gateway, Kind: vpctest.Custom})
			},
			SetQuota:   s.SetQuota,
			Deny:       func() { s.Deny(v.Create, true) },
			Throttle:   s.Throttle,
			SetAway:    s.SetAway,
			LoseAnswer: lose,
			Gaps:       func() int { return s.Succeeded(v.Delete) },
		}
	}

	cloudtest.Run(t, open)
	if !v.Unmarked {
		cloudtest.RunMarked(t, open)
	}
}

// OwnTable checks that the backend uses the route table of the subnet that contains this host,
// and not the first table. own is that subnet of the cloud, and other is another subnet.
func (v VPC) OwnTable(t *testing.T, own, other string) {
	t.Helper()
	s, _ := v.Open(t)
	s.SetPageSize(1)
	s.AddTable("rtb-a", other)
	s.AddTable("rtb-z", own)
	tables, err := v.Joined(t).Tables(t.Context())
	if err != nil || len(tables) != 1 || tables[0].ID != "rtb-z" {
		t.Errorf("tables %v, error %v, want that of this host's subnet", tables, err)
	}
}

// OldAnswers checks that Put works while the descriptions of the cloud are out of date and do
// not show the last calls. It is for clouds whose calls name a route by its destination.
func (v VPC) OldAnswers(t *testing.T) {
	t.Helper()
	s, _ := v.Open(t)
	s.SetLag(time.Hour)
	c := v.Joined(t)
	r := RouteTo(v.Self)
	if err := c.Put(t.Context(), r, true); err != nil { // there is no route to replace yet
		t.Error(err)
	}
	if err := c.Put(t.Context(), r, false); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want ErrExists", err)
	}
	if err := c.Put(t.Context(), r, true); err != nil {
		t.Error(err)
	}
	if target, _ := s.RouteTo(vpctest.MainTable, r.Dst); target != v.Self {
		t.Errorf("the route leads to %q, want %s", target, v.Self)
	}
}

// RoutesOfOthers checks that routes of operators and gateways stay, even if they lead to this
// instance. Upstream flannel deleted such routes. It also checks that the backend adopts a route to
// this instance whose destination is in the network.
func (v VPC) RoutesOfOthers(t *testing.T) {
	t.Helper()
	s, _ := v.Open(t)
	for _, r := range []vpctest.Route{
		{Dst: netip.MustParsePrefix("0.0.0.0/0"), Target: v.Self, Kind: vpctest.Custom},
		{Dst: netip.MustParsePrefix("172.16.0.0/16"), Target: v.Self, Kind: vpctest.Custom},
		{Dst: netip.MustParsePrefix("10.9.0.0/16"), Target: "vgw-1", Kind: vpctest.Learned},
		{Dst: Subnet(), Target: v.Self, Kind: vpctest.Custom},
	} {
		s.AddRoute(vpctest.MainTable, r)
	}

	c := v.Joined(t)
	before := s.Routes(vpctest.MainTable)
	writes := s.Writes()
	if err := c.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if got := cloudtest.Routes(t, c); !slices.Contains(got, RouteTo(v.Self)) {
		t.Errorf("routes %v, want that of flannel to this instance adopted", got)
	}

	for _, target := range []string{v.Peer, "vgw-1"} {
		if err := c.Remove(t.Context(), RouteTo(target)); err != nil {
			t.Error(err)
		}
	}
	if after := s.Routes(vpctest.MainTable); s.Writes() > writes || len(after) != len(before) {
		t.Errorf("%d writes, routes %v", s.Writes()-writes, after)
	}
}

// ofOther is the description of a route of another cluster.
const ofOther = "flanneld cluster=green network=10.5.0.0/16"

// Clusters checks which routes Put and Remove may change, for a host of the cluster blue and
// for a host of a cluster without a name. The descriptions of the present routes name several
// clusters, or none. Routes of another cluster must stay, even a route to this host.
func (v VPC) Clusters(t *testing.T) {
	t.Helper()
	const blue = "flanneld cluster=blue network=10.5.0.0/16"
	const unnamed = "flanneld cluster= network=10.5.0.0/16"
	for _, test := range []struct {
		cluster string
		present *vpctest.Route // target and description before Put; nil if there is no route
		foreign string         // part of Route.Foreign; then Put must return ErrExists
		left    vpctest.Route  // the route after Put
	}{
		{"blue", nil, "", vpctest.Route{Target: v.Self, Description: blue}},
		{"", nil, "", vpctest.Route{Target: v.Self, Description: unnamed}},
		{"blue", &vpctest.Route{Target: v.Peer}, "", vpctest.Route{Target: v.Self, Description: blue}},
		{"blue", &vpctest.Route{Target: v.Peer, Description: "flanneld"}, "", vpctest.Route{Target: v.Self, Description: blue}},
		{"blue", &vpctest.Route{Target: v.Peer, Description: unnamed}, "", vpctest.Route{Target: v.Self, Description: blue}},
		{"blue", &vpctest.Route{Target: v.Peer, Description: blue}, "", vpctest.Route{Target: v.Self, Description: blue}},
		{"blue", &vpctest.Route{Target: v.Peer, Description: ofOther}, `another cluster by its description "` + ofOther + `"`, vpctest.Route{Target: v.Peer, Description: ofOther}},
		{"", &vpctest.Route{Target: v.Peer, Description: ofOther}, `another cluster by its description "` + ofOther + `"`, vpctest.Route{Target: v.Peer, Description: ofOther}},
		{"blue", &vpctest.Route{Target: v.Self, Description: ofOther}, "", vpctest.Route{Target: v.Self, Description: ofOther}},
	} {
		s, _ := v.Open(t)
		name := fmt.Sprintf("cluster %q, present %+v", test.cluster, test.present)
		if test.present != nil {
			r := *test.present
			r.Dst = Subnet()
			r.Kind = vpctest.Custom
			s.AddRoute(vpctest.MainTable, r)
		}

		c := v.Backend(t, `{"Cluster":"`+test.cluster+`"}`).Cloud
		if _, err := c.Join(t.Context()); err != nil {
			t.Fatal(err)
		}
		expect := func(when string) {
			t.Helper()
			routes := slices.DeleteFunc(s.Routes(vpctest.MainTable), func(r vpctest.Route) bool { return r.Dst != Subnet() })
			if len(routes) != 1 || routes[0].Target != test.left.Target || routes[0].Description != test.left.Description {
				t.Errorf("%s: routes %+v %s, want %+v", name, routes, when, test.left)
			}
		}
		if err := c.Put(t.Context(), RouteTo(v.Self), true); test.foreign == "" && err != nil || test.foreign != "" && !errors.Is(err, cloud.ErrExists) {
			t.Errorf("%s: error %v, want it refused: %q", name, err, test.foreign)
		}
		expect("after Put")
		for _, r := range cloudtest.Routes(t, c) {
			if r.Dst == Subnet() && (test.foreign == "" && r.Foreign != "" || !strings.Contains(r.Foreign, test.foreign)) {
				t.Errorf("%s: the route is %+v", name, r)
			}
		}
		if test.left.Description != ofOther {
			continue
		}

		for _, target := range []string{v.Self, v.Peer} {
			if err := c.Remove(t.Context(), RouteTo(target)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		expect("after Remove")
	}
}

// Pages checks that the backend reads all routes and instances if one answer does not contain
// all of them, and the states of routes to instances that do not run. subnet is the subnet
// of the cloud that contains the instances.
func (v VPC) Pages(t *testing.T, subnet string) {
	t.Helper()
	s, _ := v.Open(t)
	s.SetQuota(1000)
	s.SetPageSize(7)
	lost := map[string]cloud.State{}
	for n := range 230 {
		i := s.AddInstance(100+n, subnet, netip.AddrFrom4([4]byte{192, 168, 78, byte(n)}))
		s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(n), 0}), 24), Target: s.TargetOf(i), Kind: vpctest.Custom})
		lost[s.TargetOf(i)] = map[string]cloud.State{"i-120": cloud.Idle, "i-329": cloud.Gone}[i.ID]
	}

	s.Stop("i-120")
	s.Terminate("i-329")
	found := 0
	got := cloudtest.Routes(t, v.Joined(t))
	for _, r := range got {
		if r.Lost() {
			found++
		}
		if r.State != lost[r.Target] {
			t.Errorf("%v: want the state %v", r, lost[r.Target])
		}
	}
	if len(got) != 231 || found != 2 {
		t.Errorf("%d routes, %d lost, want 231 and 2", len(got), found)
	}
}

// Denied contains calls that are denied, and the permissions that Check must name because of
// that.
type Denied struct{ Calls, Permissions []string }

// Rights checks that Check names all missing permissions, and changes nothing.
func (v VPC) Rights(t *testing.T, tests ...Denied) {
	t.Helper()
	for _, test := range tests {
		s, _ := v.Open(t)
		for _, call := range test.Calls {
			s.Deny(call, true)
		}
		cloudtest.Lacks(t, fmt.Sprint(test.Calls), v.Backend(t, `{}`).Cloud, test.Permissions...)
		if s.Writes() > 0 {
			t.Errorf("without %v: the check has changed something: %v", test.Calls, s.Calls())
		}
	}
}

// Refused describes a host that cannot use the backend, and the expected error.
type Refused struct {
	Values    map[string]string    // see ReplaceMetadata
	Fault     func(*vpctest.State) // may be nil
	Network   string               // range of pod addresses; empty means 10.5.0.0/16
	Err       string
	Transient bool
}

// RefusedHosts checks the error for each host that cannot use the backend, and that nothing is
// changed. The keys of tests are names.
func (v VPC) RefusedHosts(t *testing.T, tests map[string]Refused) {
	t.Helper()
	for name, test := range tests {
		s, _ := v.Open(t)
		v.ReplaceMetadata(t, s, test.Values)
		if test.Fault != nil {
			test.Fault(s)
		}
		cloudtest.CheckFails(t, name, CloudOn(t, v.New, cmp.Or(test.Network, "10.5.0.0/16")).Cloud, test.Err, test.Transient)
		if s.Writes() > 0 {
			t.Errorf("%s: the check has changed something", name)
		}
	}
}

// ReplaceMetadata replaces values of the metadata service of i-1. The keys of values are the ends
// of the paths of these values. For a key with an empty value, the service answers with status 404.
func (v VPC) ReplaceMetadata(t *testing.T, s *vpctest.State, values map[string]string) {
	t.Helper()
	h := v.Metadata(s.Instance("i-1"))
	t.Setenv(v.MetadataAPI, cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for path, text := range values {
			switch {
			case !strings.HasSuffix(r.URL.Path, path):
			case text == "":
				http.NotFound(w, r)
				return
			default:
				fmt.Fprint(w, text)
				return
			}
		}
		h.ServeHTTP(w, r)
	})))
}

// Claims checks that a host does not begin to use the backend if it cannot use the cloud, and
// that a host keeps a lease of the backend without a call.
func (v VPC) Claims(t *testing.T) {
	t.Helper()
	var held subnet.Claim
	for _, f := range v.Families {
		dst := Subnet()
		own := "192.168.77.1"
		if f == prefix.IPv6 {
			dst = netip.MustParsePrefix("fd00:10:5:1::/64")
			own = "fd00:77::1"
		}
		held.Endpoints = append(held.Endpoints, subnet.Endpoint{Subnet: dst, PublicIP: netip.MustParseAddr(own)})
	}

	missing := "permission " + v.Right + " is missing: " + v.Page + " has the policy to paste"
	none := func(*vpctest.State) {}
	denied := func(s *vpctest.State) { s.Deny(v.Create, true) }
	away := func(s *vpctest.State) { s.SetAway(true) }
	for name, test := range map[string]struct {
		fault func(*vpctest.State)
		prev  subnet.Claim
		used  []string
		err   string
		quiet bool // no call is made
	}{
		"a new host":                           {none, subnet.Claim{}, nil, "", false},
		"a new host without a permission":      {denied, subnet.Claim{}, nil, missing, false},
		"a new host without a cloud":           {away, subnet.Claim{}, nil, "the cloud does not answer", false},
		"a new host that is not described yet": {func(s *vpctest.State) { s.Terminate("i-1") }, subnet.Claim{}, nil, "the cloud does not answer about this instance yet", false},
		"a host with a lease, no permission":   {denied, held, []string{v.Type}, "", true},
		"a host with a lease, no cloud":        {away, held, []string{v.Type}, "", true},
		"a host in a migration":                {away, held, []string{"vxlan", v.Type}, "", true},
		"a lease of an unknown past":           {denied, held, nil, "", true},
		"a lease of vxlan, unknown past":       {denied, subnet.Claim{BackendType: "vxlan", Endpoints: held.Endpoints}, nil, missing, false},
		"a host with another backend":          {denied, held, []string{"vxlan"}, missing, false},
		"a host with udp, no cloud":            {away, held, []string{"udp"}, "the cloud does not answer", false},
	} {
		s, _ := v.Open(t)
		test.fault(s)
		b := v.Backend(t, `{}`)
		b.Env.Used = test.used
		claim, err := b.Claim(t.Context(), test.prev)
		if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
			t.Errorf("%s: error %v, want %q", name, err, test.err)
		}
		if transient := strings.Contains(test.err, "does not answer"); transient != cloud.Transient(err) {
			t.Errorf("%s: error %v, transient is %v", name, err, !transient)
		}
		if calls := s.Calls(); test.quiet != (len(calls) == 0) {
			t.Errorf("%s: calls %v", name, calls)
		}
		if claim.BackendType != "" || len(claim.Endpoints) != len(v.Families) {
			t.Errorf("%s: claim %+v, want no type, and %v", name, claim, v.Families)
		}
	}
}

// NewKeys checks that the backend reads its keys again after the cloud has refused them,
// because the role may have new ones. old is the first answer of the metadata service. It
// describes keys that the cloud refuses.
func (v VPC) NewKeys(t *testing.T, old string) {
	t.Helper()
	s, _ := v.Open(t)
	asked := 0
	h := v.Metadata(s.Instance("i-1"))
	t.Setenv(v.MetadataAPI, cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/security-credentials/flanneld") {
			if asked++; asked == 1 {
				fmt.Fprint(w, old)
				return
			}
		}
		h.ServeHTTP(w, r)
	})))
	if err := v.Backend(t, `{}`).Cloud.Check(t.Context()); err != nil || asked != 2 {
		t.Errorf("error %v, asked %d times, want twice", err, asked)
	}
}

// Redirect checks that the backend does not follow a redirect to another server.
func (v VPC) Redirect(t *testing.T) {
	t.Helper()
	s, _ := v.Open(t)
	Redirect(t, v.New, v.API, func() int { return len(s.Calls()) })
}

// Endpoints checks that the backend refuses an address without a scheme in each of these
// environment variables. The error must name the variable and must not be transient.
func (v VPC) Endpoints(t *testing.T, address string, variables ...string) {
	t.Helper()
	for _, name := range variables {
		v.Open(t)
		t.Setenv(name, address)
		cloudtest.CheckFails(t, name, v.Backend(t, `{}`).Cloud, name+" is invalid: expected an http or https URL, such as http", false)
	}
}

// Answer is the answer of the API to all calls, and the expected error.
type Answer struct {
	Status    int
	Text      string
	Err       string
	Transient bool
}

// Answers checks the errors for answers that differ from those of successful calls. The keys of
// tests are names.
func (v VPC) Answers(t *testing.T, tests map[string]Answer) {
	t.Helper()
	for name, test := range tests {
		v.Open(t)
		t.Setenv(v.API, cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(test.Status)
			fmt.Fprint(w, test.Text)
		})))
		cloudtest.CheckFails(t, name, v.Backend(t, `{}`).Cloud, test.Err, test.Transient)
	}
}

// Leaks makes calls fail in many ways, and searches errors and log for the secrets of the host.
// shown contains parts of the errors that must be in the log.
func (v VPC) Leaks(t *testing.T, shown []string, faults ...Fault[*vpctest.State]) {
	t.Helper()
	common := []Fault[*vpctest.State]{
		{`{}`, func(*vpctest.State) {}},
		{`{}`, func(s *vpctest.State) { s.SetAway(true) }},
		{`{}`, func(s *vpctest.State) { s.Deny("DescribeInstances", true) }},
		{`{}`, func(s *vpctest.State) { s.Deny(v.Create, true) }},
		{`{}`, func(s *vpctest.State) { s.Terminate("i-1") }},
		{`{}`, func(*vpctest.State) { t.Setenv(v.API, "http://127.0.0.1:1") }},
	}

	Leaks[*vpctest.State]{
		New: v.New, Faults: append(common, faults...), Secrets: []string{vpctest.Secret, vpctest.Token}, Shown: shown,
		Open: func(t *testing.T) *vpctest.State { s, _ := v.Open(t); return s },
	}.Run(t)
}

// KeyLeaks is Leaks for a backend with keys in its Backend object. right is a permission that
// Check must name if DescribeInstances is denied.
func (v VPC) KeyLeaks(t *testing.T, right string) {
	t.Helper()
	v.Leaks(t, []string{"refuses the keys", "permission " + right + " is missing"},
		Fault[*vpctest.State]{`{}`, func(*vpctest.State) { t.Setenv(v.API, "http://"+vpctest.Secret+"%") }},
		Fault[*vpctest.State]{`{"AccessKeyID":"id","AccessKeySecret":"` + vpctest.Secret + `-wrong"}`, func(*vpctest.State) {}},
	)
}

// ManyHosts checks that Followed makes at most as many calls for 1,000 hosts as the parameter most allows.
func (v VPC) ManyHosts(t *testing.T, most int) {
	t.Helper()
	s, _ := v.Open(t)
	var hosts []cloud.Host
	for n := range 1000 {
		i := s.AddInstance(100+n, "subnet-9", netip.AddrFrom4([4]byte{192, 168, byte(80 + n/250), byte(n % 250)}))
		hosts = append(hosts, cloud.Host{Addresses: i.Addresses})
	}

	c := v.Backend(t, `{}`).Cloud
	if _, err := c.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Tables(t.Context()); err != nil {
		t.Fatal(err)
	}

	before := len(s.Calls())
	found, err := c.Followed(t.Context(), hosts)
	if err != nil {
		t.Fatal(err)
	}
	if slices.Contains(found, "") {
		t.Errorf("found %q, want a table for each host", found)
	}
	if calls := len(s.Calls()) - before; calls > most {
		t.Errorf("%d calls to find the tables of 1,000 hosts, want at most %d", calls, most)
	}
}

// Followers checks the route tables that Followed returns for three hosts. For two hosts in subnets of
// the cloud with tables of their own, Followed must return these tables. For a host in a subnet that
// follows the main table, it must return that one. own is the subnet of the cloud that contains this host.
func (v VPC) Followers(t *testing.T, own string) {
	t.Helper()
	s, _ := v.Open(t)
	s.AddTable("rtb-a", own)
	s.AddTable("rtb-z", "subnet-9")
	var hosts []cloud.Host
	for n, subnet := range []string{own, "subnet-8", "subnet-9"} {
		i := s.AddInstance(100+n, subnet, netip.AddrFrom4([4]byte{192, 168, 80, byte(n)}))
		hosts = append(hosts, cloud.Host{Addresses: i.Addresses})
	}

	c := v.Backend(t, `{"Overflow":"vxlan"}`).Cloud
	if _, err := c.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Tables(t.Context()); err != nil {
		t.Fatal(err)
	}
	writes := s.Writes()
	found, err := c.Followed(t.Context(), hosts)
	if err != nil || len(found) != 3 {
		t.Fatalf("found %v, error %v", found, err)
	}
	if found[0] != "rtb-a" || found[1] != vpctest.MainTable || found[2] != "rtb-z" || s.Writes() > writes {
		t.Errorf("found %v, want rtb-a, the main table, and rtb-z, without a change", found)
	}
}

// Live lets a fleet live in the cloud for some days; see cloudtest.Live.
func (v VPC) Live(t *testing.T, days int, renamed bool) {
	t.Helper()
	s, api := v.Open(t)
	for _, i := range s.Instances() {
		s.Terminate(i.ID)
	}

	cloudtest.Connectionless(t, api)

	// Each host has a metadata service of its own, because its cloud keeps the address of that.
	var metadata [cloudtest.FleetSize]struct {
		address  string
		instance atomic.Pointer[vpctest.Instance]
	}

	for n := range metadata {
		one := &metadata[n]
		one.address = cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			v.Metadata(*one.instance.Load()).ServeHTTP(w, r)
		}))
	}

	cloudtest.Live(t, cloudtest.Fleet{
		Start: func(t *testing.T, place, number int, address netip.Addr) cloud.Cloud {
			i := s.AddInstance(number, "subnet-1", address)
			metadata[place].instance.Store(&i)
			t.Setenv(v.MetadataAPI, metadata[place].address)
			return CloudAt(t, v.New, address)
		},
		End:      func(number int) { s.Terminate(fmt.Sprintf("i-%d", number)) },
		SetQuota: s.SetQuota,
		Resync:   24 * time.Hour,
		Routes: func() (n int) {
			for _, r := range s.Routes(vpctest.MainTable) {
				if r.Kind == vpctest.Custom {
					n++
				}
			}
			return n
		},
	}, days, renamed)
}
