// SPDX-License-Identifier: Apache-2.0

package alivpc

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
	"github.com/flanneld/flanneld/backend/alivpc/alitest"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
)

var (
	own4, own6 = netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("fd00:77::1")
	peer4      = netip.MustParseAddr("192.168.77.2")
	dst        = netip.MustParsePrefix("10.5.1.0/24")
)

// open returns a cloud with two instances, and makes this process the first of them: the metadata
// service and the API are those of the test.
func open(t *testing.T) alitest.Server {
	t.Helper()
	s := alitest.New()
	me := s.AddInstance(1, "vsw-1", own4, own6)
	s.AddInstance(2, "vsw-2", peer4)
	address := serve(t, s)
	t.Setenv("ALIBABA_CLOUD_VPC_ENDPOINT", address)
	t.Setenv("ALIBABA_CLOUD_ECS_ENDPOINT", address+"/")
	t.Setenv("ALIBABA_CLOUD_METADATA_ENDPOINT", serve(t, alitest.Metadata(me)))
	for _, name := range []string{"ACCESS_KEY_ID", "ACCESS_KEY_SECRET", "ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_SECURITY_TOKEN"} {
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

// newBackend returns a backend with that Backend object, on a dual-stack host.
func newBackend(t *testing.T, raw string) *backend.CloudBackend {
	t.Helper()
	b, _, err := New([]byte(raw), backendtest.Env(1500, prefix.IPv4, prefix.IPv6))
	if err != nil {
		t.Fatal(err)
	}
	return b.(*backend.CloudBackend)
}

// joined returns a Cloud after Join.
func joined(t *testing.T) cloud.Cloud {
	t.Helper()
	c := newBackend(t, `{}`).Cloud
	if self, err := c.Join(t.Context()); err != nil || self != "i-1" {
		t.Fatalf("target %q, error %v", self, err)
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
		api, lose := cloudtest.LoseAnswers(s, func(r *http.Request, _ string) bool { return slices.Contains(s.Writing, r.Header.Get("X-Acs-Action")) })
		t.Setenv("ALIBABA_CLOUD_VPC_ENDPOINT", serve(t, api))
		return cloudtest.Fixture{
			Cloud: newBackend(t, `{"Type":"ali-vpc"}`).Cloud, Table: vpctest.MainTable, Peer: "i-2", PeerAddress: peer4,
			DeleteByHand: func(dst netip.Prefix) { s.DeleteRoute(vpctest.MainTable, dst) },
			EndPeer:      func() { s.Terminate("i-2") },
			SetQuota:     s.SetQuota,
			Deny:         func() { s.Deny("CreateRouteEntry", true) },
			Throttle:     s.Throttle,
			SetAway:      s.SetAway,
			LoseAnswer:   lose,
			Gaps:         func() int { return s.Succeeded("DeleteRouteEntry") },
		}
	})
}

// TestTableOfTheVSwitch expects that the table of the own vSwitch is used, and not the first one.
func TestTableOfTheVSwitch(t *testing.T) {
	s := open(t)
	s.AddTable("rtb-a", "vsw-2")
	s.AddTable("rtb-z", "vsw-1")
	c := joined(t)
	tables, err := c.Tables(t.Context())
	if err != nil || len(tables) != 1 || tables[0].ID != "rtb-z" {
		t.Errorf("tables %v, error %v, want that of the own vSwitch", tables, err)
	}
}

// TestOldAnswers puts a route while descriptions still show the time before the last calls.
func TestOldAnswers(t *testing.T) {
	s := open(t)
	s.SetLag(time.Hour)
	c := joined(t)
	r := routeTo("i-1")
	if err := c.Put(t.Context(), r, true); err != nil { // there is none yet
		t.Error(err)
	}
	if err := c.Put(t.Context(), r, false); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want ErrExists", err)
	}
	if err := c.Put(t.Context(), r, true); err != nil {
		t.Error(err)
	}
	if target, _ := s.RouteTo(vpctest.MainTable, dst); target != "i-1" {
		t.Errorf("the route leads to %q, want i-1", target)
	}
}

// TestRouteThatModifyDoesNotSee expects that a route which exists for CreateRouteEntry but not for
// ModifyRouteEntry is a reason to try again.
func TestRouteThatModifyDoesNotSee(t *testing.T) {
	s := open(t)
	s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: dst, Target: "i-2", Kind: vpctest.Custom})
	t.Setenv("ALIBABA_CLOUD_VPC_ENDPOINT", serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Acs-Action") != "ModifyRouteEntry" {
			s.ServeHTTP(w, r)
			return
		}
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprint(w, `{"Code":"InvalidRouteEntry.NotFound","Message":"Route entry not exists."}`)
	})))
	if err := joined(t).Put(t.Context(), routeTo("i-1"), true); !cloud.Transient(err) || errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want one that may end by itself", err)
	}
}

