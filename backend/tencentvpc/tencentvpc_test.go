// SPDX-License-Identifier: Apache-2.0

package tencentvpc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/backend/tencentvpc/tencenttest"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
)

const (
	self = "192.168.77.1"
	peer = "192.168.77.2"
)

var (
	own4  = netip.MustParseAddr(self)
	peer4 = netip.MustParseAddr(peer)
	dst   = netip.MustParsePrefix("10.5.1.0/24")
)

// open returns a cloud with two instances, and makes this process the first of them: the metadata
// service and the API are those of the test.
func open(t *testing.T) tencenttest.Server {
	t.Helper()
	s := tencenttest.New()
	me := s.AddInstance(1, "subnet-1", own4)
	s.AddInstance(2, "subnet-2", peer4)
	address := serve(t, s)
	t.Setenv("TENCENTCLOUD_VPC_ENDPOINT", address)
	t.Setenv("TENCENTCLOUD_CVM_ENDPOINT", address+"/")
	t.Setenv("TENCENTCLOUD_METADATA_ENDPOINT", serve(t, tencenttest.Metadata(me)))
	for _, name := range []string{"ACCESS_KEY_ID", "ACCESS_KEY_SECRET", "TENCENTCLOUD_SECRET_ID", "TENCENTCLOUD_SECRET_KEY", "TENCENTCLOUD_TOKEN"} {
		t.Setenv(name, "")
	}
	return s
}

func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return server.URL
}

// newBackend returns a backend with that Backend object.
func newBackend(t *testing.T, raw string) *backend.CloudBackend {
	t.Helper()
	b, _, err := New([]byte(raw), backendtest.Env(1500, prefix.IPv4))
	if err != nil {
		t.Fatal(err)
	}
	return b.(*backend.CloudBackend)
}

// joined returns a Cloud after Join.
func joined(t *testing.T) cloud.Cloud {
	t.Helper()
	c := newBackend(t, `{}`).Cloud
	if target, err := c.Join(t.Context()); err != nil || target != self {
		t.Fatalf("target %q, error %v", target, err)
	}
	return c
}

func routeTo(target string) cloud.Route {
	return cloud.Route{Table: vpctest.MainTable, Dst: dst, Target: target, ByCall: true}
}

// routes returns the routes that the cloud shows.
func routes(t *testing.T, c cloud.Cloud) []cloud.Route {
	t.Helper()
	tables, err := c.Tables(t.Context())
	if err != nil || len(tables) != 1 {
		t.Fatalf("%d tables, error %v", len(tables), err)
	}
	return tables[0].Routes
}

func TestSuite(t *testing.T) {
	cloudtest.Run(t, func(t *testing.T) cloudtest.Fixture {
		s := open(t)
		api, lose := cloudtest.LoseAnswers(s, func(r *http.Request, _ string) bool { return slices.Contains(s.Writing, r.Header.Get("X-Tc-Action")) })
		t.Setenv("TENCENTCLOUD_VPC_ENDPOINT", serve(t, api))
		return cloudtest.Fixture{
			Cloud: newBackend(t, `{"Type":"tencent-vpc"}`).Cloud, Table: vpctest.MainTable, Peer: peer, PeerAddress: peer4, IPv4Only: true,
			DeleteByHand: func(dst netip.Prefix) { s.DeleteRoute(vpctest.MainTable, dst) },
			EndPeer:      func() { s.Terminate("i-2") },
			SetQuota:     s.SetQuota,
			Deny:         func() { s.Deny("CreateRoutes", true) },
			Throttle:     s.Throttle,
			SetAway:      s.SetAway,
			LoseAnswer:   lose,
			Gaps:         func() int { return s.Succeeded("DeleteRoutes") },
		}
	})
}

// TestTableOfTheSubnet expects that the table of the own subnet is used, and not the first one.
func TestTableOfTheSubnet(t *testing.T) {
	s := open(t)
	s.SetPageSize(1)
	s.AddTable("rtb-a", "subnet-2")
	s.AddTable("rtb-z", "subnet-1")
	c := joined(t)
	tables, err := c.Tables(t.Context())
	if err != nil || len(tables) != 1 || tables[0].ID != "rtb-z" {
		t.Errorf("tables %v, error %v, want that of the own subnet", tables, err)
	}
}

