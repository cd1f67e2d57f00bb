// SPDX-License-Identifier: Apache-2.0

package tencentvpc

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/backend/cloudnet"
	"github.com/flanneld/flanneld/backend/tencentvpc/tencenttest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/schema"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

const (
	self = "192.168.77.1"
	peer = "192.168.77.2"
)

var dst = backendtest.Subnet()

// bed describes this cloud for the tests in package backendtest. All clouds that have a route table
// for each subnet share these tests.
func bed() backendtest.VPC {
	return backendtest.VPC{
		New: New, Type: Type, Page: page, Families: []prefix.Family{prefix.IPv4}, Metadata: tencenttest.Metadata,
		Open: func(t *testing.T) (*vpctest.State, http.Handler) { s := open(t); return s.State, s },
		API:  "TENCENTCLOUD_VPC_ENDPOINT", MetadataAPI: "TENCENTCLOUD_METADATA_ENDPOINT",
		Create: "CreateRoutes", Delete: "DeleteRoutes", Right: "vpc:CreateRoutes", Self: self, Peer: peer, Gateway: "nat-1",
	}
}

// open returns a fake cloud with two instances. The environment variables that it sets make this
// process the first of these instances.
func open(t *testing.T) tencenttest.Server {
	t.Helper()
	s := tencenttest.New()
	me := s.AddInstance(1, "subnet-1", netip.MustParseAddr(self))
	s.AddInstance(2, "subnet-2", netip.MustParseAddr(peer))
	address := cloudtest.Serve(t, s)
	t.Setenv("TENCENTCLOUD_VPC_ENDPOINT", address)
	t.Setenv("TENCENTCLOUD_CVM_ENDPOINT", address+"/")
	t.Setenv("TENCENTCLOUD_METADATA_ENDPOINT", cloudtest.Serve(t, tencenttest.Metadata(me)))
	for _, name := range []string{"ACCESS_KEY_ID", "ACCESS_KEY_SECRET", "TENCENTCLOUD_SECRET_ID", "TENCENTCLOUD_SECRET_KEY", "TENCENTCLOUD_TOKEN"} {
		t.Setenv(name, "")
	}
	return s
}

func TestSuite(t *testing.T) {
	bed().Suite(t, func(r *http.Request, _ string) bool { return strings.HasSuffix(r.Header.Get("X-Tc-Action"), "Routes") })
}

func TestTableOfTheSubnet(t *testing.T) { bed().OwnTable(t, "subnet-1", "subnet-2") }

// TestOldAnswers checks Put while the API still describes the tables as they were before the last
// calls. Put must make a missing route. If there is a route that the API does not describe, Put
// must return ErrExists, or a transient error if it should replace the route.
func TestOldAnswers(t *testing.T) {
	s := open(t)
	s.SetLag(time.Hour)
	c := bed().Joined(t)
	if err := c.Put(t.Context(), backendtest.RouteTo(self), true); err != nil { // there is no route to replace yet
		t.Error(err)
	}
	if err := c.Put(t.Context(), backendtest.RouteTo(peer), false); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want ErrExists", err)
	}
	if err := c.Put(t.Context(), backendtest.RouteTo(peer), true); !cloud.Transient(err) { // the route is not described, so Put cannot name it
		t.Errorf("error %v, want one that may end by itself", err)
	}
	s.SetLag(0)
	if err := c.Put(t.Context(), backendtest.RouteTo(peer), true); err != nil {
		t.Error(err)
	}
	if target, _ := s.RouteTo(vpctest.MainTable, dst); target != peer || len(s.Routes(vpctest.MainTable)) != 2 {
		t.Errorf("routes %v, want one to %s", s.Routes(vpctest.MainTable), peer)
	}
}

//stages:rest the days of a fleet take half a minute
func TestFleet(t *testing.T) { bed().Live(t, 4, false) } // a new instance may have the address of an old one, to which routes lead

func TestTablesOfManyHosts(t *testing.T) { bed().ManyHosts(t, 11) }

func TestTablesOfOtherHosts(t *testing.T) { bed().Followers(t, "subnet-1") }

func TestRoutesOfOthers(t *testing.T) { bed().RoutesOfOthers(t) }

func TestClusters(t *testing.T) { bed().Clusters(t) }

