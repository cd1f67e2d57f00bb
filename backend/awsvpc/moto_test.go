// SPDX-License-Identifier: Apache-2.0

//go:build moto

package awsvpc

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"github.com/flanneld/flanneld/backend/awsvpc/ec2test"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/pkg/cloud"
	"github.com/flanneld/flanneld/pkg/cloud/access"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

// motoRegion is the name of a real region, because moto has no availability zones in other regions.
const motoRegion = "eu-central-1"

// motoPeer is the address of the instance that is not this process.
var motoPeer = netip.MustParseAddr("192.168.80.10")

// moto is a running moto_server, another project's implementation of EC2's protocol.
type moto struct{ url string }

// startMoto starts a moto_server that ends with the test. If the test fails, it shows the log of
// moto_server.
func startMoto(t *testing.T) moto {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "moto_server.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.CommandContext(t.Context(), "moto_server", "--host", "127.0.0.1", "--port", "0")
	cmd.Env = append(os.Environ(), "PYTHONUNBUFFERED=1")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		<-ended
		if text, err := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("the log of moto_server (%v):\n%s", err, text)
		}
	})
	address := regexp.MustCompile(`Running on (http://127\.0\.0\.1:\d+)\n`)
	var m moto
	waittest.Eventually(t, time.Minute, "moto_server is ready", func() error {
		select {
		case <-ended:
			t.Fatal("moto_server ended at its start")
		default:
		}
		text, err := os.ReadFile(log.Name())
		if found := address.FindSubmatch(text); found != nil {
			m.url = string(found[1])
			return nil
		}
		return fmt.Errorf("it has not printed its address (%w)", err)
	})
	return m
}

// call makes a call of one of AWS's Query APIs, and returns the answer. It must not be called after
// authorize, because moto then verifies the keys.
func (m moto) call(t *testing.T, service, version, action string, params map[string]string) []byte {
	t.Helper()
	form := url.Values{"Action": {action}, "Version": {version}}
	for name, value := range params {
		form.Set(name, value)
	}
	body := form.Encode()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, m.url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded; charset=utf-8")
	sum := sha256.Sum256([]byte(body))
	operator := aws.Credentials{AccessKeyID: "operator", SecretAccessKey: "secret"}
	if err := v4.NewSigner().SignHTTP(t.Context(), operator, req, hex.EncodeToString(sum[:]), service, motoRegion, time.Now()); err != nil {
		t.Fatal(err)
	}
	return m.send(t, action, req)
}

// send sends a request, and returns the answer. It waits for at most a minute. flanneld does not wait so long, but
// moto loads a service at its first call, which may take that time.
func (m moto) send(t *testing.T, name string, req *http.Request) []byte {
	t.Helper()
	status, text, err := access.Send(&http.Client{Timeout: time.Minute}, req)
	if err != nil || status != http.StatusOK {
		t.Fatalf("%s: status %d, error %v: %s", name, status, err, text)
	}
	return text
}

// ec2 makes a call of EC2, and returns the text of the first element with that name in the answer,
// such as an id.
func (m moto) ec2(t *testing.T, action string, params map[string]string, element string) string {
	t.Helper()
	return first(t, m.call(t, "ec2", apiVersion, action, params), element)
}

// first returns the text of the first element with that name in an answer.
func first(t *testing.T, answer []byte, name string) (text string) {
	t.Helper()
	for d := xml.NewDecoder(bytes.NewReader(answer)); ; {
		token, err := d.Token()
		if err != nil {
			t.Fatalf("want an element %s, got %s", name, answer)
		}
		if begin, ok := token.(xml.StartElement); ok && begin.Name.Local == name {
			if err := d.DecodeElement(&text, &begin); err != nil {
				t.Fatal(err)
			}
			return text
		}
	}
}

// motoVPC is a VPC in moto with two instances in different subnets. This process is the first
// instance.
type motoVPC struct {
	moto
	table      string // id of the table that both subnets follow
	self, peer string // ids of the network interfaces of the instances
}

// open makes a VPC, and makes this process its first instance. The subnets of the VPC follow the main table if
// main is set, and otherwise another table.
func (m moto) open(t *testing.T, main bool) motoVPC {
	t.Helper()
	vpc := m.ec2(t, "CreateVpc", map[string]string{"CidrBlock": "192.168.0.0/16"}, "vpcId")
	v := motoVPC{moto: m}
	if main {
		v.table = m.ec2(t, "DescribeRouteTables", map[string]string{"Filter.1.Name": "vpc-id", "Filter.1.Value.1": vpc}, "routeTableId")
	} else {
		v.table = m.ec2(t, "CreateRouteTable", map[string]string{"VpcId": vpc}, "routeTableId")
	}
	// instance makes an instance in a subnet of its own. EC2 accepts only IPv6 addresses of the
	// subnet's range.
	instance := func(cidr string, addresses ...netip.Addr) (id, networkInterface string) {
		subnet := m.ec2(t, "CreateSubnet", map[string]string{"VpcId": vpc, "CidrBlock": cidr}, "subnetId")
		if !main {
			m.ec2(t, "AssociateRouteTable", map[string]string{"RouteTableId": v.table, "SubnetId": subnet}, "associationId")
		}
		params := map[string]string{"SubnetId": subnet}
		for _, a := range addresses {
			if a.Is4() {
				params["PrivateIpAddress"] = a.String()
			} else {
				params["Ipv6Addresses.1.Ipv6Address"] = a.String()
			}
		}
		networkInterface = m.ec2(t, "CreateNetworkInterface", params, "networkInterfaceId")
		id = m.ec2(t, "RunInstances", map[string]string{
			"ImageId": "ami-1", "MinCount": "1", "MaxCount": "1",
			"NetworkInterface.1.DeviceIndex": "0", "NetworkInterface.1.NetworkInterfaceId": networkInterface,
		}, "instanceId")
		return id, networkInterface
	}
	var me string
	me, v.self = instance("192.168.64.0/20", own4, own6)
	_, v.peer = instance("192.168.80.0/20", motoPeer)
	become(t, metadataOf(me), m.url)
	return v
}

