// SPDX-License-Identifier: Apache-2.0

package awsvpc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/backend/awsvpc/ec2test"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/schema"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

var (
	own4, own6 = netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("fd00:77::1")
	peer4      = netip.MustParseAddr("192.168.77.2")
)

// bed describes this cloud for the tests in package backendtest. All clouds that have a route table
// for each subnet share these tests.
func bed() backendtest.VPC {
	return backendtest.VPC{
		New: New, Type: Type, Page: page, Families: []prefix.Family{prefix.IPv4, prefix.IPv6}, Metadata: ec2test.Metadata,
		Open: func(t *testing.T) (*vpctest.State, http.Handler) { s := open(t); return s.State, s },
		API:  "AWS_ENDPOINT_URL_EC2", MetadataAPI: "AWS_EC2_METADATA_SERVICE_ENDPOINT",
		Create: "CreateRoute", Delete: "DeleteRoute", Right: "ec2:CreateRoute", Self: "eni-1", Peer: "eni-2", Gateway: "tgw-1", Unmarked: true,
	}
}

// open returns a fake cloud with two instances. The environment variables that it sets make this
// process the first of these instances.
func open(t *testing.T) *ec2test.Server {
	t.Helper()
	s := ec2test.New()
	me := s.AddInstance(1, "subnet-1", own4, own6)
	s.AddInstance(2, "subnet-2", peer4)
	become(t, ec2test.Metadata(me), cloudtest.Serve(t, s))
	return s
}

// become sets environment variables that make this process an instance. metadata is the metadata
// service of the instance, and api the URL of EC2.
func become(t *testing.T, metadata http.Handler, api string) {
	t.Helper()
	t.Setenv("AWS_ENDPOINT_URL_EC2", api)
	t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", cloudtest.Serve(t, metadata))
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_ENDPOINT_URL", "AWS_EC2_METADATA_DISABLED"} {
		t.Setenv(name, "")
	}
}

func TestSuite(t *testing.T) {
	bed().Suite(t, changesRoute)
}

// changesRoute reports whether a request changes a route.
func changesRoute(_ *http.Request, body string) bool {
	return regexp.MustCompile(`Action=(Create|Replace|Delete)Route&`).MatchString(body)
}

// TestOwnTable checks which of the chosen tables is marked as the one that packets of this host follow.
func TestOwnTable(t *testing.T) {
	own := func(s *ec2test.Server) { s.AddTable("rtb-1", "subnet-1") }
	other := func(s *ec2test.Server) { s.AddTable("rtb-2", "subnet-2") }
	for name, test := range map[string]struct {
		raw   string
		setUp func(*ec2test.Server)
		want  string
	}{
		"the table of the subnet":                   {`{"RouteTableID":["rtb-main","rtb-1"]}`, own, "rtb-1"},
		"the main table, without one of the subnet": {`{"RouteTableID":["rtb-main","rtb-2"]}`, other, "rtb-main"},
		"the main table, beside one of the subnet":  {`{"RouteTableID":"rtb-main"}`, own, ""},
		"the table of another subnet":               {`{"RouteTableID":"rtb-2"}`, other, ""},
	} {
		s := open(t)
		test.setUp(s)
		c := bed().Backend(t, test.raw).Cloud
		if _, err := c.Join(t.Context()); err != nil {
			t.Fatal(err)
		}
		tables, err := c.Tables(t.Context())
		got := ""
		for _, table := range tables {
			if table.Own {
				got += table.ID
			}
		}
		if err != nil || got != test.want {
			t.Errorf("%s: own table %q, error %v, want %q", name, got, err, test.want)
		}
	}
}