// TestWrongRoutes checks that Put replaces an enabled route in place, so that the destination
// always has an enabled route. Put may make a new route only if all others carry no packets. The test
// counts the calls that create and delete routes, and the changes that leave no enabled route.
// flannel did not see such wrong routes, or deleted them first.
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
		"two, of which one is good":  {[]vpctest.Route{{Target: peer}, {Target: self}}, 0, 1},
		"two wrong ones":             {[]vpctest.Route{{Target: peer}, {Target: "192.168.77.9"}}, 0, 1},
	} {
		s := open(t)
		for _, r := range test.present {
			r.Dst, r.Kind = dst, vpctest.Custom
			s.AddSecond(vpctest.MainTable, r)
		}
		c := bed().Joined(t)
		if err := c.Put(t.Context(), backendtest.RouteTo(self), true); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		left := slices.DeleteFunc(s.Routes(vpctest.MainTable), func(r vpctest.Route) bool { return r.Dst != dst })
		if len(left) != 1 || left[0].Target != self || left[0].Disabled || s.Succeeded("DeleteRoutes") != test.deleted || s.Succeeded("CreateRoutes") != test.created {
			t.Errorf("%s: routes %v after %v", name, left, s.Calls())
		}
		if n := s.Gaps(); n > 0 {
			t.Errorf("%s: the destination was without an enabled route %d times after %v", name, n, s.Calls())
		}
		if got := cloudtest.Routes(t, c); !slices.Contains(got, backendtest.RouteTo(self)) {
			t.Errorf("%s: routes %v, want a right one", name, got)
		}
	}
}

// TestDuplicates checks that two equal routes to a stopped instance count as one lost route, whether
// they are the first or the last ones in the table. The route to another instance must not be lost.
func TestDuplicates(t *testing.T) {
	twice := []vpctest.Route{{Dst: dst, Target: peer, Kind: vpctest.Custom}, {Dst: dst, Target: peer, Kind: vpctest.Custom}}
	other := vpctest.Route{Dst: netip.MustParsePrefix("10.5.2.0/24"), Target: self, Kind: vpctest.Custom}
	for name, all := range map[string][]vpctest.Route{"first": append(slices.Clone(twice), other), "last": append([]vpctest.Route{other}, twice...)} {
		s := open(t)
		for _, r := range all {
			s.AddSecond(vpctest.MainTable, r)
		}
		s.Stop("i-2")
		got := cloudtest.Routes(t, bed().Joined(t))
		for _, r := range got {
			if r.Lost() != (r.Target == peer) {
				t.Errorf("%s: %v: want only those to %s lost", name, r, peer)
			}
		}
		if len(got) != 3 {
			t.Errorf("%s: routes %v, want one to %s", name, got, peer)
		}
	}
}

func TestPages(t *testing.T) { bed().Pages(t, "subnet-1") }

// TestChangeBetweenPages terminates an instance of the first page before the second page is read,
// so that an instance that runs is in neither page. The route to that instance must not count as
// lost.
func TestChangeBetweenPages(t *testing.T) {
	s := open(t)
	s.SetPageSize(2)
	s.AddInstance(10, "subnet-1", netip.MustParseAddr("192.168.77.3"))
	s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: dst, Target: peer, Kind: vpctest.Custom})
	t.Setenv("TENCENTCLOUD_CVM_ENDPOINT", cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.ServeHTTP(w, r)
		s.Terminate("i-10")
	})))
	c := bed().Joined(t)
	if _, err := c.Tables(t.Context()); !cloud.Transient(err) {
		t.Errorf("error %v, want one that may end by itself", err)
	}
	if got := cloudtest.Routes(t, c); !slices.Contains(got, backendtest.RouteTo(peer)) {
		t.Errorf("routes %v, want that to the instance that runs", got)
	}
}

func TestCheckNamesEveryMissingPermission(t *testing.T) {
	bed().Rights(t,
		backendtest.Denied{Calls: []string{"DescribeRouteTables"}, Permissions: []string{"vpc:DescribeRouteTables"}},
		backendtest.Denied{Calls: []string{"DescribeInstances"}, Permissions: []string{"cvm:DescribeInstances"}},
		backendtest.Denied{
			Calls:       []string{"CreateRoutes", "ReplaceRoutes", "DeleteRoutes"},
			Permissions: []string{"vpc:CreateRoutes", "vpc:ReplaceRoutes", "vpc:DeleteRoutes"},
		},
	)
}