// TestOldAnswers puts a route while descriptions still show the time before the last calls.
func TestOldAnswers(t *testing.T) {
	s := open(t)
	s.SetLag(time.Hour)
	c := joined(t)
	if err := c.Put(t.Context(), routeTo(self), true); err != nil { // there is none yet
		t.Error(err)
	}
	if err := c.Put(t.Context(), routeTo(peer), false); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want ErrExists", err)
	}
	if err := c.Put(t.Context(), routeTo(peer), true); !cloud.Transient(err) { // it cannot name the route
		t.Errorf("error %v, want one that may end by itself", err)
	}
	s.SetLag(0)
	if err := c.Put(t.Context(), routeTo(peer), true); err != nil {
		t.Error(err)
	}
	if target, _ := s.RouteTo(vpctest.MainTable, dst); target != peer || len(s.Routes(vpctest.MainTable)) != 2 {
		t.Errorf("routes %v, want one to %s", s.Routes(vpctest.MainTable), peer)
	}
}

// TestRoutesOfOthers expects that routes of operators and other systems stay.
func TestRoutesOfOthers(t *testing.T) {
	s := open(t)
	for _, r := range []vpctest.Route{
		{Dst: netip.MustParsePrefix("0.0.0.0/0"), Target: self, Kind: vpctest.Custom},
		{Dst: netip.MustParsePrefix("172.16.0.0/16"), Target: self, Kind: vpctest.Custom},
		{Dst: netip.MustParsePrefix("10.9.0.0/16"), Target: "ccn-1", Kind: vpctest.Learned},
		{Dst: dst, Target: self, Kind: vpctest.Custom},
	} {
		s.AddRoute(vpctest.MainTable, r)
	}
	c := joined(t)
	before := s.Routes(vpctest.MainTable)
	if err := c.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if got := routes(t, c); !slices.Contains(got, routeTo(self)) {
		t.Errorf("routes %v, want that of flannel to this instance adopted", got)
	}
	for _, target := range []string{peer, "ccn-1"} {
		if err := c.Remove(t.Context(), routeTo(target)); err != nil {
			t.Error(err)
		}
	}
	if after := s.Routes(vpctest.MainTable); s.Writes() > 0 || len(after) != len(before) {
		t.Errorf("%d writes, routes %v", s.Writes(), after)
	}
}

// TestWrongRoutes replaces routes that flannel did not see, or deleted first. Those that carry no packets
// may be deleted first.
func TestWrongRoutes(t *testing.T) {
	for name, test := range map[string]struct {
		present          []vpctest.Route
		created, deleted int
	}{
		"a disabled one":             {[]vpctest.Route{{Target: self, Disabled: true}}, 1, 1},
		"two disabled ones":          {[]vpctest.Route{{Target: peer, Disabled: true}, {Target: self, Disabled: true}}, 1, 2},
		"a disabled one and another": {[]vpctest.Route{{Target: self, Disabled: true}, {Target: peer}}, 0, 1},
		"another and a disabled one": {[]vpctest.Route{{Target: peer}, {Target: self, Disabled: true}}, 0, 1},
		"a good and a disabled one":  {[]vpctest.Route{{Target: self}, {Target: peer, Disabled: true}}, 0, 1},
		"to another host":            {[]vpctest.Route{{Target: peer}}, 0, 0},
		"to a gateway":               {[]vpctest.Route{{Target: "nat-1"}}, 0, 0},
		"two, of which one is good":  {[]vpctest.Route{{Target: peer}, {Target: self}}, 0, 1},
		"two wrong ones":             {[]vpctest.Route{{Target: peer}, {Target: "192.168.77.9"}}, 0, 1},
	} {
		s := open(t)
		for _, r := range test.present {
			r.Dst, r.Kind = dst, vpctest.Custom
			s.AddSecond(vpctest.MainTable, r)
		}
		c := joined(t)
		if err := c.Put(t.Context(), routeTo(self), true); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		left := slices.DeleteFunc(s.Routes(vpctest.MainTable), func(r vpctest.Route) bool { return r.Dst != dst })
		if len(left) != 1 || left[0].Target != self || left[0].Disabled || s.Succeeded("DeleteRoutes") != test.deleted || s.Succeeded("CreateRoutes") != test.created {
			t.Errorf("%s: routes %v after %v", name, left, s.Calls())
		}
		if got := routes(t, c); !slices.Contains(got, routeTo(self)) {
			t.Errorf("%s: routes %v, want a right one", name, got)
		}
	}
}