// TestSourceDestCheck checks that Join switches the source/dest check of this host off, and writes
// nothing if it is off already.
func TestSourceDestCheck(t *testing.T) {
	s := open(t)
	for range 2 {
		if _, err := bed().Backend(t, `{}`).Cloud.Join(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if s.Instance("i-1").Restricted || s.Writes() != 1 || !s.Instance("i-2").Restricted {
		t.Errorf("the check is %v after %d writes, want it off after one, and that of others unchanged", s.Instance("i-1").Restricted, s.Writes())
	}
}

func TestChoiceOfTables(t *testing.T) {
	for name, test := range map[string]struct {
		raw   string
		setUp func(*ec2test.Server)
		want  []string
		err   string
	}{
		"the main table":          {`{}`, nil, []string{"rtb-main"}, ""},
		"the table of the subnet": {`{}`, func(s *ec2test.Server) { s.AddTable("rtb-1", "subnet-1") }, []string{"rtb-1"}, ""},
		"one id":                  {`{"RouteTableID":"rtb-2"}`, func(s *ec2test.Server) { s.AddTable("rtb-2", "") }, []string{"rtb-2"}, ""},
		"two ids":                 {`{"RouteTableID":["rtb-2","rtb-main"]}`, func(s *ec2test.Server) { s.AddTable("rtb-2", "") }, []string{"rtb-2", "rtb-main"}, ""},
		"an unknown id":           {`{"RouteTableID":"rtb-9"}`, nil, nil, "Backend.RouteTableID: DescribeRouteTables: InvalidRouteTableID.NotFound"},
		"a filter": {`{"RouteTableFilter":["tag:cluster=blue","tag:cluster=green"]}`, func(s *ec2test.Server) {
			s.AddTagged("rtb-2", map[string]string{"cluster": "blue"})
			s.AddTagged("rtb-3", map[string]string{"cluster": "red"})
			s.AddTagged("rtb-4", map[string]string{"cluster": "green"})
		}, []string{"rtb-2", "rtb-4"}, ""},
		"a filter over two pages": {`{"RouteTableFilter":["tag:cluster=blue"]}`, func(s *ec2test.Server) {
			s.SetPageSize(1)
			for _, id := range []string{"rtb-2", "rtb-3", "rtb-4"} {
				s.AddTagged(id, map[string]string{"cluster": "blue"})
			}
		}, []string{"rtb-2", "rtb-3", "rtb-4"}, ""},
		"a filter without a match": {`{"RouteTableFilter":["tag:cluster=blue"]}`, nil, nil, "matches no route table of vpc-0a"},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			if test.setUp != nil {
				test.setUp(s)
			}
			c := bed().Backend(t, test.raw).Cloud
			if _, err := c.Join(t.Context()); err != nil {
				t.Fatal(err)
			}
			tables, err := c.Tables(t.Context())
			var ids []string
			for _, table := range tables {
				ids = append(ids, table.ID)
			}
			if !slices.Equal(ids, test.want) || test.err == "" && err != nil || test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Errorf("tables %v, error %v, want %v, %q", ids, err, test.want, test.err)
			}
		})
	}
}

func TestOldAnswers(t *testing.T) { bed().OldAnswers(t) }

//stages:rest the days of a fleet take half a minute
func TestFleet(t *testing.T) { bed().Live(t, 4, true) } // a new instance has a new network interface

func TestTablesOfManyHosts(t *testing.T) { bed().ManyHosts(t, 12) }

func TestTablesOfOtherHosts(t *testing.T) { bed().Followers(t, "subnet-1") }

func TestRoutesOfOthers(t *testing.T) { bed().RoutesOfOthers(t) }

func TestCheckNamesEveryMissingPermission(t *testing.T) {
	bed().Rights(t,
		backendtest.Denied{Calls: []string{"DescribeInstances"}, Permissions: []string{"ec2:DescribeInstances"}},
		backendtest.Denied{Calls: []string{"DescribeRouteTables"}, Permissions: []string{"ec2:DescribeRouteTables"}},
		backendtest.Denied{
			Calls:       []string{"CreateRoute", "ReplaceRoute", "DeleteRoute", "ModifyNetworkInterfaceAttribute"},
			Permissions: []string{"ec2:ModifyNetworkInterfaceAttribute", "ec2:CreateRoute", "ec2:ReplaceRoute", "ec2:DeleteRoute"},
		},
	)
}

func TestCheckChangesNothing(t *testing.T) {
	s := open(t)
	if err := bed().Backend(t, `{}`).Cloud.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := s.Writes(); n > 0 || !s.Instance("i-1").Restricted || len(s.Routes(vpctest.MainTable)) != 1 {
		t.Errorf("%d calls have changed something: %v", n, s.Calls())
	}
}

