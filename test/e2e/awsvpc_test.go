// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend/awsvpc/ec2test"
	"github.com/flanneld/flanneld/pkg/ping"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// vpcBed is a lab whose router has the routes of a table of EC2. Each host is on a network of its
// own, so that packets to pods pass the router.
type vpcBed struct {
	*lab.Lab
	*ec2test.Server
	t        *testing.T
	metadata []*atomic.Pointer[http.Handler] // of each host
}

const (
	metadataAddress = "127.0.0.1:8169"
	ec2Port         = "8443"
)

// newVPC builds a VPC with as many instances as hosts. It starts no daemons.
func newVPC(t *testing.T, hosts int, families []prefix.Family) *vpcBed {
	t.Helper()
	l := newLab(t, lab.Config{Hosts: hosts, Segments: hosts, Families: families}, `{"Type":"aws-vpc"}`)
	v := &vpcBed{Lab: l, Server: ec2test.New(), t: t}
	v.serve(l.Underlay(), v.ec2Address(), v.Server)
	for i, h := range l.Hosts() {
		now := &atomic.Pointer[http.Handler]{}
		v.metadata = append(v.metadata, now)
		v.setInstance(i+1, i+1)
		v.serve(h.Namespace, metadataAddress, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			(*now.Load()).ServeHTTP(w, r)
		}))
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); v.route(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return v
}

func (v *vpcBed) ec2Address() string {
	return v.RouterAddr(prefix.IPv4).String() + ":" + ec2Port
}

func (v *vpcBed) serve(n *lab.Namespace, address string, h http.Handler) {
	v.t.Helper()
	listener, err := n.Listen(testContext(v.t), "tcp", address)
	if err != nil {
		v.t.Fatal(err)
	}
	server := &http.Server{Handler: h, ReadHeaderTimeout: patience}
	go func() { _ = server.Serve(listener) }()
	v.t.Cleanup(func() { _ = server.Close() })
}

// setInstance makes a host the instance with that number, which it adds.
func (v *vpcBed) setInstance(host, number int) {
	var addresses []netip.Addr
	for _, f := range v.Families() {
		addresses = append(addresses, v.Host(host).Addr(f))
	}
	metadata := ec2test.Metadata(v.AddInstance(number, fmt.Sprintf("subnet-%d", host), addresses...))
	v.metadata[host-1].Store(&metadata)
}

func (v *vpcBed) options() lab.FlanneldOptions {
	return lab.FlanneldOptions{
		Args: []string{"--resync=2s"},
		Env:  []string{"AWS_ENDPOINT_URL_EC2=http://" + v.ec2Address(), "AWS_EC2_METADATA_SERVICE_ENDPOINT=http://" + metadataAddress},
	}
}