// TestDuplicates has two equal routes to a stopped instance, before a further route and as the last
// ones. Only that instance is lost.
func TestDuplicates(t *testing.T) {
	twice := []vpctest.Route{{Dst: dst, Target: peer, Kind: vpctest.Custom}, {Dst: dst, Target: peer, Kind: vpctest.Custom}}
	other := vpctest.Route{Dst: netip.MustParsePrefix("10.5.2.0/24"), Target: self, Kind: vpctest.Custom}
	for name, all := range map[string][]vpctest.Route{"first": append(slices.Clone(twice), other), "last": append([]vpctest.Route{other}, twice...)} {
		s := open(t)
		for _, r := range all {
			s.AddSecond(vpctest.MainTable, r)
		}
		s.Stop("i-2")
		got := routes(t, joined(t))
		for _, r := range got {
			if r.Lost != (r.Target == peer) {
				t.Errorf("%s: %v: want only those to %s lost", name, r, peer)
			}
		}
		if len(got) != 3 {
			t.Errorf("%s: routes %v, want one to %s", name, got, peer)
		}
	}
}

// TestPages has more instances than one answer.
func TestPages(t *testing.T) {
	s := open(t)
	s.SetQuota(1000)
	for n := range 230 {
		i := s.AddInstance(100+n, "subnet-1", netip.AddrFrom4([4]byte{192, 168, 78, byte(n)}))
		s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(n), 0}), 24), Target: i.IPv4().String(), Kind: vpctest.Custom})
	}
	s.Stop("i-120")
	s.Terminate("i-329")
	got := routes(t, joined(t))
	for _, r := range got {
		if want := r.Target == "192.168.78.20" || r.Target == "192.168.78.229"; r.Lost != want {
			t.Errorf("%v: want lost %v", r, want)
		}
	}
	if len(got) != 231 {
		t.Errorf("%d routes, want 231", len(got))
	}
}

// TestChangeBetweenPages terminates an instance of the first page before the second one, which then
// begins behind an instance that runs.
func TestChangeBetweenPages(t *testing.T) {
	s := open(t)
	s.SetPageSize(2)
	s.AddInstance(10, "subnet-1", netip.MustParseAddr("192.168.77.3"))
	s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: dst, Target: peer, Kind: vpctest.Custom})
	t.Setenv("TENCENTCLOUD_CVM_ENDPOINT", serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.ServeHTTP(w, r)
		s.Terminate("i-10")
	})))
	c := joined(t)
	if _, err := c.Tables(t.Context()); !cloud.Transient(err) {
		t.Errorf("error %v, want one that may end by itself", err)
	}
	if got := routes(t, c); !slices.Contains(got, routeTo(peer)) {
		t.Errorf("routes %v, want that to the instance that runs", got)
	}
}