// TestRoutesOfOthers expects that routes of operators and gateways stay, also those that lead to this
// instance, which flannel deleted.
func TestRoutesOfOthers(t *testing.T) {
	s := open(t)
	for _, r := range []vpctest.Route{
		{Dst: netip.MustParsePrefix("0.0.0.0/0"), Target: "i-1", Kind: vpctest.Custom},
		{Dst: netip.MustParsePrefix("172.16.0.0/16"), Target: "i-1", Kind: vpctest.Custom},
		{Dst: netip.MustParsePrefix("10.9.0.0/16"), Target: "vgw-1", Kind: vpctest.Learned},
		{Dst: netip.MustParsePrefix("10.5.1.0/24"), Target: "i-1", Kind: vpctest.Custom},
	} {
		s.AddRoute(vpctest.MainTable, r)
	}
	c := joined(t)
	before := s.Routes(vpctest.MainTable)
	if err := c.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if got := routes(t, c); !slices.Contains(got, routeTo("i-1")) {
		t.Errorf("routes %v, want that of flannel to this instance adopted", got)
	}
	for _, target := range []string{"i-2", "vgw-1"} {
		if err := c.Remove(t.Context(), routeTo(target)); err != nil {
			t.Error(err)
		}
	}
	if after := s.Routes(vpctest.MainTable); s.Writes() > 0 || len(after) != len(before) {
		t.Errorf("%d writes, routes %v", s.Writes(), after)
	}
}

// TestSeveralNextHops expects that a route of an operator with several next hops is not replaced.
func TestSeveralNextHops(t *testing.T) {
	s := open(t)
	s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: dst, Target: "ri-1", More: []string{"ri-2"}, Kind: vpctest.Custom})
	c := joined(t)
	i := slices.IndexFunc(routes(t, c), func(r cloud.Route) bool { return r.Dst == dst })
	if i < 0 || !routes(t, c)[i].Foreign {
		t.Errorf("routes %v, want a foreign one", routes(t, c))
	}
	if err := c.Put(t.Context(), routeTo("i-1"), false); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want ErrExists", err)
	}
	if err := c.Put(t.Context(), routeTo("i-1"), true); err == nil || !strings.Contains(err.Error(), "belongs to another program") {
		t.Errorf("error %v, want that the route is not replaced", err)
	}
	if err := c.Remove(t.Context(), routeTo("ri-1")); err != nil || s.Writes() > 0 {
		t.Errorf("error %v, %d writes, want none", err, s.Writes())
	}
}

// TestManagedRoute expects that a route which a transit router manages, or which a call has not made, is
// not replaced, although its type is that of routes of users.
func TestManagedRoute(t *testing.T) {
	s := open(t)
	s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: dst, Target: "i-2", Service: "TR", Kind: vpctest.Custom})
	c := joined(t)
	if got := routes(t, c); !slices.ContainsFunc(got, func(r cloud.Route) bool { return r.Dst == dst && r.Foreign }) {
		t.Errorf("routes %v, want a foreign one", got)
	}
	if err := c.Put(t.Context(), routeTo("i-1"), true); err == nil || !strings.Contains(err.Error(), "belongs to another program") {
		t.Errorf("error %v, want that the route is not replaced", err)
	}
	if err := c.Remove(t.Context(), routeTo("i-2")); err != nil || s.Writes() > 0 {
		t.Errorf("error %v, %d writes, want none", err, s.Writes())
	}
	for origin, foreign := range map[string]bool{"": false, "CustomCreate": false, "RoutePropagation": true} {
		r, ok := entry{Dst: dst.String(), Type: custom, Origin: origin}.convert("t")
		if !ok || r.Foreign != foreign {
			t.Errorf("origin %q: route %+v, want foreign %v", origin, r, foreign)
		}
	}
}

// TestAddressesOfInstances expects that ECS is only asked for instances.
func TestAddressesOfInstances(t *testing.T) {
	open(t)
	c := joined(t)
	got, err := c.Addresses(t.Context(), []string{"ngw-1", "i-2", "an unknown target", "eni-1"})
	if err != nil || len(got) != 1 || !slices.Contains(got["i-2"], peer4) {
		t.Errorf("hosts %v, error %v, want only i-2", got, err)
	}
	if got, err := c.Addresses(t.Context(), []string{"ngw-1"}); err != nil || len(got) != 0 {
		t.Errorf("hosts %v, error %v, want none", got, err)
	}
}