// route makes the router follow the table until ctx ends. It delivers packets to pods only to
// instances without the source/dest check, and takes only from these packets with addresses that
// are not the instance's.
func (v *vpcBed) route(ctx context.Context) {
	have := map[netip.Prefix]string{}
	checked := ""
	for {
		var script []string
		want, rules := map[netip.Prefix]string{}, "flush ruleset; add table inet vpc; add chain inet vpc forward { type filter hook forward priority 0; }"
		for dst, i := range v.Forwarding(ec2test.MainTable) {
			for _, a := range i.Addresses {
				if a.Is4() == dst.Addr().Is4() {
					want[dst] = a.String()
				}
			}
		}
		for dst, via := range want {
			if have[dst] != via {
				script = append(script, fmt.Sprintf("ip route replace %s via %s", dst, via))
			}
		}
		for dst := range have {
			if want[dst] == "" {
				script = append(script, "ip route del "+dst.String())
			}
		}
		for _, i := range v.Instances() {
			for _, a := range i.Addresses {
				if !i.SourceDestCheck {
					continue
				}
				family := map[bool]string{true: "ip", false: "ip6"}[a.Is4()]
				rules += fmt.Sprintf("; add rule inet vpc forward iifname l2-%s %s saddr != %s drop", strings.TrimPrefix(i.Subnet, "subnet-"), family, a)
			}
		}
		if rules != checked {
			script = append(script, "nft '"+rules+"'")
		}
		if len(script) > 0 {
			if out, err := v.Underlay().Exec(ctx, "sh", "-ec", strings.Join(script, "\n")); err != nil && ctx.Err() == nil {
				v.t.Errorf("router: %v: %s", err, out)
			}
		}
		have, checked = want, rules
		select {
		case <-ctx.Done():
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// subnetOf returns the IPv4 subnet of a host.
func (v *vpcBed) subnetOf(host int) netip.Prefix {
	v.t.Helper()
	return statusOf(v.t, v.Host(host)).Lease.Subnets[0]
}

// expectRoute waits until the table leads to the instance with that number.
func (v *vpcBed) expectRoute(dst netip.Prefix, instance int) {
	v.t.Helper()
	eventually(v.t, fmt.Sprintf("a route %s to instance %d", dst, instance), func() error {
		if target, _ := v.RouteTo(ec2test.MainTable, dst); target != fmt.Sprintf("eni-%d", instance) {
			return fmt.Errorf("the table leads to %q", target)
		}
		return nil
	})
}

// expectReason waits until a daemon is not ready and gives a reason that contains text.
func expectReason(t *testing.T, d *lab.Daemon, text string) {
	t.Helper()
	eventually(t, "a daemon that is not ready", func() error {
		if code, body, _ := d.Get(testContext(t), "/readyz"); code == http.StatusOK || !strings.Contains(body, text) {
			return fmt.Errorf("status %d, %q, want a reason with %q", code, body, text)
		}
		return nil
	})
}

// expectNoSecrets searches everything that a host shows for the secrets of its instance.
func (v *vpcBed) expectNoSecrets() {
	v.t.Helper()
	for _, h := range v.Hosts() {
		var shown strings.Builder
		for _, d := range h.Daemons() {
			shown.WriteString(d.Log())
		}
		if h.Daemon() != nil && h.Daemon().Ended() == nil {
			for _, path := range []string{"/statusz", "/statusz.json", "/metrics", "/readyz"} {
				_, body, _ := h.Daemon().Get(testContext(v.t), path)
				shown.WriteString(body)
			}
		}
		for _, secret := range []string{ec2test.SecretKey, ec2test.SessionToken} {
			if strings.Contains(shown.String(), secret) {
				v.t.Errorf("%s shows %q", h.Name(), secret)
			}
		}
	}
}

// TestAWSVPC checks that pods reach each other with the full MTU, and without a tunnel or a route
// on a host.
func TestAWSVPC(t *testing.T) {
	t.Parallel()
	v := newVPC(t, 3, dual)
	startAll(t, v.Lab, v.options())
	expectMatrix(t, v.Lab)
	expectMTU(t, v.Lab, 1500)
	for _, h := range v.Hosts() {
		routes, err := h.Routes(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range routes {
			if v.HasPods(r.Dst) && r.Dev != lab.PodBridge {
				t.Errorf("%s has the route %s, want none to pods of other hosts", h.Name(), r)
			}
		}
		report := statusOf(t, h).Network.Cloud
		if report == nil || report.Writer != "host" || report.LastGood.IsZero() || len(report.Routes) != 2 {
			t.Fatalf("%s: status %+v, want two routes", h.Name(), report)
		}
		for _, r := range report.Routes {
			if !r.Present || r.Table != ec2test.MainTable {
				t.Errorf("%s: route %+v, want it in place in the main table", h.Name(), r)
			}
		}
		if n := metric(t, h, `flannel_cloud_calls_total{call="CreateRoute",result="ok"}`); n != 2 {
			t.Errorf("%s has made %v calls of CreateRoute, want 2", h.Name(), n)
		}
	}
	out := expectFlannelctl(t, v.Host(1), []string{"status"}, "written by each host; in order at 20", v.subnetOf(1).String()+" to eni-1 in table rtb-main\n")
	t.Log(out)
	v.expectNoSecrets()

	// The router enforces the check, and flanneld notices that another program has set it.
	from, to := v.Host(1).Pods()[0], v.Host(2).Pods()[0]
	v.SetCheck("i-2", true)
	eventually(t, "packets dropped by the source/dest check", func() error {
		if _, err := from.Ping(testContext(t), to.Addrs()[0], ping.Options{Timeout: 100 * time.Millisecond}); err == nil {
			return errors.New("they arrive")
		}
		return nil
	})
	expectMatrix(t, v.Lab)
}

// TestAWSVPCRestart restarts all daemons while 1,000 packets flow per second in each direction. No
// packet may be lost, and no call may change the cloud.
func TestAWSVPCRestart(t *testing.T) {
	t.Parallel()
	v := newVPC(t, 2, v4)
	startAll(t, v.Lab, v.options())
	flows := startFlows(t, v.Lab, 1000)
	before := v.Writes()
	for _, h := range v.Hosts() {
		if code, err := h.Daemon().Stop(testContext(t)); code != 0 || err != nil {
			t.Fatalf("exit code %d, %v", code, err)
		}
		startOne(t, h, v.options())
	}
	pause(t, 3*time.Second) // more than one comparison
	expectNothingLost(t, flows)
	if n := v.Writes() - before; n != 0 {
		t.Errorf("%d calls have changed the cloud, want none: %v", n, v.Calls())
	}
}

// TestAWSVPCNewHostWaits starts a host while the cloud does not answer. It gives the reason, and
// notices that the configuration changes.
//
//stages:rest TestAWSVPCFaults has an outage of the cloud
func TestAWSVPCNewHostWaits(t *testing.T) {
	t.Parallel()
	v := newVPC(t, 1, v4)
	v.SetAway(true)
	d := start(t, v.Host(1), v.options())
	expectReason(t, d, "the cloud does not answer")
	expectLeaseCount(t, v.Lab, 0)
	putKey(t, etcdClient(t, v.Lab), "/coreos.com/network/config", `{"Network": "10.5.0.0/16", "Backend": {"Type": "alloc"}}`)
	expectReady(t, d)
	expectLeaseCount(t, v.Lab, 1)
}

// TestAWSVPCFaults causes faults of the cloud one after the other, on hosts between which packets
// flow.
//
//stages:rest it takes half a minute; TestAWSVPC repairs a fault too, and TestAWSVPCRestart looks for lost packets
func TestAWSVPCFaults(t *testing.T) {
	t.Parallel()
	v := newVPC(t, 4, v4)
	v.SetLag(500 * time.Millisecond) // descriptions are older than the last call
	for i := 1; i <= 3; i++ {
		start(t, v.Host(i), v.options())
	}
	for i := 1; i <= 3; i++ {
		expectReady(t, v.Host(i).Daemon())
		if _, err := v.Host(i).AddPod(testContext(t), ""); err != nil {
			t.Fatal(err)
		}
	}

	// The cloud does not answer for several comparisons, and then only that there are too many calls.
	flows := startFlows(t, v.Lab, 100)
	v.SetAway(true)
	expectReason(t, v.Host(1).Daemon(), "the cloud does not answer")
	pause(t, 5*time.Second)
	v.SetAway(false)
	v.Throttle(5)
	for i := 1; i <= 3; i++ {
		expectReady(t, v.Host(i).Daemon())
	}
	expectNothingLost(t, flows)
	expectOnce(t, v.Host(1).Daemon(), "data path not in order")

	// An operator deletes a route.
	of2 := v.subnetOf(2)
	v.DeleteRoute(ec2test.MainTable, of2)
	v.expectRoute(of2, 2)
	expectMatrix(t, v.Lab)
	eventually(t, "a repair in the metrics", func() error {
		if n := metric(t, v.Host(2), "flannel_drift_repaired_total"); n != 1 {
			return fmt.Errorf("%v repairs, want 1", n)
		}
		return nil
	})

	// Host 2 loses its right. It keeps its lease and its route, also over a restart.
	v.Deny("CreateRoute", true)
	if code, err := v.Host(2).Daemon().Stop(testContext(t)); code != 0 || err != nil {
		t.Fatalf("exit code %d, %v", code, err)
	}
	startOne(t, v.Host(2), v.options())
	v.DeleteRoute(ec2test.MainTable, of2)
	expectReason(t, v.Host(2).Daemon(), "permission ec2:CreateRoute is missing")
	if now := v.subnetOf(2); now != of2 {
		t.Errorf("host 2 has %s, want its subnet %s", now, of2)
	}

	// A new host without the right takes no lease.
	expectFailure(t, start(t, v.Host(4), v.options()), "permission ec2:CreateRoute is missing", "policy to paste")
	expectLeaseCount(t, v.Lab, 3)
	v.Deny("CreateRoute", false)
	v.expectRoute(of2, 2)
	expectMatrix(t, v.Lab)

	// A table without place for a new host. The others are not affected.
	v.SetQuota(3)
	fourth := start(t, v.Host(4), v.options())
	expectReason(t, fourth, "has reached its limit of 3 routes")
	v.SetQuota(4)
	expectReady(t, fourth)
	of4 := v.subnetOf(4)
	v.expectRoute(of4, 4)

	// The instance of host 3 is replaced. Its route, which leads to nowhere, is replaced in place.
	of3 := v.subnetOf(3)
	if code, err := v.Host(3).Daemon().Stop(testContext(t)); code != 0 || err != nil {
		t.Fatalf("exit code %d, %v", code, err)
	}
	v.Terminate("i-3")
	v.setInstance(3, 33)
	startOne(t, v.Host(3), v.options())
	v.expectRoute(of3, 33)
	expectMatrix(t, v.Lab)

	// Host 4 ends for good. Its route goes with its lease, and no other does.
	if code, err := fourth.Stop(testContext(t)); code != 0 || err != nil {
		t.Fatalf("exit code %d, %v", code, err)
	}
	v.Terminate("i-4")
	pause(t, 5*time.Second) // several comparisons, while its lease lasts
	if _, ok := v.RouteTo(ec2test.MainTable, of4); !ok {
		t.Error("the route of host 4 is gone before its lease")
	}
	operators := ec2test.Route{Dst: netip.MustParsePrefix("10.99.0.0/24"), Target: "eni-4", Origin: "CreateRoute"} // outside of the network
	v.AddRoute(ec2test.MainTable, operators)
	c, key := etcdClient(t, v.Lab), subnets+strings.ReplaceAll(of4.String(), "/", "-")
	putKey(t, c, subnets+"10.5.210.0-24", "unreadable") // of a host that flanneld does not know
	if _, err := c.Delete(testContext(t), key); err != nil {
		t.Fatal(err)
	}
	pause(t, 5*time.Second)
	if _, ok := v.RouteTo(ec2test.MainTable, of4); !ok {
		t.Error("the route of host 4 is gone while the store has an unreadable lease")
	}
	if _, err := c.Delete(testContext(t), subnets+"10.5.210.0-24"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the route of host 4 removed", func() error {
		if target, ok := v.RouteTo(ec2test.MainTable, of4); ok {
			return fmt.Errorf("it leads to %s", target)
		}
		return nil
	})
	if !slices.Contains(v.Routes(ec2test.MainTable), operators) {
		t.Error("the route outside of the network is gone")
	}
	expectMatrix(t, v.Lab)
	deleted := 0
	for _, c := range v.Calls() {
		if c.Writes() && c.Action == "DeleteRoute" {
			deleted++
		}
	}
	if deleted != 1 {
		t.Errorf("%d routes were deleted by daemons, want only that of host 4", deleted)
	}
	v.expectNoSecrets()
}

// expectLeaseCount fails the test unless the store has that many leases.
func expectLeaseCount(t *testing.T, l *lab.Lab, want int) {
	t.Helper()
	leases, err := l.Leases(testContext(t))
	if err != nil || len(leases) != want {
		t.Errorf("%d leases, %v, want %d", len(leases), err, want)
	}
}
