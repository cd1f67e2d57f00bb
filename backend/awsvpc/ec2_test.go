// SPDX-License-Identifier: Apache-2.0

package awsvpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/backend/awsvpc/ec2test"
	"github.com/flanneld/flanneld/backend/backendtest"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
)

var (
	own4, own6 = netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("fd00:77::1")
	peer4      = netip.MustParseAddr("192.168.77.2")
)

// open returns a cloud with two instances, and makes this process the first of them: the
// metadata service and EC2 are those of the test.
func open(t *testing.T) *ec2test.Server {
	t.Helper()
	s := ec2test.New()
	me := s.AddInstance(1, "subnet-1", own4, own6)
	s.AddInstance(2, "subnet-2", peer4)
	t.Setenv("AWS_ENDPOINT_URL_EC2", serve(t, s))
	t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", serve(t, ec2test.Metadata(me)))
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_ENDPOINT_URL", "AWS_EC2_METADATA_DISABLED"} {
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
	b, warnings, err := New([]byte(raw), backendtest.Env(1500, prefix.IPv4, prefix.IPv6))
	if err != nil || len(warnings) > 0 {
		t.Fatalf("warnings %q, error %v", warnings, err)
	}
	return b.(*backend.CloudBackend)
}

func TestSuite(t *testing.T) {
	cloudtest.Run(t, func(t *testing.T) cloudtest.Fixture {
		s := open(t)
		api, lose := cloudtest.LoseAnswers(s, func(_ *http.Request, body string) bool {
			return regexp.MustCompile(`Action=(Create|Replace|Delete)Route&`).MatchString(body)
		})
		t.Setenv("AWS_ENDPOINT_URL_EC2", serve(t, api))
		return cloudtest.Fixture{
			Cloud: newBackend(t, `{"Type":"aws-vpc"}`).Cloud, Table: vpctest.MainTable, Peer: "eni-2", PeerAddress: peer4,
			DeleteByHand: func(dst netip.Prefix) { s.DeleteRoute(vpctest.MainTable, dst) },
			EndPeer:      func() { s.Terminate("i-2") },
			SetQuota:     s.SetQuota,
			LoseAnswer:   lose,
			Deny:         func() { s.Deny("CreateRoute", true) },
			Throttle:     s.Throttle,
			SetAway:      s.SetAway,
			Gaps:         func() int { return s.Succeeded("DeleteRoute") },
		}
	})
}