func TestRefusedHosts(t *testing.T) {
	bed().RefusedHosts(t, map[string]backendtest.Refused{
		"another address":         {Values: map[string]string{"/primary-local-ipv4": "192.168.9.9", "/local-ipv4s/": "192.168.9.9/"}, Err: "the metadata service of Tencent Cloud does not know [192.168.77.1]"},
		"a secondary interface":   {Values: map[string]string{"meta-data/mac": "52:54:00:00:00:02"}, Err: "192.168.77.1 is not of the primary network interface"},
		"no role":                 {Values: map[string]string{"/security-credentials/": ""}, Err: "the instance has no role: attach one with the policy in " + page},
		"no keys":                 {Values: map[string]string{"/security-credentials/flanneld": "{}"}, Err: "has sent no keys", Transient: true},
		"an instance without CVM": {Fault: func(s *vpctest.State) { s.Terminate("i-1") }, Err: "CVM does not know 192.168.77.1", Transient: true},
		"no region":               {Values: map[string]string{"placement/region": ""}, Err: "read placement/region from the metadata service of Tencent Cloud: the value does not exist"},
		"a network in the VPC":    {Network: "192.168.0.0/17", Err: "the network 192.168.0.0/17 contains 192.168.77.1"},
	})
}

func TestClaim(t *testing.T) { bed().Claims(t) }

func TestNewKeys(t *testing.T) {
	bed().NewKeys(t, `{"TmpSecretId":"old","TmpSecretKey":"old","Token":"old","Expiration":"2100-01-01T00:00:00Z"}`)
}

// TestKeysOfTheEnvironment checks that the environment variables of Tencent Cloud are used, and
// that those of flannel precede them.
func TestKeysOfTheEnvironment(t *testing.T) {
	open(t)
	t.Setenv("TENCENTCLOUD_SECRET_ID", vpctest.KeyID)
	t.Setenv("TENCENTCLOUD_SECRET_KEY", vpctest.Secret)
	t.Setenv("TENCENTCLOUD_TOKEN", vpctest.Token)
	if err := bed().Backend(t, `{}`).Cloud.Check(t.Context()); err != nil {
		t.Error(err)
	}
	t.Setenv("ACCESS_KEY_ID", "other")
	t.Setenv("ACCESS_KEY_SECRET", "very-secret")
	err := bed().Backend(t, `{}`).Cloud.Check(t.Context())
	if err == nil || !strings.Contains(err.Error(), "Tencent Cloud refuses the keys (AuthFailure.SignatureFailure)") || strings.Contains(err.Error(), "very-secret") {
		t.Errorf("error %v, want that the keys with the names of flannel are refused", err)
	}
}

func TestRedirect(t *testing.T) { bed().Redirect(t) }

// TestEndpoints checks that a finance region has endpoints in a domain of its own. An endpoint
// without a scheme must be refused with an error that names the variable, and for which
// cloud.Transient is false.
func TestEndpoints(t *testing.T) {
	const vpcName, cvmName, metadataName = "TENCENTCLOUD_VPC_ENDPOINT", "TENCENTCLOUD_CVM_ENDPOINT", "TENCENTCLOUD_METADATA_ENDPOINT"
	for region, want := range map[string][2]string{
		"ap-guangzhou":    {"https://vpc.tencentcloudapi.com", "https://cvm.tencentcloudapi.com"},
		"ap-shanghai-fsi": {"https://vpc.ap-shanghai-fsi.tencentcloudapi.com", "https://cvm.ap-shanghai-fsi.tencentcloudapi.com"},
	} {
		open(t)
		t.Setenv(vpcName, "")
		t.Setenv(cvmName, "")
		t.Setenv(metadataName, cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, region) })))
		c, err := connect(t.Context(), cloudnet.Keyed{}, &cloud.Calls{})
		if err != nil || c.vpc.endpoint != want[0] || c.cvm.endpoint != want[1] {
			t.Errorf("%s: client %+v, error %v, want %v", region, c, err, want)
		}
	}
	bed().Endpoints(t, "some.internal.tencentcloudapi.com", vpcName, cvmName, metadataName)
}