// TestPages has more routes and instances than one answer.
func TestPages(t *testing.T) {
	s := open(t)
	s.SetQuota(1000)
	s.SetPageSize(7)
	for n := range 230 {
		i := s.AddInstance(100+n, "vsw-1", netip.AddrFrom4([4]byte{192, 168, 78, byte(n)}))
		s.AddRoute(vpctest.MainTable, vpctest.Route{Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 5, byte(n), 0}), 24), Target: i.ID, Kind: vpctest.Custom})
	}
	s.Stop("i-120")
	s.Terminate("i-329")
	lost := 0
	got := routes(t, joined(t))
	for _, r := range got {
		if r.Lost {
			lost++
		}
		if want := r.Target == "i-120" || r.Target == "i-329"; r.Lost != want {
			t.Errorf("%v: want lost %v", r, want)
		}
	}
	if len(got) != 231 || lost != 2 {
		t.Errorf("%d routes, %d lost, want 231 and 2", len(got), lost)
	}
}

func TestCheckNamesEveryMissingPermission(t *testing.T) {
	for _, test := range []struct{ denied, want []string }{
		{[]string{"DescribeVSwitchAttributes"}, []string{"vpc:DescribeVSwitchAttributes"}},
		{[]string{"DescribeRouteEntryList"}, []string{"vpc:DescribeRouteEntryList"}},
		{[]string{"DescribeInstances"}, []string{"ecs:DescribeInstances"}},
		{[]string{"CreateRouteEntry", "ModifyRouteEntry", "DeleteRouteEntry"}, []string{"vpc:CreateRouteEntry", "vpc:ModifyRouteEntry", "vpc:DeleteRouteEntry"}},
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
		metadata  func(http.Handler) http.Handler
		network   string
		err       string
		transient bool
	}{
		"another address":         {values(map[string]string{"private-ipv4s": `["192.168.9.9"]`, "ipv6s": "[]"}), "10.5.0.0/16", "the metadata service of Alibaba Cloud does not know [192.168.77.1]", false},
		"no addresses":            {values(map[string]string{"private-ipv4s": "nonsense", "ipv6s": "nonsense"}), "10.5.0.0/16", "does not know [192.168.77.1]", false},
		"a secondary interface":   {values(map[string]string{"meta-data/mac": "00:16:3e:00:00:02"}), "10.5.0.0/16", "not the primary network interface of i-1", false},
		"no role":                 {without("ram/"), "10.5.0.0/16", "the instance has no role: attach one with the policy in " + page, false},
		"no keys":                 {values(map[string]string{"ram/security-credentials/flanneld": "{}"}), "10.5.0.0/16", "has sent no keys", true},
		"an instance without ECS": {values(map[string]string{"instance-id": "i-9"}), "10.5.0.0/16", "ECS does not know i-9", true},
		"no metadata service":     {without("/"), "10.5.0.0/16", "read region-id from the metadata service of Alibaba Cloud: the value does not exist", false},
		"a network in the VPC":    {values(nil), "192.168.128.0/17", "the network 192.168.128.0/17 overlaps 192.168.0.0/16 of the VPC", false},
		"a network over the VPC":  {values(nil), "192.0.0.0/8", "the network 192.0.0.0/8 overlaps 192.168.0.0/16 of the VPC", false},
	} {
		s := open(t)
		t.Setenv("ALIBABA_CLOUD_METADATA_ENDPOINT", serve(t, test.metadata(alitest.Metadata(vpctest.Instance{ID: "i-1", Subnet: "vsw-1", Addresses: []netip.Addr{own4}}))))
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

// values replaces values of a metadata service whose paths end with the keys.
func values(other map[string]string) func(http.Handler) http.Handler {
	return func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for path, text := range other {
				if strings.HasSuffix(r.URL.Path, path) {
					fmt.Fprint(w, text)
					return
				}
			}
			h.ServeHTTP(w, r)
		})
	}
}

// without removes the values of a metadata service whose paths contain part.
func without(part string) func(http.Handler) http.Handler {
	return func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.URL.Path, part) {
				http.NotFound(w, r)
				return
			}
			h.ServeHTTP(w, r)
		})
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
		"a new host":                  {subnet.Claim{}, nil, "permission vpc:CreateRouteEntry is missing: " + page + " has the policy to paste"},
		"a host with a lease":         {held, []string{Type}, ""},
		"a host with another backend": {held, []string{"vxlan"}, "permission vpc:CreateRouteEntry is missing"},
	} {
		s := open(t)
		s.Deny("CreateRouteEntry", true)
		b := newBackend(t, `{}`)
		b.Env.Used = test.used
		claim, err := b.Claim(t.Context(), test.prev)
		if test.err == "" && (err != nil || len(s.Calls()) > 0) || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
			t.Errorf("%s: error %v, want %q", name, err, test.err)
		}
		if claim.BackendType != "" || len(claim.Endpoints) != 2 {
			t.Errorf("%s: claim %+v, want no type, and both families", name, claim)
		}
	}
}