// TestCheckNeedsNoRightForACheckThatIsOff checks that a host whose source/dest check is off does
// not need the right to switch it off. An operator may have switched it off.
func TestCheckNeedsNoRightForACheckThatIsOff(t *testing.T) {
	s := open(t)
	if _, err := bed().Backend(t, `{}`).Cloud.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.Deny("ModifyNetworkInterfaceAttribute", true)
	if err := bed().Backend(t, `{}`).Cloud.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestRefusedHosts(t *testing.T) {
	bed().RefusedHosts(t, map[string]backendtest.Refused{
		"a network in the VPC": {Network: "192.168.128.0/17", Err: "192.168.128.0/17 overlaps 192.168.0.0/16 of vpc-0a, where EC2 allows no routes"},
	})
}

func TestUnknownAddress(t *testing.T) {
	s := open(t)
	s.Terminate("i-1")
	s.AddInstance(1, "subnet-1", netip.MustParseAddr("192.168.77.100"))
	_, err := bed().Backend(t, `{}`).Cloud.Join(t.Context())
	if err == nil || !strings.Contains(err.Error(), "i-1") || !strings.Contains(err.Error(), "192.168.77.1") {
		t.Errorf("error %v, want one that names the instance and the address", err)
	}
}

func TestClaim(t *testing.T) { bed().Claims(t) }

func TestRedirect(t *testing.T) { bed().Redirect(t) }

// TestAnswers checks the errors for answers of EC2 that flanneld does not expect.
func TestAnswers(t *testing.T) {
	const begin, end = "<Response><Errors><Error><Code>", "</Error></Errors></Response>"
	bed().Answers(t, map[string]backendtest.Answer{
		"no XML":               {Status: 200, Text: `nonsense`, Err: "decode the answer"},
		"a gateway's error":    {Status: 502, Text: `<html>`, Err: "502: Bad Gateway", Transient: true},
		"an internal error":    {Status: 500, Text: begin + "InternalError</Code><Message>again</Message>" + end, Err: "InternalError: again", Transient: true},
		"several lines":        {Status: 400, Text: begin + "InvalidFilter</Code><Message>The filter\nis invalid</Message>" + end, Err: "InvalidFilter: The filter is invalid"},
		"a long message":       {Status: 400, Text: begin + "InvalidFilter</Code><Message>" + strings.Repeat("x", 1000) + "</Message>" + end, Err: strings.Repeat("x", 300) + "…"},
		"an error without one": {Status: 418, Text: ``, Err: "418: I'm a teapot"},
	})
}

// TestReplacementDoesNotSeeTheRoute checks the error if ReplaceRoute does not see a route yet that
// CreateRoute sees, as after a call whose answer was lost. The error must be ErrUnavailable, so
// that the call is repeated soon.
func TestReplacementDoesNotSeeTheRoute(t *testing.T) {
	s := open(t)
	hidden := 1
	t.Setenv("AWS_ENDPOINT_URL_EC2", cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), "Action=ReplaceRoute&") && hidden > 0 {
			hidden--
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, "<Response><Errors><Error><Code>InvalidRoute.NotFound</Code><Message>no route</Message></Error></Errors></Response>")
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		s.ServeHTTP(w, r)
	})))
	c := bed().Backend(t, `{}`).Cloud
	self, err := c.Join(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r := cloud.Route{Table: vpctest.MainTable, Dst: netip.MustParsePrefix("10.5.1.0/24"), Target: self, ByCall: true}
	if err := c.Put(t.Context(), r, false); err != nil {
		t.Fatal(err)
	}
	if err := c.Put(t.Context(), r, true); !errors.Is(err, cloud.ErrUnavailable) {
		t.Errorf("error %v, want ErrUnavailable", err)
	}
	if err := c.Put(t.Context(), r, true); err != nil {
		t.Error(err)
	}
}

// TestEndlessPages checks that a list ends with an error if the token of the next page is always
// the same.
func TestEndlessPages(t *testing.T) {
	open(t)
	t.Setenv("AWS_ENDPOINT_URL_EC2", cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "<DescribeInstancesResponse><nextToken>again</nextToken></DescribeInstancesResponse>")
	})))
	if err := bed().Backend(t, `{}`).Cloud.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "refers to itself") {
		t.Errorf("error %v, want one about the pages", err)
	}
}