// TestAnswers checks the errors for answers of the API that flanneld does not expect.
func TestAnswers(t *testing.T) {
	bed().Answers(t, map[string]backendtest.Answer{
		"no tables":              {Status: 200, Text: `{"Response":{"TotalCount":0,"RouteTableSet":[]}}`, Err: "knows no route table of subnet subnet-1 in vpc-0a"},
		"a missing page":         {Status: 200, Text: `{"Response":{"TotalCount":1000}}`, Err: "have 0 of 1000", Transient: true},
		"too many items":         {Status: 200, Text: `{"Response":{"TotalCount":1,"RouteTableSet":[{},{}]}}`, Err: "have 2 of 1", Transient: true},
		"no JSON":                {Status: 200, Text: `<html>`, Err: "the answer is not one of the API"},
		"another JSON":           {Status: 200, Text: `{}`, Err: "the answer is not one of the API"},
		"another type":           {Status: 200, Text: `{"Response":{"TotalCount":"x"}}`, Err: "decode the answer"},
		"a gateway's error":      {Status: 502, Text: `<html>`, Err: "502", Transient: true},
		"an internal error":      {Status: 200, Text: `{"Response":{"Error":{"Code":"InternalError.Module","Message":"again"}}}`, Err: "InternalError.Module: again", Transient: true},
		"an old signature":       {Status: 200, Text: `{"Response":{"Error":{"Code":"AuthFailure.SignatureExpire","Message":"x"}}}`, Err: "this host's clock"},
		"no right":               {Status: 200, Text: `{"Response":{"Error":{"Code":"AuthFailure.UnauthorizedOperation","Message":"x"}}}`, Err: "permission vpc:DescribeRouteTables is missing"},
		"the right of a message": {Status: 200, Text: `{"Response":{"Error":{"Code":"UnauthorizedOperation","Message":"operation (vpc:DescribeRouteTableEx) resource"}}}`, Err: "permission vpc:DescribeRouteTableEx is missing"},
		"an unknown error":       {Status: 200, Text: `{"Response":{"Error":{"Code":"InvalidParameter","Message":"a\nb"}}}`, Err: "InvalidParameter: a b"},
		"a long message":         {Status: 200, Text: `{"Response":{"Error":{"Code":"InvalidParameter","Message":"` + strings.Repeat("x", 1000) + `"}}}`, Err: strings.Repeat("x", 300) + "…"},
	})
}

func TestSecretsAreNeverShown(t *testing.T) { bed().KeyLeaks(t, "cvm:DescribeInstances") }

func TestConfig(t *testing.T) {
	backendtest.Config(t, New, map[string]backendtest.Want{
		`{"Type":"tencent-vpc"}`:                              {},
		`{"Cluster":"blue-1"}`:                                {},
		`{"Cluster":"Blue"}`:                                  {Err: `Backend.Cluster is "Blue": want 1 to 63 characters`},
		`{"AccessKeyID":7}`:                                   {Err: "AccessKeyID: want a string, have number"},
		`{"AccessKeySecret":["very-secret"]}`:                 {Err: "AccessKeySecret: want a string, have array"},
		`{"AccessKeyID":"x"}`:                                 {Warning: "AccessKeyID and AccessKeySecret need each other"},
		`{"AccessKeyID":"x","AccessKeySecret":"very-secret"}`: {Warning: `key "AccessKeySecret" may contain a secret`},
		`{"SecretKey":"very-secret"}`:                         {Warning: `key "SecretKey" may contain a secret`},
	})
	_, _, err := New([]byte(`{}`), backendtest.Env(1500, prefix.IPv4, prefix.IPv6))
	if err == nil || !strings.Contains(err.Error(), "IPv6Network is fd00:10:5::/48: want none") {
		t.Errorf("error %v, want IPv6 refused", err)
	}
}

// FuzzAnswers decodes answers of the API. The destination of a route must be a prefix, and an error
// must be one line.
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
				if c, ok := (&vpc{}).convert(r, "t"); ok && (!c.Dst.IsValid() || c.Dst != c.Dst.Masked() || c.Target == "") {
					t.Errorf("%s: route %+v", text, c)
				}
			}
		}
	})
}

// TestDescription holds the fields that are read and written against the description of the API.
func TestDescription(t *testing.T) {
	api := schema.Load("tencent")
	for name, answer := range map[string]any{"vpc.RouteTable": table{}, "cvm.Instance": instance{}} {
		if err := api.CheckType(name, reflect.TypeOf(answer)); err != nil {
			t.Error(err)
		}
	}
}

// TestStates checks which routes carry packets.
func TestStates(t *testing.T) {
	yes, no := true, false
	for enabled, want := range map[*bool]cloud.State{nil: cloud.Carrying, &yes: cloud.Carrying, &no: cloud.Idle} {
		if got := (route{Enabled: enabled}).state(); got != want {
			t.Errorf("%v, want %v", got, want)
		}
	}
}

// TestCodes checks what codes of the API mean.
func TestCodes(t *testing.T) {
	for code, want := range map[string]string{
		"RequestLimitExceeded": "throttled", "OperationDenied.MutexTaskRunning": "throttled", "UnsupportedOperation.MutexOperationTaskRunning": "throttled",
		"OperationDenied": "failed", "UnauthorizedOperation": "denied", "UnauthorizedOperation.NoRealNameAuthentication": "failed", "LimitExceeded": "quota",
	} {
		if err := classify("vpc:X", "t", &access.Error{Status: 200, Code: code}); cloud.Kind(err) != want {
			t.Errorf("%s: %v, want %s", code, err, want)
		}
	}
}