// TestKeys takes the keys from each source. The keys of the first one count. The server wants keys
// with a token, which those with the names of flannel do not have.
func TestKeys(t *testing.T) {
	right := map[string]string{"_ID": vpctest.KeyID, "_SECRET": vpctest.Secret}
	for name, test := range map[string]struct {
		raw  string
		env  string // prefix of the variables with the right keys
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
		open(t)
		for suffix, value := range right {
			if test.env != "" {
				t.Setenv(test.env+suffix, value)
			}
		}
		t.Setenv("ALIBABA_CLOUD_SECURITY_TOKEN", vpctest.Token)
		if !test.role {
			t.Setenv("ALIBABA_CLOUD_METADATA_ENDPOINT", serve(t, without("ram/")(alitest.Metadata(vpctest.Instance{ID: "i-1", Subnet: "vsw-1", Addresses: []netip.Addr{own4}}))))
		}
		err := newBackend(t, test.raw).Cloud.Check(t.Context())
		if test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
			t.Errorf("%s: error %v, want %q", name, err, test.err)
		}
	}
}

// TestNewKeys expects that refused keys are asked for again, because the role may have new ones.
func TestNewKeys(t *testing.T) {
	open(t)
	asked := 0
	h := alitest.Metadata(vpctest.Instance{ID: "i-1", Subnet: "vsw-1", Addresses: []netip.Addr{own4}})
	t.Setenv("ALIBABA_CLOUD_METADATA_ENDPOINT", serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/security-credentials/flanneld") {
			if asked++; asked == 1 {
				fmt.Fprint(w, `{"AccessKeyId":"old","AccessKeySecret":"old","SecurityToken":"old","Expiration":"2100-01-01T00:00:00Z"}`)
				return
			}
		}
		h.ServeHTTP(w, r)
	})))
	if err := newBackend(t, `{}`).Cloud.Check(t.Context()); err != nil || asked != 2 {
		t.Errorf("error %v, asked %d times, want twice", err, asked)
	}
}

// TestRedirect expects that calls go to no other server.
func TestRedirect(t *testing.T) {
	s := open(t)
	t.Setenv("ALIBABA_CLOUD_VPC_ENDPOINT", serve(t, http.RedirectHandler(os.Getenv("ALIBABA_CLOUD_ECS_ENDPOINT"), http.StatusTemporaryRedirect)))
	err := newBackend(t, `{}`).Cloud.Check(t.Context())
	if err == nil || !strings.Contains(err.Error(), "307") || len(s.Calls()) > 0 {
		t.Errorf("error %v, calls %v, want none and an error with the status", err, s.Calls())
	}
}

// TestEndpoints expects that an address without a scheme is refused for good, by the name of its variable.
func TestEndpoints(t *testing.T) {
	for _, name := range []string{"ALIBABA_CLOUD_VPC_ENDPOINT", "ALIBABA_CLOUD_ECS_ENDPOINT", "ALIBABA_CLOUD_METADATA_ENDPOINT"} {
		open(t)
		t.Setenv(name, "vpc-vpc.cn-hangzhou.aliyuncs.com")
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
		"endless pages":        {200, `{"RouteTable":{"RouteTableId":"rtb-main"},"NextToken":"again"}`, "refers to itself", false},
		"no table":             {200, `{}`, "knows no route table of vSwitch vsw-1", false},
		"no JSON":              {200, `<html>`, "decode the answer", false},
		"a gateway's error":    {502, `<html>`, "502: Bad Gateway", true},
		"an internal error":    {500, `{"Code":"InternalError","Message":"again"}`, "InternalError: again", true},
		"an old signature":     {400, `{"Code":"InvalidTimeStamp.Expired","Message":"x"}`, "this host's clock", false},
		"a RAM error of VPC":   {400, `{"Code":"Forbbiden","Message":"User not authorized to operate on the specified resource."}`, "permission vpc:DescribeVSwitchAttributes is missing", false},
		"a route of others":    {400, `{"Code":"Forbbiden","Message":"Specified RouteEntry cannot allowed delete by openApi."}`, "Forbbiden: Specified RouteEntry cannot allowed delete", false},
		"an unknown vSwitch":   {404, `{"Code":"InvalidVSwitchId.NotFound","Message":"the vSwitch\ndoes not exist"}`, "InvalidVSwitchId.NotFound: the vSwitch does not exist", false},
		"an error without one": {418, ``, "418", false},
	} {
		open(t)
		t.Setenv("ALIBABA_CLOUD_VPC_ENDPOINT", serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(test.status)
			fmt.Fprint(w, test.text)
		})))
		err := newBackend(t, `{}`).Cloud.Check(t.Context())
		if err == nil || !strings.Contains(err.Error(), test.err) || cloud.Transient(err) != test.transient {
			t.Errorf("%s: error %v, transient %v, want %q, %v", name, err, cloud.Transient(err), test.err, test.transient)
		}
	}
}