// TestSourceDestCheck expects that the check is read first, and written only if it is on.
func TestSourceDestCheck(t *testing.T) {
	s := open(t)
	for range 2 {
		if _, err := newBackend(t, `{}`).Cloud.Join(t.Context()); err != nil {
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
			c := newBackend(t, test.raw).Cloud
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

// TestOldAnswers puts a route while descriptions still show the time before the last calls.
func TestOldAnswers(t *testing.T) {
	s := open(t)
	s.SetLag(time.Hour)
	c := newBackend(t, `{}`).Cloud
	self, err := c.Join(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r := cloud.Route{Table: vpctest.MainTable, Dst: netip.MustParsePrefix("10.5.1.0/24"), Target: self, ByCall: true}
	if err := c.Put(t.Context(), r, true); err != nil { // there is none yet
		t.Error(err)
	}
	if err := c.Put(t.Context(), r, false); !errors.Is(err, cloud.ErrExists) {
		t.Errorf("error %v, want ErrExists", err)
	}
	if err := c.Put(t.Context(), r, true); err != nil {
		t.Error(err)
	}
	if target, _ := s.RouteTo(vpctest.MainTable, r.Dst); target != self {
		t.Errorf("the route leads to %q, want %s", target, self)
	}
}

func TestCheckNamesEveryMissingPermission(t *testing.T) {
	for _, test := range []struct{ denied, want []string }{
		{[]string{"DescribeInstances"}, []string{"ec2:DescribeInstances"}},
		{[]string{"DescribeRouteTables"}, []string{"ec2:DescribeRouteTables"}},
		{[]string{"CreateRoute", "ReplaceRoute", "DeleteRoute", "ModifyNetworkInterfaceAttribute"}, []string{"ec2:ModifyNetworkInterfaceAttribute", "ec2:CreateRoute", "ec2:ReplaceRoute", "ec2:DeleteRoute"}},
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

func TestCheckChangesNothing(t *testing.T) {
	s := open(t)
	if err := newBackend(t, `{}`).Cloud.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := s.Writes(); n > 0 || !s.Instance("i-1").Restricted || len(s.Routes(vpctest.MainTable)) != 1 {
		t.Errorf("%d calls have changed something: %v", n, s.Calls())
	}
}

// TestCheckNeedsNoRightForACheckThatIsOff expects that an operator may switch the source/dest
// check off instead of giving hosts the right to do it.
func TestCheckNeedsNoRightForACheckThatIsOff(t *testing.T) {
	s := open(t)
	if _, err := newBackend(t, `{}`).Cloud.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.Deny("ModifyNetworkInterfaceAttribute", true)
	if err := newBackend(t, `{}`).Cloud.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestCheckRefusesTheRangeOfTheVPC(t *testing.T) {
	open(t)
	env := backendtest.Env(1500, prefix.IPv4)
	env.Config.Networks = []subnet.Network{{Prefix: netip.MustParsePrefix("192.168.128.0/17")}}
	b, _, err := New([]byte(`{}`), env)
	if err != nil {
		t.Fatal(err)
	}
	_, err = b.Claim(t.Context(), subnet.Claim{})
	if err == nil || !strings.Contains(err.Error(), "192.168.128.0/17 overlaps 192.168.0.0/16 of vpc-0a") {
		t.Errorf("error %v, want one that names both ranges", err)
	}
}

func TestUnknownAddress(t *testing.T) {
	s := open(t)
	s.Terminate("i-1")
	s.AddInstance(1, "subnet-1", netip.MustParseAddr("192.168.77.100"))
	_, err := newBackend(t, `{}`).Cloud.Join(t.Context())
	if err == nil || !strings.Contains(err.Error(), "i-1") || !strings.Contains(err.Error(), "192.168.77.1") {
		t.Errorf("error %v, want one that names the instance and the address", err)
	}
}

// held is the claim of a host that has a lease.
func held() subnet.Claim {
	return subnet.Claim{Endpoints: []subnet.Endpoint{
		{Subnet: netip.MustParsePrefix("10.5.1.0/24"), PublicIP: own4}, {Subnet: netip.MustParsePrefix("fd00:10:5:1::/64"), PublicIP: own6},
	}}
}

// TestClaim expects that a host does not begin to use the backend if it cannot use the cloud, and
// that a host keeps a lease of the backend without a call.
func TestClaim(t *testing.T) {
	const missing = "permission ec2:CreateRoute is missing: " + page + " has the policy to paste"
	denied := func(s *ec2test.Server) { s.Deny("CreateRoute", true) }
	away := func(s *ec2test.Server) { s.SetAway(true) }
	for name, test := range map[string]struct {
		fault func(*ec2test.Server)
		prev  subnet.Claim
		used  []string
		err   string
		quiet bool // no call is made
	}{
		"a new host":                         {func(*ec2test.Server) {}, subnet.Claim{}, nil, "", false},
		"a new host without a permission":    {denied, subnet.Claim{}, nil, missing, false},
		"a new host without a cloud":         {away, subnet.Claim{}, nil, "the cloud does not answer", false},
		"a new host that EC2 does not know":  {func(s *ec2test.Server) { s.Terminate("i-1") }, subnet.Claim{}, nil, "the cloud does not answer about this instance yet", false},
		"a host with a lease, no permission": {denied, held(), []string{Type}, "", true},
		"a host with a lease, no cloud":      {away, held(), []string{Type}, "", true},
		"a host in a migration":              {away, held(), []string{"vxlan", Type}, "", true},
		"a lease of an unknown past":         {denied, held(), nil, "", true},
		"a lease of vxlan, unknown past":     {denied, subnet.Claim{BackendType: "vxlan", Endpoints: held().Endpoints}, nil, missing, false},
		"a host with another backend":        {denied, held(), []string{"vxlan"}, missing, false},
		"a host with udp, no cloud":          {away, held(), []string{"udp"}, "the cloud does not answer", false},
	} {
		s := open(t)
		test.fault(s)
		b := newBackend(t, `{}`)
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
		if claim.BackendType != "" || len(claim.Endpoints) != 2 {
			t.Errorf("%s: claim %+v, want no type, and both families", name, claim)
		}
	}
}

// TestRedirect expects that calls go to no other server.
func TestRedirect(t *testing.T) {
	s := open(t)
	t.Setenv("AWS_ENDPOINT_URL_EC2", serve(t, http.RedirectHandler(os.Getenv("AWS_ENDPOINT_URL_EC2"), http.StatusTemporaryRedirect)))
	err := newBackend(t, `{}`).Cloud.Check(t.Context())
	if err == nil || !strings.Contains(err.Error(), "307") || len(s.Calls()) > 0 {
		t.Errorf("error %v, calls %v, want none and an error with the status", err, s.Calls())
	}
}

// TestReplacementDoesNotSeeTheRoute has a route that ReplaceRoute does not see yet, as after a call whose
// answer was lost. The call must be repeated soon.
func TestReplacementDoesNotSeeTheRoute(t *testing.T) {
	s := open(t)
	hidden := 1
	t.Setenv("AWS_ENDPOINT_URL_EC2", serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
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
	c := newBackend(t, `{}`).Cloud
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

// TestEndlessPages has a server whose pages refer to themselves.
func TestEndlessPages(t *testing.T) {
	open(t)
	t.Setenv("AWS_ENDPOINT_URL_EC2", serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "<DescribeInstancesResponse><nextToken>again</nextToken></DescribeInstancesResponse>")
	})))
	if err := newBackend(t, `{}`).Cloud.Check(t.Context()); err == nil || !strings.Contains(err.Error(), "refers to itself") {
		t.Errorf("error %v, want one about the pages", err)
	}
}

// TestSecretsAreNeverShown makes calls fail in many ways, and searches errors and log for the
// secrets of the host.
func TestSecretsAreNeverShown(t *testing.T) {
	var out bytes.Buffer
	log := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&out), textlogger.Verbosity(10)))
	for _, fault := range []func(*ec2test.Server){
		func(*ec2test.Server) {},
		func(s *ec2test.Server) { s.SetAway(true) },
		func(s *ec2test.Server) { s.Deny("DescribeInstances", true) },
		func(s *ec2test.Server) { s.Deny("CreateRoute", true) },
		func(s *ec2test.Server) { s.Terminate("i-1") },
		func(*ec2test.Server) { t.Setenv("AWS_ENDPOINT_URL_EC2", "http://127.0.0.1:1") },
		func(*ec2test.Server) {
			t.Setenv("AWS_ACCESS_KEY_ID", vpctest.KeyID)
			t.Setenv("AWS_SECRET_ACCESS_KEY", vpctest.Secret+"-wrong")
		},
	} {
		s := open(t)
		fault(s)
		ctx, cancel := context.WithTimeout(klog.NewContext(t.Context(), log), 2*time.Second)
		b := newBackend(t, `{}`)
		_, err := b.Claim(ctx, held())
		_, joined := b.Cloud.Join(ctx)
		cancel()
		log.Info("results", "claim", err, "join", joined, "calls", b.Calls.Counts())
	}
	for _, secret := range []string{vpctest.Secret, vpctest.Token} {
		if strings.Contains(out.String(), secret) {
			t.Errorf("the log contains %q:\n%s", secret, out.String())
		}
	}
	if !strings.Contains(out.String(), "refuses the credentials") || !strings.Contains(out.String(), "permission ec2:DescribeInstances is missing") {
		t.Errorf("the faults are not in the log:\n%s", out.String())
	}
}

// TestContainerCredentials gets the credentials from an agent, as pods of EKS do. The agent wants
// the present token of a file.
func TestContainerCredentials(t *testing.T) {
	open(t)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("pod-token\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", serve(t, withoutRole(ec2test.Metadata(vpctest.Instance{ID: "i-1"}))))
	t.Setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token)
	t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "pod-token" {
			http.Error(w, "wrong token", http.StatusUnauthorized)
			return
		}
		fmt.Fprintf(w, `{"AccessKeyId":%q,"SecretAccessKey":%q,"Token":%q,"Expiration":"2100-01-01T00:00:00Z"}`, vpctest.KeyID, vpctest.Secret, vpctest.Token)
	})))
	if err := newBackend(t, `{}`).Cloud.Check(t.Context()); err != nil {
		t.Error(err)
	}
}