func TestCheckNamesEveryMissingPermission(t *testing.T) {
	for _, test := range []struct{ denied, want []string }{
		{[]string{"DescribeRouteTables"}, []string{"vpc:DescribeRouteTables"}},
		{[]string{"DescribeInstances"}, []string{"cvm:DescribeInstances"}},
		{[]string{"CreateRoutes", "ReplaceRoutes", "DeleteRoutes"}, []string{"vpc:CreateRoutes", "vpc:ReplaceRoutes", "vpc:DeleteRoutes"}},
	} {
		s := open(t)
		for _, action := range test.denied {
			s.Deny(action, true)
		}
		err := newBackend(t, `{}`).Cloud.Check(t.Context())
		missing, ok := errors.AsType[*cloud.MissingError](err)
		if !ok || !slices.Equal(missing.Permissions, test.want) {
			t.Errorf("without %v: %v, want all of them named", test.denied, err)
		}
		if s.Writes() > 0 {
			t.Errorf("without %v: the check has changed something: %v", test.denied, s.Calls())
		}
	}
}

// TestRefusedHosts has hosts that cannot use the backend.
func TestRefusedHosts(t *testing.T) {
	for name, test := range map[string]struct {
		metadata  map[string]string // values that replace others; empty means missing
		network   string
		err       string
		transient bool
	}{
		"another address":         {map[string]string{"/primary-local-ipv4": "192.168.9.9", "/local-ipv4s/": "192.168.9.9/"}, "10.5.0.0/16", "the metadata service of Tencent Cloud does not know [192.168.77.1]", false},
		"a secondary interface":   {map[string]string{"meta-data/mac": "52:54:00:00:00:02"}, "10.5.0.0/16", "192.168.77.1 is not of the primary network interface", false},
		"no role":                 {map[string]string{"/security-credentials/": ""}, "10.5.0.0/16", "the instance has no role: attach one with the policy in " + page, false},
		"no keys":                 {map[string]string{"/security-credentials/flanneld": "{}"}, "10.5.0.0/16", "has sent no keys", true},
		"an instance without CVM": {nil, "10.5.0.0/16", "CVM does not know 192.168.77.1", true},
		"no region":               {map[string]string{"placement/region": ""}, "10.5.0.0/16", "read placement/region from the metadata service of Tencent Cloud: the value does not exist", false},
		"a network in the VPC":    {nil, "192.168.0.0/17", "the network 192.168.0.0/17 contains 192.168.77.1", false},
	} {
		s := open(t)
		if strings.HasSuffix(name, "CVM") {
			s.Terminate("i-1")
		}
		h := tencenttest.Metadata(vpctest.Instance{ID: "i-1", Subnet: "subnet-1", Addresses: []netip.Addr{own4}})
		t.Setenv("TENCENTCLOUD_METADATA_ENDPOINT", serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for path, text := range test.metadata {
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
		env := backendtest.Env(1500, prefix.IPv4)
		env.Config.Networks = []subnet.Network{{Prefix: netip.MustParsePrefix(test.network)}}
		b, _, err := New([]byte(`{}`), env)
		if err != nil {
			t.Fatal(err)
		}
		err = b.(*backend.CloudBackend).Cloud.Check(t.Context())
		if err == nil || !strings.Contains(err.Error(), test.err) || cloud.Transient(err) != test.transient {
			t.Errorf("%s: error %v, transient %v, want %q, %v", name, err, cloud.Transient(err), test.err, test.transient)
		}
		if s.Writes() > 0 {
			t.Errorf("%s: the check has changed something", name)
		}
	}
}

// TestClaim expects that a host does not begin to use the backend if it cannot use the cloud, and
// that a host keeps a lease of the backend without a call.
func TestClaim(t *testing.T) {
	held := subnet.Claim{Endpoints: []subnet.Endpoint{{Subnet: dst, PublicIP: own4}}}
	for name, test := range map[string]struct {
		prev subnet.Claim
		used []string
		err  string
	}{
		"a new host":                  {subnet.Claim{}, nil, "permission vpc:CreateRoutes is missing: " + page + " has the policy to paste"},
		"a host with a lease":         {held, []string{Type}, ""},
		"a host with another backend": {held, []string{"vxlan"}, "permission vpc:CreateRoutes is missing"},
	} {
		s := open(t)
		s.Deny("CreateRoutes", true)
		b := newBackend(t, `{}`)
		b.Env.Used = test.used
		_, err := b.Claim(t.Context(), test.prev)
		if test.err == "" && (err != nil || len(s.Calls()) > 0) || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
			t.Errorf("%s: error %v, want %q", name, err, test.err)
		}
	}
}

// TestNewKeys expects that refused keys are asked for again, because the role may have new ones.
func TestNewKeys(t *testing.T) {
	open(t)
	asked := 0
	h := tencenttest.Metadata(vpctest.Instance{ID: "i-1", Subnet: "subnet-1", Addresses: []netip.Addr{own4}})
	t.Setenv("TENCENTCLOUD_METADATA_ENDPOINT", serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/security-credentials/flanneld") {
			if asked++; asked == 1 {
				fmt.Fprint(w, `{"TmpSecretId":"old","TmpSecretKey":"old","Token":"old","Expiration":"2100-01-01T00:00:00Z"}`)
				return
			}
		}
		h.ServeHTTP(w, r)
	})))
	if err := newBackend(t, `{}`).Cloud.Check(t.Context()); err != nil || asked != 2 {
		t.Errorf("error %v, asked %d times, want twice", err, asked)
	}
}