// metadataOf returns the metadata service of an instance in moto's region.
func metadataOf(id string) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", ec2test.Metadata(vpctest.Instance{ID: id}))
	mux.HandleFunc("GET /latest/meta-data/placement/region", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, motoRegion) })
	return mux
}

// lacking returns the cases of the suite that moto 5.2.1 cannot run, each with the difference
// between moto and EC2.
func lacking() map[string]string {
	return map[string]string{
		"put works although it is out of date":         "CreateRoute to a network interface replaces the route that exists; EC2 answers RouteAlreadyExists",
		"a stopped host keeps its place":               "the state of each route is active; that of EC2 is blackhole without a running instance",
		"a route to a host that has ended is lost":     "the state of each route is active; that of EC2 is blackhole without a running instance",
		"the quota is named":                           "a table takes any number of routes",
		"a missing right is named before it is needed": "a dry run of CreateRoute, ReplaceRoute or DeleteRoute is carried out, and the code of a missing right is AccessDenied; that of EC2 is UnauthorizedOperation",
		"a throttled call is repeated":                 "any number of calls is accepted",
	}
}

// TestMoto runs the suite of all clouds with moto, and makes calls with only the permissions in the
// documentation page.
func TestMoto(t *testing.T) {
	m := startMoto(t)
	for name, main := range map[string]bool{"a table of the subnets": false, "the main table": true} {
		t.Run(name, func(t *testing.T) {
			cloudtest.RunExcept(t, lacking(), func(t *testing.T) cloudtest.Fixture { return m.fixture(t, main) })
		})
	}
	t.Run("the source/dest check is switched off", func(t *testing.T) { testSourceDestCheck(t, m) })
	t.Run("errors are those of EC2", func(t *testing.T) { testErrors(t, m) })
	t.Run("a role with the permissions of the page", func(t *testing.T) { testRole(t, m) }) // the last test, because moto verifies all calls after it
}

// fixture returns a new VPC for the suite. The suite can interrupt the connection between flanneld
// and moto.
func (m moto) fixture(t *testing.T, main bool) cloudtest.Fixture {
	t.Helper()
	v := m.open(t, main)
	to, err := url.Parse(m.url)
	if err != nil {
		t.Fatal(err)
	}
	var away atomic.Bool
	var deleted atomic.Int64
	reliable := withoutFilters(httputil.NewSingleHostReverseProxy(to))
	h, lose := cloudtest.LoseAnswers(reliable, func(r *http.Request, body string) bool {
		if strings.Contains(body, "Action=DeleteRoute&") && !strings.Contains(body, "DryRun=true") {
			deleted.Add(1)
		}
		return changesRoute(r, body)
	})
	t.Setenv("AWS_ENDPOINT_URL_EC2", cloudtest.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if away.Load() {
			http.Error(w, "moto cannot be reached", http.StatusBadGateway)
			return
		}
		h.ServeHTTP(w, r)
	})))
	return cloudtest.Fixture{
		Cloud: bed().Backend(t, `{"Type":"aws-vpc","Overflow":"vxlan"}`).Cloud, Table: v.table, Peer: v.peer, PeerAddress: motoPeer, SelfAddress: own4,
		SetAway: away.Store, LoseAnswer: lose, Gaps: func() int { return int(deleted.Load()) },
	}
}

// withoutFilters removes the filters of DescribeInstances that moto lacks. The answer then contains
// all instances of the VPC. flanneld chooses among them by address or network interface anyway.
func withoutFilters(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		form := r.PostForm
		if form.Get("Action") == "DescribeInstances" {
			for key, values := range maps.Clone(form) {
				if filter, ok := strings.CutSuffix(key, ".Name"); ok && strings.HasPrefix(values[0], "network-interface.") {
					maps.DeleteFunc(form, func(key string, _ []string) bool { return strings.HasPrefix(key, filter+".") })
				}
			}
		}
		body := form.Encode()
		r.Body, r.ContentLength = io.NopCloser(strings.NewReader(body)), int64(len(body))
		h.ServeHTTP(w, r)
	})
}