// TestCodes sorts the codes of the API.
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

// TestSecretsAreNeverShown makes calls fail in many ways, and searches errors and log for the secrets
// of the host.
func TestSecretsAreNeverShown(t *testing.T) {
	var out bytes.Buffer
	log := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&out), textlogger.Verbosity(10)))
	for _, test := range []struct {
		raw   string
		fault func(alitest.Server)
	}{
		{`{}`, func(alitest.Server) {}},
		{`{}`, func(s alitest.Server) { s.SetAway(true) }},
		{`{}`, func(s alitest.Server) { s.Deny("DescribeInstances", true) }},
		{`{}`, func(alitest.Server) { t.Setenv("ALIBABA_CLOUD_VPC_ENDPOINT", "http://127.0.0.1:1") }},
		{`{}`, func(alitest.Server) { t.Setenv("ALIBABA_CLOUD_VPC_ENDPOINT", "http://"+vpctest.Secret+"%") }},
		{`{"AccessKeyID":"id","AccessKeySecret":"` + vpctest.Secret + `-wrong"}`, func(alitest.Server) {}},
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
	if !strings.Contains(out.String(), "refuses the keys") || !strings.Contains(out.String(), "permission ecs:DescribeInstances is missing") {
		t.Errorf("the faults are not in the log:\n%s", out.String())
	}
}

func TestConfig(t *testing.T) {
	for raw, want := range map[string]struct{ err, warning string }{
		`{"Type":"ali-vpc"}`:                                  {},
		`{"AccessKeyID":7}`:                                   {err: "AccessKeyID: want a string, have number"},
		`{"AccessKeySecret":["very-secret"]}`:                 {err: "AccessKeySecret: want a string, have array"},
		`{"AccessKeyID":"x"}`:                                 {warning: "AccessKeyID and AccessKeySecret need each other"},
		`{"accesskeyid":"x","accesskeysecret":"very-secret"}`: {warning: `key "accesskeysecret" may contain a secret`},
		`{"AccessKeySecrt":"very-secret"}`:                    {warning: `the nearest known key is "AccessKeySecret"`},
	} {
		_, warnings, err := New([]byte(raw), backendtest.Env(1500, prefix.IPv4))
		all := strings.Join(warnings, "; ")
		if want.err == "" && err != nil || want.err != "" && (err == nil || !strings.Contains(err.Error(), want.err)) ||
			!strings.Contains(all, want.warning) || want.warning == "" && all != "" || strings.Contains(all+fmt.Sprint(err), "very-secret") {
			t.Errorf("%s: warnings %q, error %v, want %+v", raw, warnings, err, want)
		}
	}
}

// FuzzAnswers decodes answers of the API. A route must have a prefix as its destination, and only one
// that a call has made with at most one next hop may be replaced.
func FuzzAnswers(f *testing.F) {
	f.Add(200, []byte(`{"DestinationCidrBlock":"10.5.1.0/24","Type":"Custom","NextHops":{"NextHop":[{"NextHopType":"Instance","NextHopId":"i-1"}]}}`))
	f.Add(400, []byte(`{"Code":"Throttling","Message":"a\nb"}`))
	f.Add(400, []byte(`{"Code":"a\nb"}`))
	f.Fuzz(func(t *testing.T, status int, text []byte) {
		var e entry
		if json.Unmarshal(text, &e) == nil {
			r, ok := e.convert("t")
			if ok && (!r.Dst.IsValid() || r.Dst != r.Dst.Masked() || r.Target == "") {
				t.Errorf("%s: route %+v", text, r)
			}
			if ok && r.ByCall && !r.Foreign && len(e.Hops.All) > 1 {
				t.Errorf("%s: route %+v may be replaced", text, r)
			}
		}
		var i instance
		if json.Unmarshal(text, &i) == nil {
			i.addresses()
		}
		if err := classify("vpc:X", "t", decodeError(status, text)); err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %q has several lines", text, err)
		}
	})
}
