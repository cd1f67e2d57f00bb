// SPDX-License-Identifier: Apache-2.0

package alivpc

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend/alivpc/alitest"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/schema"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

var (
	own4, own6 = netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("fd00:77::1")
	peer4      = netip.MustParseAddr("192.168.77.2")
	dst        = backendtest.Subnet()
)

// bed describes this cloud for the tests in package backendtest. All clouds that have a route table
// for each subnet share these tests.
func bed() backendtest.VPC {
	return backendtest.VPC{
		New: New, Type: Type, Page: page, Families: []prefix.Family{prefix.IPv4, prefix.IPv6}, Metadata: alitest.Metadata,
		Open: func(t *testing.T) (*vpctest.State, http.Handler) { s := open(t); return s.State, s },
		API:  "ALIBABA_CLOUD_VPC_ENDPOINT", MetadataAPI: "ALIBABA_CLOUD_METADATA_ENDPOINT",
		Create: "CreateRouteEntry", Delete: "DeleteRouteEntry", Right: "vpc:CreateRouteEntry", Self: "i-1", Peer: "i-2", Gateway: "vpn-1",
	}
}

// open returns a fake cloud with two instances. The environment variables that it sets make this
// process the first of these instances.
func open(t *testing.T) alitest.Server {
	t.Helper()
	s := alitest.New()
	me := s.AddInstance(1, "vsw-1", own4, own6)
	s.AddInstance(2, "vsw-2", peer4)
	address := cloudtest.Serve(t, s)
	t.Setenv("ALIBABA_CLOUD_VPC_ENDPOINT", address)
	t.Setenv("ALIBABA_CLOUD_ECS_ENDPOINT", address+"/")
	t.Setenv("ALIBABA_CLOUD_METADATA_ENDPOINT", cloudtest.Serve(t, alitest.Metadata(me)))
	for _, name := range []string{"ACCESS_KEY_ID", "ACCESS_KEY_SECRET", "ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_SECURITY_TOKEN"} {
		t.Setenv(name, "")
	}
	return s
}

func TestSuite(t *testing.T) {
	bed().Suite(t, func(r *http.Request, _ string) bool {
		return strings.HasSuffix(r.Header.Get("X-Acs-Action"), "RouteEntry")
	})
}

func TestTableOfTheVSwitch(t *testing.T) { bed().OwnTable(t, "vsw-1", "vsw-2") }

func TestOldAnswers(t *testing.T) { bed().OldAnswers(t) }

// TestRouteThatModifyDoesNotSee checks the error if a route exists for CreateRouteEntry, but not
// yet for ModifyRouteEntry. cloud.Transient must be true for the error.
func TestRouteThatModifyDoesNotSee(t *testing.T) {
	s := open(t)
	s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: dst, Target: "i-2", Kind: vpctest.Custom})
	t.Setenv("ALIBABA_CLOUD_VPC_ENDPOINT", cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Acs-Action") != "ModifyRouteEntry" {
			s.ServeHTTP(w, r)
			return
		}
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprint(w, `{"Code":"InvalidRouteEntry.NotFound","Message":"Route entry not exists."}`)
	})))
	if err := bed().Joined(t).Put(t.Context(), backendtest.RouteTo("i-1"), true); !cloud.Transient(err) || errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want one that may end by itself", err)
	}
}

//stages:rest the days of a fleet take half a minute
func TestFleet(t *testing.T) { bed().Live(t, 4, true) } // a new instance has a new id

func TestTablesOfManyHosts(t *testing.T) { bed().ManyHosts(t, 12) }

func TestTablesOfOtherHosts(t *testing.T) { bed().Followers(t, "vsw-1") }