// TestKeysOfTheEnvironment takes the keys from the variables of Tencent Cloud.
func TestKeysOfTheEnvironment(t *testing.T) {
	open(t)
	t.Setenv("TENCENTCLOUD_SECRET_ID", vpctest.KeyID)
	t.Setenv("TENCENTCLOUD_SECRET_KEY", vpctest.Secret)
	t.Setenv("TENCENTCLOUD_TOKEN", vpctest.Token)
	if err := newBackend(t, `{}`).Cloud.Check(t.Context()); err != nil {
		t.Error(err)
	}
	t.Setenv("ACCESS_KEY_ID", "other")
	t.Setenv("ACCESS_KEY_SECRET", "very-secret")
	err := newBackend(t, `{}`).Cloud.Check(t.Context())
	if err == nil || !strings.Contains(err.Error(), "Tencent Cloud refuses the keys (AuthFailure.SignatureFailure)") || strings.Contains(err.Error(), "very-secret") {
		t.Errorf("error %v, want that the keys with the names of flannel are refused", err)
	}
}

// TestRedirect expects that calls go to no other server.
func TestRedirect(t *testing.T) {
	s := open(t)
	t.Setenv("TENCENTCLOUD_VPC_ENDPOINT", serve(t, http.RedirectHandler(os.Getenv("TENCENTCLOUD_CVM_ENDPOINT"), http.StatusTemporaryRedirect)))
	err := newBackend(t, `{}`).Cloud.Check(t.Context())
	if err == nil || !strings.Contains(err.Error(), "307") || len(s.Calls()) > 0 {
		t.Errorf("error %v, calls %v, want none and an error with the status", err, s.Calls())
	}
}

// TestEndpoints expects the domains of finance regions there, and that an address without a scheme is
// refused for good, by the name of its variable.
func TestEndpoints(t *testing.T) {
	const vpcName, cvmName, metadataName = "TENCENTCLOUD_VPC_ENDPOINT", "TENCENTCLOUD_CVM_ENDPOINT", "TENCENTCLOUD_METADATA_ENDPOINT"
	for region, want := range map[string][2]string{
		"ap-guangzhou":    {"https://vpc.tencentcloudapi.com", "https://cvm.tencentcloudapi.com"},
		"ap-shanghai-fsi": {"https://vpc.ap-shanghai-fsi.tencentcloudapi.com", "https://cvm.ap-shanghai-fsi.tencentcloudapi.com"},
	} {
		open(t)
		t.Setenv(vpcName, "")
		t.Setenv(cvmName, "")
		t.Setenv(metadataName, serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, region) })))
		c, err := connect(t.Context(), config{}, &cloud.Calls{})
		if err != nil || c.vpc.endpoint != want[0] || c.cvm.endpoint != want[1] {
			t.Errorf("%s: client %+v, error %v, want %v", region, c, err, want)
		}
	}
	for _, name := range []string{vpcName, cvmName, metadataName} {
		open(t)
		t.Setenv(name, "some.internal.tencentcloudapi.com")
		err := newBackend(t, `{}`).Cloud.Check(t.Context())
		if err == nil || cloud.Transient(err) || !strings.Contains(err.Error(), name+" is invalid: expected an http or https URL, such as http") {
			t.Errorf("%s: error %v, want a lasting one that names it", name, err)
		}
	}
}