func testSourceDestCheck(t *testing.T, m moto) {
	v := m.open(t, true)
	check := func() string {
		return m.ec2(t, "DescribeNetworkInterfaces", map[string]string{"NetworkInterfaceId.1": v.self}, "sourceDestCheck")
	}
	before := check()
	if _, err := bed().Backend(t, `{}`).Cloud.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	if after := check(); before != "true" || after != "false" {
		t.Errorf("the check was %s and is %s, want it switched off", before, after)
	}
}

// testErrors checks errors that contain a code of EC2 or follow from one.
func testErrors(t *testing.T, m moto) {
	v := m.open(t, true)
	for raw, want := range map[string]string{
		`{"RouteTableID":"rtb-0123456789abcdef0"}`:     "Backend.RouteTableID: DescribeRouteTables: InvalidRouteTableID.NotFound",
		`{"RouteTableFilter":["tag:cluster=missing"]}`: "matches no route table",
	} {
		cloudtest.CheckFails(t, raw, bed().Backend(t, raw).Cloud, want, false)
	}
	c := bed().Backend(t, `{}`).Cloud
	if _, err := c.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := cloud.Route{Table: v.table, Dst: netip.MustParsePrefix("10.5.1.0/24"), Target: "eni-0123456789abcdef0", ByCall: true}
	if err := c.Put(t.Context(), r, true); err == nil || !strings.Contains(err.Error(), "InvalidNetworkInterfaceID.NotFound") {
		t.Errorf("error %v, want one about the network interface", err)
	}
	become(t, metadataOf("i-0123456789abcdef0"), m.url)
	cloudtest.CheckFails(t, "an instance that EC2 does not know yet", bed().Backend(t, `{}`).Cloud, "InvalidInstanceID.NotFound", true)
}

// testRole checks calls with the keys of a role that has only the permissions in the documentation
// page. moto verifies the signatures with botocore, AWS's own library, and compares the actions
// with those of the policy. The test replaces the resources in the policy by *, because moto takes *
// for the resource of each call.
func testRole(t *testing.T, m moto) {
	v := m.open(t, true)
	text, err := os.ReadFile("../../" + page)
	if err != nil {
		t.Fatal(err)
	}
	policy := regexp.MustCompile(`(?ms)^    \{\n +"Version".*?^    \}$`).FindString(string(text))
	if policy == "" {
		t.Fatalf("%s contains no policy", page)
	}
	policy = regexp.MustCompile(`"Resource": "arn:[^"]*"`).ReplaceAllString(policy, `"Resource": "*"`)
	m.authorize(t, policy)
	c := bed().Backend(t, `{}`).Cloud
	if err := c.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if self, err := c.Join(t.Context()); err != nil || self != v.self {
		t.Fatalf("target %q, error %v, want %s", self, err, v.self)
	}
	r := cloud.Route{Table: v.table, Dst: netip.MustParsePrefix("10.5.1.0/24"), Target: v.peer, ByCall: true}
	if err := c.Put(t.Context(), r, false); err != nil {
		t.Error(err)
	}
	r.Target = v.self
	if err := c.Put(t.Context(), r, true); err != nil {
		t.Error(err)
	}
	if got := cloudtest.Routes(t, c); !slices.Contains(got, r) {
		t.Errorf("routes %v, want %v", got, r)
	}
	if err := c.Remove(t.Context(), r); err != nil {
		t.Error(err)
	}
	if got := cloudtest.Routes(t, c); slices.Contains(got, r) {
		t.Errorf("routes %v, want %v removed", got, r)
	}
	t.Setenv("AWS_SECRET_ACCESS_KEY", "another")
	cloudtest.CheckFails(t, "another secret key", bed().Backend(t, `{}`).Cloud, "EC2 refuses the credentials (AuthFailure)", false)
}

// authorize makes moto verify all further calls, and gives this process the keys of a role with
// that policy.
func (m moto) authorize(t *testing.T, policy string) {
	t.Helper()
	const iam, role, name = "2010-05-08", "arn:aws:iam::123456789012:role/flanneld", "flanneld"
	trust := `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":{"Service":"ec2.amazonaws.com"},"Action":"sts:AssumeRole"}]}`
	m.call(t, "iam", iam, "CreateRole", map[string]string{"RoleName": name, "AssumeRolePolicyDocument": trust})
	m.call(t, "iam", iam, "PutRolePolicy", map[string]string{"RoleName": name, "PolicyName": name, "PolicyDocument": policy})
	answer := m.call(t, "sts", "2011-06-15", "AssumeRole", map[string]string{"RoleArn": role, "RoleSessionName": name})
	t.Setenv("AWS_ACCESS_KEY_ID", first(t, answer, "AccessKeyId"))
	t.Setenv("AWS_SECRET_ACCESS_KEY", first(t, answer, "SecretAccessKey"))
	t.Setenv("AWS_SESSION_TOKEN", first(t, answer, "SessionToken"))
	const unverified = "0" // number of calls that moto still accepts without verification
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, m.url+"/moto-api/reset-auth", strings.NewReader(unverified))
	if err != nil {
		t.Fatal(err)
	}
	m.send(t, "reset-auth", req)
}