func TestSecretsAreNeverShown(t *testing.T) {
	bed().Leaks(t, []string{"refuses the credentials", "permission ec2:DescribeInstances is missing"},
		backendtest.Fault[*vpctest.State]{Raw: `{}`, Set: func(*vpctest.State) {
			t.Setenv("AWS_ACCESS_KEY_ID", vpctest.KeyID)
			t.Setenv("AWS_SECRET_ACCESS_KEY", vpctest.Secret+"-wrong")
		}},
	)
}

// TestContainerCredentials checks that credentials come from an agent, as in pods of EKS. The agent
// wants the token that a file contains.
func TestContainerCredentials(t *testing.T) {
	s := open(t)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("pod-token\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	bed().ReplaceMetadata(t, s.State, map[string]string{"/security-credentials/": ""})
	t.Setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token)
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "pod-token" {
			http.Error(w, "wrong token", http.StatusUnauthorized)
			return
		}
		fmt.Fprintf(w, `{"AccessKeyId":%q,"SecretAccessKey":%q,"Token":%q,"Expiration":"2100-01-01T00:00:00Z"}`, vpctest.KeyID, vpctest.Secret, vpctest.Token)
	})))
	if err := bed().Backend(t, `{}`).Cloud.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestTokensGoOnlyToAgents(t *testing.T) {
	for address, want := range map[string]bool{
		"http://169.254.170.23/v1/credentials": true, "http://[fd00:ec2::23]/v1/credentials": true, "http://127.0.0.1:8080/": true, "http://localhost/": true,
		"https://example.org/": true, "http://example.org/": false, "http://169.254.169.254/": false, "ftp://127.0.0.1/": false, "https://": false, "::": false,
	} {
		if got := trusted(address); got != want {
			t.Errorf("%s: %v, want %v", address, got, want)
		}
	}
}

func TestConfig(t *testing.T) {
	backendtest.Config(t, New, map[string]backendtest.Want{
		`{"Type":"aws-vpc"}`:                                       {},
		`{"RouteTableID":"rtb-1"}`:                                 {},
		`{"RouteTableID":["rtb-1","rtb-2"]}`:                       {},
		`{"RouteTableID":""}`:                                      {},
		`{"RouteTableID":7}`:                                       {Err: "RouteTableID: want a string or an array of strings"},
		`{"RouteTableID":["rtb-1",7]}`:                             {Err: "RouteTableID: want a string or an array of strings"},
		`{"RouteTableID":["rtb-1",""]}`:                            {Err: "Backend.RouteTableID contains an empty string"},
		`{"RouteTableFilter":["cluster"]}`:                         {Err: `Backend.RouteTableFilter contains "cluster": want name=value`},
		`{"RouteTableID":"r","RouteTableFilter":["a=b"]}`:          {Err: "exclude each other"},
		`{"RouteTableId":"rtb-1"}`:                                 {},
		`{"RouteTable":"rtb-1"}`:                                   {Warning: `unknown key "RouteTable" is ignored, the nearest known key is "RouteTableID"`},
		`{"AccessKeySecret":"very-secret","RouteTableID":"rtb-1"}`: {Warning: `key "AccessKeySecret" may contain a secret`},
	})
}

// TestDescription holds the fields that are read, and the states of a route, against the description of EC2.
func TestDescription(t *testing.T) {
	api := schema.Load("ec2")
	for name, answer := range map[string]any{"DescribeInstancesResult": instanceAnswer{}, "DescribeRouteTablesResult": tableAnswer{}} {
		if err := api.CheckType(name, reflect.TypeOf(answer)); err != nil {
			t.Error(err)
		}
	}
	states := map[string]cloud.State{"active": cloud.Carrying, "blackhole": cloud.Idle}
	for _, text := range api.Values("RouteState") {
		want, counts := states[text]
		if got, ok := state(text); got != want || ok != counts || ok != (text != "filtered") {
			t.Errorf("%s: %v, %v, want %v, %v", text, got, ok, want, counts)
		}
	}
	if got := (routeTable{Routes: []route{{IPv4: "10.5.1.0/24", State: "filtered", Origin: "Advertisement", Instance: "i-1"}}}).table(); len(got.Routes) > 0 {
		t.Errorf("routes %v, want none for one that EC2 has filtered out", got.Routes)
	}
}