// TestAnswers has answers of the API that are not those of a call that works.
func TestAnswers(t *testing.T) {
	for name, test := range map[string]struct {
		status    int
		text      string
		err       string
		transient bool
	}{
		"no tables":              {200, `{"Response":{"TotalCount":0,"RouteTableSet":[]}}`, "knows no route table of subnet subnet-1 in vpc-0a", false},
		"a missing page":         {200, `{"Response":{"TotalCount":1000}}`, "have 0 of 1000", true},
		"too many items":         {200, `{"Response":{"TotalCount":1,"RouteTableSet":[{},{}]}}`, "have 2 of 1", true},
		"no JSON":                {200, `<html>`, "the answer is not one of the API", false},
		"another JSON":           {200, `{}`, "the answer is not one of the API", false},
		"another type":           {200, `{"Response":{"TotalCount":"x"}}`, "decode the answer", false},
		"a gateway's error":      {502, `<html>`, "502", true},
		"an internal error":      {200, `{"Response":{"Error":{"Code":"InternalError.Module","Message":"again"}}}`, "InternalError.Module: again", true},
		"an old signature":       {200, `{"Response":{"Error":{"Code":"AuthFailure.SignatureExpire","Message":"x"}}}`, "this host's clock", false},
		"no right":               {200, `{"Response":{"Error":{"Code":"AuthFailure.UnauthorizedOperation","Message":"x"}}}`, "permission vpc:DescribeRouteTables is missing", false},
		"the right of a message": {200, `{"Response":{"Error":{"Code":"UnauthorizedOperation","Message":"operation (vpc:DescribeRouteTableEx) resource"}}}`, "permission vpc:DescribeRouteTableEx is missing", false},
		"an unknown error":       {200, `{"Response":{"Error":{"Code":"InvalidParameter","Message":"a\nb"}}}`, "InvalidParameter: a b", false},
	} {
		open(t)
		t.Setenv("TENCENTCLOUD_VPC_ENDPOINT", serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(test.status)
			fmt.Fprint(w, test.text)
		})))
		err := newBackend(t, `{}`).Cloud.Check(t.Context())
		if err == nil || !strings.Contains(err.Error(), test.err) || cloud.Transient(err) != test.transient {
			t.Errorf("%s: error %v, transient %v, want %q, %v", name, err, cloud.Transient(err), test.err, test.transient)
		}
	}
}

// TestSecretsAreNeverShown makes calls fail in many ways, and searches errors and log for the secrets
// of the host.
func TestSecretsAreNeverShown(t *testing.T) {
	var out bytes.Buffer
	log := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&out), textlogger.Verbosity(10)))
	for _, test := range []struct {
		raw   string
		fault func(tencenttest.Server)
	}{
		{`{}`, func(tencenttest.Server) {}},
		{`{}`, func(s tencenttest.Server) { s.SetAway(true) }},
		{`{}`, func(s tencenttest.Server) { s.Deny("DescribeInstances", true) }},
		{`{}`, func(tencenttest.Server) { t.Setenv("TENCENTCLOUD_VPC_ENDPOINT", "http://127.0.0.1:1") }},
		{`{}`, func(tencenttest.Server) { t.Setenv("TENCENTCLOUD_VPC_ENDPOINT", "http://"+vpctest.Secret+"%") }},
		{`{"AccessKeyID":"id","AccessKeySecret":"` + vpctest.Secret + `-wrong"}`, func(tencenttest.Server) {}},
	} {
		s := open(t)
		test.fault(s)
		ctx, cancel := context.WithTimeout(klog.NewContext(t.Context(), log), 2*time.Second)
		b, warnings, err := New([]byte(test.raw), backendtest.Env(1500, prefix.IPv4))
		if err != nil {
			t.Fatal(err)
		}
		c := b.(*backend.CloudBackend)
		_, err = b.Claim(ctx, subnet.Claim{})
		_, joined := c.Cloud.Join(ctx)
		cancel()
		log.Info("results", "warnings", warnings, "claim", err, "join", joined, "calls", c.Calls.Counts())
	}
	for _, secret := range []string{vpctest.Secret, vpctest.Token} {
		if strings.Contains(out.String(), secret) {
			t.Errorf("the log contains %q:\n%s", secret, out.String())
		}
	}
	if !strings.Contains(out.String(), "refuses the keys") || !strings.Contains(out.String(), "permission cvm:DescribeInstances is missing") {
		t.Errorf("the faults are not in the log:\n%s", out.String())
	}
}