// TestUnreadableVSwitch checks that Followed returns no table for a host in a vSwitch that cannot be
// read, and the tables of the other hosts. If the error may end by itself, Followed must return it.
func TestUnreadableVSwitch(t *testing.T) {
	s := open(t)
	status, code := http.StatusNotFound, "InvalidVSwitchId.NotFound"
	t.Setenv("ALIBABA_CLOUD_VPC_ENDPOINT", cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.FormValue("VSwitchId") != "vsw-8" {
			s.ServeHTTP(w, r)
			return
		}
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"Code":%q,"Message":"x"}`, code)
	})))
	var hosts []cloud.Host
	for n, vSwitch := range []string{"vsw-8", "vsw-1"} {
		hosts = append(hosts, cloud.Host{Addresses: s.AddInstance(100+n, vSwitch, netip.AddrFrom4([4]byte{192, 168, 80, byte(n)})).Addresses})
	}
	c := bed().Backend(t, `{"Overflow":"vxlan"}`).Cloud
	if _, err := c.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	if found, err := c.Followed(t.Context(), hosts); err != nil || found[0] != "" || found[1] != vpctest.MainTable {
		t.Errorf("found %v, error %v, want no table for the first host, and %s for the second", found, err, vpctest.MainTable)
	}
	status, code = http.StatusInternalServerError, "InternalError"
	if _, err := c.Followed(t.Context(), hosts); !cloud.Transient(err) {
		t.Errorf("error %v, want one that may end by itself", err)
	}
}

func TestRoutesOfOthers(t *testing.T) { bed().RoutesOfOthers(t) }

func TestClusters(t *testing.T) { bed().Clusters(t) }

// TestSeveralNextHops checks that a route with several next hops, which an operator has made, is
// not replaced.
func TestSeveralNextHops(t *testing.T) {
	s := open(t)
	s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: dst, Target: "ri-1", More: []string{"ri-2"}, Kind: vpctest.Custom})
	c := bed().Joined(t)
	i := slices.IndexFunc(cloudtest.Routes(t, c), func(r cloud.Route) bool { return r.Dst == dst })
	if i < 0 || cloudtest.Routes(t, c)[i].Foreign == "" {
		t.Errorf("routes %v, want a foreign one", cloudtest.Routes(t, c))
	}
	if err := c.Put(t.Context(), backendtest.RouteTo("i-1"), false); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want ErrExists", err)
	}
	if err := c.Put(t.Context(), backendtest.RouteTo("i-1"), true); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want that the route is not replaced", err)
	}
	if err := c.Remove(t.Context(), backendtest.RouteTo("ri-1")); err != nil || s.Writes() > 0 {
		t.Errorf("error %v, %d writes, want none", err, s.Writes())
	}
}

// TestManagedRoute checks that a route is not replaced if a transit router manages it, or if it was
// learned, even if its type is Custom, like that of the routes of users.
func TestManagedRoute(t *testing.T) {
	s := open(t)
	s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: dst, Target: "i-2", Service: "TR", Kind: vpctest.Custom})
	c := bed().Joined(t)
	if got := cloudtest.Routes(t, c); !slices.ContainsFunc(got, func(r cloud.Route) bool { return r.Dst == dst && r.Foreign != "" }) {
		t.Errorf("routes %v, want a foreign one", got)
	}
	if err := c.Put(t.Context(), backendtest.RouteTo("i-1"), true); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want that the route is not replaced", err)
	}
	if err := c.Remove(t.Context(), backendtest.RouteTo("i-2")); err != nil || s.Writes() > 0 {
		t.Errorf("error %v, %d writes, want none", err, s.Writes())
	}
	for origin, foreign := range map[string]bool{"": false, "CustomCreate": false, "RoutePropagation": true} {
		e := entry{Dst: dst.String(), Type: custom, Origin: origin}
		e.Hops.All = []hop{{Kind: instanceHop, ID: "i-2"}}
		r, ok := (&vpc{}).convert(e)
		if !ok || (r.Foreign != "") != foreign {
			t.Errorf("origin %q: route %+v, want foreign %v", origin, r, foreign)
		}
	}
}

func TestPages(t *testing.T) { bed().Pages(t, "vsw-1") }

func TestCheckNamesEveryMissingPermission(t *testing.T) {
	bed().Rights(t,
		backendtest.Denied{Calls: []string{"DescribeVSwitchAttributes"}, Permissions: []string{"vpc:DescribeVSwitchAttributes"}},
		backendtest.Denied{Calls: []string{"DescribeRouteEntryList"}, Permissions: []string{"vpc:DescribeRouteEntryList"}},
		backendtest.Denied{Calls: []string{"DescribeInstances"}, Permissions: []string{"ecs:DescribeInstances"}},
		backendtest.Denied{
			Calls:       []string{"CreateRouteEntry", "ModifyRouteEntry", "DeleteRouteEntry"},
			Permissions: []string{"vpc:CreateRouteEntry", "vpc:ModifyRouteEntry", "vpc:DeleteRouteEntry"},
		},
	)
}

func TestRefusedHosts(t *testing.T) {
	bed().RefusedHosts(t, map[string]backendtest.Refused{
		"another address":         {Values: map[string]string{"private-ipv4s": `["192.168.9.9"]`, "ipv6s": "[]"}, Err: "the metadata service of Alibaba Cloud does not know [192.168.77.1]"},
		"no addresses":            {Values: map[string]string{"private-ipv4s": "nonsense", "ipv6s": "nonsense"}, Err: "does not know [192.168.77.1]"},
		"a secondary interface":   {Values: map[string]string{"meta-data/mac": "00:16:3e:00:00:02"}, Err: "not the primary network interface of i-1"},
		"no role":                 {Values: map[string]string{"/security-credentials/": ""}, Err: "the instance has no role: attach one with the policy in " + page},
		"no keys":                 {Values: map[string]string{"/security-credentials/flanneld": "{}"}, Err: "has sent no keys", Transient: true},
		"an instance without ECS": {Values: map[string]string{"instance-id": "i-9"}, Err: "ECS does not know i-9", Transient: true},
		"no metadata service":     {Values: map[string]string{"": ""}, Err: "read region-id from the metadata service of Alibaba Cloud: the value does not exist"},
		"a network in the VPC":    {Network: "192.168.128.0/17", Err: "the network 192.168.128.0/17 overlaps 192.168.0.0/16 of the VPC"},
		"a network over the VPC":  {Network: "192.0.0.0/8", Err: "the network 192.0.0.0/8 overlaps 192.168.0.0/16 of the VPC"},
	})
}

func TestClaim(t *testing.T) { bed().Claims(t) }

// TestKeys checks that flanneld uses the keys of the first source that has some. The server accepts
// only keys with a token. Keys in the variables of flannel have no token, so they are refused.
func TestKeys(t *testing.T) {
	right := map[string]string{"_ID": vpctest.KeyID, "_SECRET": vpctest.Secret}
	for name, test := range map[string]struct {
		raw  string
		env  string // prefix of the environment variables with the right keys; empty if they have none
		role bool
		err  string
	}{
		"the role":            {`{}`, "", true, ""},
		"no keys":             {`{}`, "", false, "the instance has no role"},
		"names of flannel":    {`{}`, "ACCESS_KEY", false, "refuses the keys (SignatureDoesNotMatch)"},
		"names of the SDK":    {`{}`, "ALIBABA_CLOUD_ACCESS_KEY", false, ""},
		"half a pair":         {`{"AccessKeyID":"id"}`, "", true, ""},
		"wrong configuration": {`{"AccessKeyID":"id","AccessKeySecret":"very-secret"}`, "ACCESS_KEY", true, "Alibaba Cloud refuses the keys (SignatureDoesNotMatch)"},
	} {
		s := open(t)
		for suffix, value := range right {
			if test.env != "" {
				t.Setenv(test.env+suffix, value)
			}
		}
		t.Setenv("ALIBABA_CLOUD_SECURITY_TOKEN", vpctest.Token)
		if !test.role {
			bed().ReplaceMetadata(t, s.State, map[string]string{"/security-credentials/": ""})
		}
		err := bed().Backend(t, test.raw).Cloud.Check(t.Context())
		if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
			t.Errorf("%s: error %v, want %q", name, err, test.err)
		}
	}
}

func TestNewKeys(t *testing.T) {
	bed().NewKeys(t, `{"AccessKeyId":"old","AccessKeySecret":"old","SecurityToken":"old","Expiration":"2100-01-01T00:00:00Z"}`)
}

func TestRedirect(t *testing.T) { bed().Redirect(t) }

func TestEndpoints(t *testing.T) {
	bed().Endpoints(t, "vpc-vpc.cn-hangzhou.aliyuncs.com", "ALIBABA_CLOUD_VPC_ENDPOINT", "ALIBABA_CLOUD_ECS_ENDPOINT", "ALIBABA_CLOUD_METADATA_ENDPOINT")
}

// TestAnswers checks the errors for answers of the API that flanneld does not expect.
func TestAnswers(t *testing.T) {
	bed().Answers(t, map[string]backendtest.Answer{
		"endless pages":        {Status: 200, Text: `{"RouteTable":{"RouteTableId":"rtb-main"},"NextToken":"again"}`, Err: "refers to itself"},
		"no table":             {Status: 200, Text: `{}`, Err: "knows no route table of vSwitch vsw-1"},
		"no JSON":              {Status: 200, Text: `<html>`, Err: "decode the answer"},
		"a gateway's error":    {Status: 502, Text: `<html>`, Err: "502: Bad Gateway", Transient: true},
		"an internal error":    {Status: 500, Text: `{"Code":"InternalError","Message":"again"}`, Err: "InternalError: again", Transient: true},
		"an old signature":     {Status: 400, Text: `{"Code":"InvalidTimeStamp.Expired","Message":"x"}`, Err: "this host's clock"},
		"a RAM error of VPC":   {Status: 400, Text: `{"Code":"Forbbiden","Message":"User not authorized to operate on the specified resource."}`, Err: "permission vpc:DescribeVSwitchAttributes is missing"},
		"a route of others":    {Status: 400, Text: `{"Code":"Forbbiden","Message":"Specified RouteEntry cannot allowed delete by openApi."}`, Err: "Forbbiden: Specified RouteEntry cannot allowed delete"},
		"an unknown vSwitch":   {Status: 404, Text: `{"Code":"InvalidVSwitchId.NotFound","Message":"the vSwitch\ndoes not exist"}`, Err: "InvalidVSwitchId.NotFound: the vSwitch does not exist"},
		"an error without one": {Status: 418, Text: ``, Err: "418"},
		"a long message":       {Status: 404, Text: `{"Code":"InvalidVSwitchId.NotFound","Message":"` + strings.Repeat("x", 1000) + `"}`, Err: strings.Repeat("x", 300) + "…"},
	})
}

// TestCodes checks which codes of the API mean that a call may be repeated.
func TestCodes(t *testing.T) {
	for want, codes := range map[error][]string{
		cloud.ErrThrottled: {
			"Throttling", "Throttling.User", "SystemBusy", "TaskConflict", "LastTokenProcessing", "IncorrectRouteEntryStatus", "IncorrcetRouteEntryStatus",
			"IncorrectStatus.VpcRouteEntry", "IncorrectStatus", "IncorrectVpcStatus", "IncorrectVSwitchStatus",
		},
		cloud.ErrUnavailable: {"UnknownError", "IncorrectInstanceStatus"},
		nil:                  {"InvalidVpc.NotFound", "OperationDenied"},
	} {
		for _, code := range codes {
			err := classify("vpc:X", "t", &access.Error{Status: 400, Code: code})
			if want == nil && cloud.Transient(err) || want != nil && !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", code, err, want)
			}
		}
	}
}

func TestSecretsAreNeverShown(t *testing.T) { bed().KeyLeaks(t, "ecs:DescribeInstances") }

func TestConfig(t *testing.T) {
	backendtest.Config(t, New, map[string]backendtest.Want{
		`{"Type":"ali-vpc"}`:                                  {},
		`{"Cluster":"blue-1"}`:                                {},
		`{"Cluster":"Blue"}`:                                  {Err: `Backend.Cluster is "Blue": want 1 to 63 characters`},
		`{"AccessKeyID":7}`:                                   {Err: "AccessKeyID: want a string, have number"},
		`{"AccessKeySecret":["very-secret"]}`:                 {Err: "AccessKeySecret: want a string, have array"},
		`{"AccessKeyID":"x"}`:                                 {Warning: "AccessKeyID and AccessKeySecret need each other"},
		`{"accesskeyid":"x","accesskeysecret":"very-secret"}`: {Warning: `key "accesskeysecret" may contain a secret`},
		`{"AccessKeySecrt":"very-secret"}`:                    {Warning: `the nearest known key is "AccessKeySecret"`},
	})
}

// FuzzAnswers decodes answers of the API. The destination of a route must be a prefix. A route with
// several next hops must be foreign, so that it is not replaced. An error must be one line.
func FuzzAnswers(f *testing.F) {
	f.Add(200, []byte(`{"DestinationCidrBlock":"10.5.1.0/24","Type":"Custom","NextHops":{"NextHop":[{"NextHopType":"Instance","NextHopId":"i-1"}]}}`))
	f.Add(400, []byte(`{"Code":"Throttling","Message":"a\nb"}`))
	f.Add(400, []byte(`{"Code":"a\nb"}`))
	f.Fuzz(func(t *testing.T, status int, text []byte) {
		var e entry
		if json.Unmarshal(text, &e) == nil {
			r, ok := (&vpc{}).convert(e)
			if ok && (!r.Dst.IsValid() || r.Dst != r.Dst.Masked() || r.Target == "") {
				t.Errorf("%s: route %+v", text, r)
			}
			if ok && r.ByCall && r.Foreign == "" && len(e.Hops.All) > 1 {
				t.Errorf("%s: route %+v may be replaced", text, r)
			}
		}
		var i instance
		if json.Unmarshal(text, &i) == nil {
			i.primary()
		}
		if err := classify("vpc:X", "t", decodeError(status, text)); err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %q has several lines", text, err)
		}
	})
}

// TestPending checks that a route counts only when the API calls it available: Put waits for that, and the states of
// all other statuses are those of a change in progress.
func TestPending(t *testing.T) {
	s := open(t)
	s.SetPending(1500 * time.Millisecond)
	c := bed().Joined(t)
	begin := time.Now()
	if err := c.Put(t.Context(), backendtest.RouteTo("i-1"), false); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took < 1500*time.Millisecond || len(s.Forwarding(vpctest.MainTable)) != 1 {
		t.Errorf("Put has taken %v, and the VPC forwards to %v, want it after 1.5s", took, s.Forwarding(vpctest.MainTable))
	}
	if err := c.Put(t.Context(), backendtest.RouteTo("i-2"), true); err != nil {
		t.Fatal(err)
	}
	s.SetPending(time.Hour)
	got := cloudtest.Routes(t, c)
	if i := slices.IndexFunc(got, func(r cloud.Route) bool { return r.Dst == dst }); i < 0 || got[i].State != cloud.Changing {
		t.Errorf("routes %v, want one that the cloud is changing", got)
	}
	for status, want := range map[string]cloud.State{"Pending": cloud.Changing, "Available": cloud.Carrying, "Modifying": cloud.Changing, "Deleting": cloud.Changing} {
		if got := state(status); got != want {
			t.Errorf("%s: %v, want %v", status, got, want)
		}
	}
}

// TestIPv6ToPrimaryInterface checks that a host names this refusal before it takes a lease.
func TestIPv6ToPrimaryInterface(t *testing.T) {
	s := open(t)
	t.Setenv("ALIBABA_CLOUD_VPC_ENDPOINT", cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.Header.Get("X-Acs-Action"), "CreateRouteEntry") && strings.Contains(r.FormValue("DestinationCidrBlock"), ":") {
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, `{"Code":"OperationUnsupported.Ipv6EntryOnPrimaryNetworkInterface","Message":"You cannot create IPv6 route entries on a primary network interface."}`)
			return
		}
		s.ServeHTTP(w, r)
	})))
	cloudtest.CheckFails(t, "dual stack", bed().Backend(t, `{}`).Cloud, "Alibaba Cloud allows no IPv6 routes to the primary network interface of i-1: remove IPv6Network", false)
}

func TestECSHost(t *testing.T) {
	for region, want := range map[string]string{"cn-hangzhou": "ecs.cn-hangzhou.aliyuncs.com", "cn-hangzhou-finance": "ecs.aliyuncs.com"} {
		if got := ecsHost(region); got != want {
			t.Errorf("%s: %s, want %s", region, got, want)
		}
	}
}

// TestDescription holds the fields that are read, and the statuses of a route, against the description of the API.
func TestDescription(t *testing.T) {
	api := schema.Load("ali")
	for name, answer := range map[string]any{"vpc.RouteEntry": entry{}, "ecs.Instance": instance{}, "vpc.DescribeVSwitchAttributesResponse": vSwitch{}} {
		if err := api.CheckType(name, reflect.TypeOf(answer)); err != nil {
			t.Error(err)
		}
	}
	for _, status := range api.Values("RouteEntryStatus") {
		if got := state(status); got != cloud.Changing && status != "Available" || got != cloud.Carrying && status == "Available" {
			t.Errorf("%s: %v", status, got)
		}
	}
}