// withoutRole is a metadata service of an instance that has no role.
func withoutRole(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/iam/") {
			http.NotFound(w, r)
			return
		}
		h.ServeHTTP(w, r)
	})
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
	for raw, want := range map[string]struct{ err, warning string }{
		`{"Type":"aws-vpc"}`:                                       {},
		`{"RouteTableID":"rtb-1"}`:                                 {},
		`{"RouteTableID":["rtb-1","rtb-2"]}`:                       {},
		`{"RouteTableID":""}`:                                      {},
		`{"RouteTableID":7}`:                                       {err: "RouteTableID: want a string or an array of strings"},
		`{"RouteTableID":["rtb-1",7]}`:                             {err: "RouteTableID: want a string or an array of strings"},
		`{"RouteTableID":["rtb-1",""]}`:                            {err: "Backend.RouteTableID contains an empty string"},
		`{"RouteTableFilter":["cluster"]}`:                         {err: `Backend.RouteTableFilter contains "cluster": want name=value`},
		`{"RouteTableID":"r","RouteTableFilter":["a=b"]}`:          {err: "exclude each other"},
		`{"RouteTableId":"rtb-1"}`:                                 {},
		`{"RouteTable":"rtb-1"}`:                                   {warning: `unknown key "RouteTable" is ignored; the nearest known key is "RouteTableID"`},
		`{"AccessKeySecret":"very-secret","RouteTableID":"rtb-1"}`: {warning: `key "AccessKeySecret" may contain a secret`},
	} {
		_, warnings, err := New([]byte(raw), backendtest.Env(1500, prefix.IPv4))
		all := strings.Join(warnings, "; ")
		if want.err == "" && err != nil || want.err != "" && (err == nil || !strings.Contains(err.Error(), want.err)) ||
			!strings.Contains(all, want.warning) || want.warning == "" && all != "" || strings.Contains(all, "very-secret") {
			t.Errorf("%s: warnings %q, error %v, want %+v", raw, warnings, err, want)
		}
	}
}