func TestConfig(t *testing.T) {
	for raw, want := range map[string]struct{ err, warning string }{
		`{"Type":"tencent-vpc"}`:                              {},
		`{"AccessKeyID":7}`:                                   {err: "AccessKeyID: want a string, have number"},
		`{"AccessKeySecret":["very-secret"]}`:                 {err: "AccessKeySecret: want a string, have array"},
		`{"AccessKeyID":"x"}`:                                 {warning: "AccessKeyID and AccessKeySecret need each other"},
		`{"AccessKeyID":"x","AccessKeySecret":"very-secret"}`: {warning: `key "AccessKeySecret" may contain a secret`},
		`{"SecretKey":"very-secret"}`:                         {warning: `key "SecretKey" may contain a secret`},
	} {
		_, warnings, err := New([]byte(raw), backendtest.Env(1500, prefix.IPv4))
		all := strings.Join(warnings, "; ")
		if want.err == "" && err != nil || want.err != "" && (err == nil || !strings.Contains(err.Error(), want.err)) ||
			!strings.Contains(all, want.warning) || want.warning == "" && all != "" || strings.Contains(all+fmt.Sprint(err), "very-secret") {
			t.Errorf("%s: warnings %q, error %v, want %+v", raw, warnings, err, want)
		}
	}
	_, _, err := New([]byte(`{}`), backendtest.Env(1500, prefix.IPv4, prefix.IPv6))
	if err == nil || !strings.Contains(err.Error(), "IPv6Network is fd00:10:5::/48: want none") {
		t.Errorf("error %v, want IPv6 refused", err)
	}
}

// FuzzAnswers decodes answers of the API. A route must have a prefix as its destination, and an error
// one line.
func FuzzAnswers(f *testing.F) {
	f.Add(200, []byte(`{"Response":{"RouteTableSet":[{"RouteTableId":"rtb-1","RouteSet":[{"DestinationCidrBlock":"10.5.1.0/24","GatewayType":"NORMAL_CVM","GatewayId":"10.0.0.1","RouteType":"USER","Enabled":true}]}]}}`))
	f.Add(200, []byte(`{"Response":{"Error":{"Code":"a\nb","Message":"c\nd"}}}`))
	f.Fuzz(func(t *testing.T, status int, text []byte) {
		var answer struct {
			Tables    []table    `json:"RouteTableSet"`
			Instances []instance `json:"InstanceSet"`
		}
		if err := decode(status, text, "vpc:X", "t", &answer); err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: error %q has several lines", text, err)
			}
			return
		}
		if chosen, ok := choose(answer.Tables, "subnet-1"); ok && chosen.ID == "" {
			t.Errorf("%s: chose a table without an id", text)
		}
		for _, one := range answer.Tables {
			for _, r := range one.Routes {
				if c, ok := r.convert("t"); ok && (!c.Dst.IsValid() || c.Dst != c.Dst.Masked() || c.Target == "") {
					t.Errorf("%s: route %+v", text, c)
				}
			}
		}
		for _, i := range answer.Instances {
			if _, err := json.Marshal(i.addresses()); err != nil {
				t.Error(err)
			}
		}
	})
}
