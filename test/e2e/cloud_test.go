// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
	"github.com/flanneld/flanneld/test/lab"
)

// testCloud simulates a cloud with instances and a route table. ServeHTTP answers the calls of the cloud's
// API. The numbers of hosts and instances begin with 1, like those of the hosts of the lab.
type testCloud interface {
	http.Handler
	// add adds the instance with the given number and addresses, on which the given host runs. It returns the
	// metadata service of the instance.
	add(number, host int, addresses []netip.Addr) http.Handler
	end(number int)
	// env returns the environment variables that make a daemon call the API at the address api and the
	// metadata service at metadataAddress.
	env(api string) []string
	table() string
	target(number int) string
	// routeTo returns the target of the route to dst, as target returns it for an instance. ok is false if
	// there is no such route.
	routeTo(dst netip.Prefix) (target string, ok bool)
	deleteRoute(dst netip.Prefix)
	// addRoute adds a route to the instance with the given number, as an operator does.
	addRoute(dst netip.Prefix, number int)
	// forwarding returns the routes that the routers of the cloud use: for each destination, all addresses of
	// the instance that gets the packets.
	forwarding() map[netip.Prefix][]netip.Addr
	// restricted returns all addresses of the instances that may send only from their own addresses. The cloud
	// drops packets that they send from other addresses, such as those of pods.
	restricted() []netip.Addr
	// deny takes the right to create routes away from all hosts, or gives it back if denied is false. In both
	// cases it returns the name of this right.
	deny(denied bool) (missing string)
	SetAway(away bool)
	Throttle(calls int)
	setQuota(n int)
	// deletions returns the number of calls that have deleted a route.
	deletions() int
	Writes() int
	secrets() []string
}

// subnetTables implements most of testCloud for the clouds that have a route table for each subnet.
type subnetTables struct {
	*vpctest.State
	instance func(number int) string // returns the target of the routes to an instance
	removal  string                  // name of the call that deletes a route
	creation string                  // name of the call that makes a route
	right    string                  // name of the right to make routes
}

func (c subnetTables) end(number int) { c.Terminate(fmt.Sprintf("i-%d", number)) }

func (subnetTables) table() string { return vpctest.MainTable }

func (c subnetTables) target(number int) string { return c.instance(number) }

func (c subnetTables) routeTo(dst netip.Prefix) (target string, ok bool) {
	return c.RouteTo(vpctest.MainTable, dst)
}

func (c subnetTables) deleteRoute(dst netip.Prefix) { c.DeleteRoute(vpctest.MainTable, dst) }

func (c subnetTables) addRoute(dst netip.Prefix, number int) {
	c.AddRoute(vpctest.MainTable, vpctest.Route{Dst: dst, Target: c.target(number), Kind: vpctest.Custom})
}

func (c subnetTables) forwarding() map[netip.Prefix][]netip.Addr {
	to := map[netip.Prefix][]netip.Addr{}
	for dst, i := range c.Forwarding(vpctest.MainTable) {
		to[dst] = i.Addresses
	}
	return to
}

func (c subnetTables) restricted() (all []netip.Addr) {
	for _, i := range c.Instances() {
		if i.Restricted {
			all = append(all, i.Addresses...)
		}
	}
	return all
}

func (c subnetTables) deny(denied bool) string {
	c.Deny(c.creation, denied)
	return c.right
}

func (c subnetTables) setQuota(n int) { c.SetQuota(n) }

func (c subnetTables) deletions() int { return c.Succeeded(c.removal) }

func (subnetTables) secrets() []string { return []string{vpctest.Secret, vpctest.Token} }

// cloudBed is a lab whose router forwards as the route table of a cloud says. Each host is in an L2 segment of
// its own, so that packets to pods pass the router.
type cloudBed struct {
	*lab.Lab
	testCloud
	t             *testing.T
	api, metadata []*atomic.Pointer[http.Handler] // the servers of each host; index 0 is that of host 1
}

const (
	metadataAddress = "127.0.0.1:8169"
	apiAddress      = "127.0.0.1:8443" // on loopback, because daemons send tokens to other hosts only by HTTPS
)

// newCloudBed builds a lab whose hosts are instances of the cloud c. backend is the Backend object of the
// network configuration. newCloudBed starts no daemons.
func newCloudBed(t *testing.T, hosts int, families []prefix.Family, backend string, c testCloud) *cloudBed {
	t.Helper()
	return newCloudBedOn(t, newLab(t, lab.Config{Hosts: hosts, Segments: hosts, Families: families}, backend), c)
}

// newCloudBedOn makes the hosts of a lab instances of the cloud c. Each host must be in an L2 segment of
// its own.
func newCloudBedOn(t *testing.T, l *lab.Lab, c testCloud) *cloudBed {
	t.Helper()
	v := &cloudBed{Lab: l, testCloud: c, t: t}
	for i, h := range l.Hosts() {
		v.api, v.metadata = append(v.api, v.serve(h.Namespace, apiAddress)), append(v.metadata, v.serve(h.Namespace, metadataAddress))
		v.setServers(i+1, c, http.NotFoundHandler())
		v.setInstance(i+1, i+1)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); v.route(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return v
}

// serve answers HTTP requests to an address of a host until the test ends. The result contains the handler for
// the requests. The caller must store one in it before the first request, and may replace it later.
func (v *cloudBed) serve(n *lab.Namespace, address string) *atomic.Pointer[http.Handler] {
	v.t.Helper()
	now := &atomic.Pointer[http.Handler]{}
	listener, err := n.Listen(testContext(v.t), "tcp", address)
	if err != nil {
		v.t.Fatal(err)
	}
	h := func(w http.ResponseWriter, r *http.Request) { (*now.Load()).ServeHTTP(w, r) }
	server := &http.Server{Handler: http.HandlerFunc(h), ReadHeaderTimeout: patience}
	go func() { _ = server.Serve(listener) }()
	v.t.Cleanup(func() { _ = server.Close() })
	return now
}

// serveAgain gives a host that was installed again the servers that it had.
func (v *cloudBed) serveAgain(h *lab.Host) {
	v.t.Helper()
	i := slices.Index(v.Hosts(), h)
	for address, now := range map[string]*atomic.Pointer[http.Handler]{apiAddress: v.api[i], metadataAddress: v.metadata[i]} {
		v.serve(h.Namespace, address).Store(now.Load())
	}
}

// setServers replaces the servers that a host finds at apiAddress and metadataAddress.
func (v *cloudBed) setServers(host int, api, metadata http.Handler) {
	v.api[host-1].Store(&api)
	v.metadata[host-1].Store(&metadata)
}

// setInstance adds the instance with the given number to the cloud, and makes it the instance of a host:
// the host's metadata service describes it.
func (v *cloudBed) setInstance(host, number int) {
	var addresses []netip.Addr
	for _, f := range v.Families() {
		addresses = append(addresses, v.Host(host).Addr(f))
	}
	metadata := v.add(number, host, addresses)
	v.metadata[host-1].Store(&metadata)
}

func (v *cloudBed) options() lab.FlanneldOptions {
	return lab.FlanneldOptions{Args: []string{"--resync=2s"}, Env: v.env(apiAddress)}
}

// route makes the router follow the route table until ctx ends. For a restricted instance, the router drops
// packets that come from the segment of its host and not from its own address.
func (v *cloudBed) route(ctx context.Context) {
	have := map[netip.Prefix]string{}
	checked := ""
	for {
		var script []string
		want, rules := map[netip.Prefix]string{}, "flush ruleset; add table inet vpc; add chain inet vpc forward { type filter hook forward priority 0; }"
		for dst, addresses := range v.forwarding() {
			for _, a := range addresses {
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
		for _, a := range v.restricted() {
			family := map[bool]string{true: "ip", false: "ip6"}[a.Is4()]
			rules += fmt.Sprintf("; add rule inet vpc forward iifname l2-%d %s saddr != %s drop", v.hostAt(a), family, a)
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

// hostAt returns the number of the host that has an address, or 0 if there is none.
func (v *cloudBed) hostAt(a netip.Addr) int {
	return 1 + slices.IndexFunc(v.Hosts(), func(h *lab.Host) bool {
		return slices.Contains([]netip.Addr{h.Addr(prefix.IPv4), h.Addr(prefix.IPv6)}, a)
	})
}

// subnetOf returns the IPv4 subnet of a host.
func (v *cloudBed) subnetOf(host int) netip.Prefix {
	v.t.Helper()
	return statusOf(v.t, v.Host(host)).Lease.Subnets[0]
}

// expectRoute waits until the route to dst leads to the instance with the given number.
func (v *cloudBed) expectRoute(dst netip.Prefix, instance int) {
	v.t.Helper()
	eventually(v.t, fmt.Sprintf("a route %s to instance %d", dst, instance), func() error {
		if target, _ := v.routeTo(dst); target != v.target(instance) {
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

// expectNoSecrets fails the test if the log of a daemon contains a secret of the cloud, or the status, metrics
// or readiness of a running one.
func (v *cloudBed) expectNoSecrets() {
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
		for _, secret := range v.secrets() {
			if strings.Contains(shown.String(), secret) {
				v.t.Errorf("%s shows %q", h.Name(), secret)
			}
		}
	}
}

// expectLeaseCount fails the test unless the store has want leases.
func expectLeaseCount(t *testing.T, l *lab.Lab, want int) {
	t.Helper()
	leases, err := l.Leases(testContext(t))
	if err != nil || len(leases) != want {
		t.Errorf("%d leases, %v, want %d", len(leases), err, want)
	}
}

// stop stops the daemon of a host, and fails the test unless its exit code is 0.
func (v *cloudBed) stop(host int) {
	v.t.Helper()
	if code, err := v.Host(host).Daemon().Stop(testContext(v.t)); code != 0 || err != nil {
		v.t.Fatalf("exit code %d, %v", code, err)
	}
}

// expectPods starts daemons and pods, and checks that pods reach each other with the full MTU. No host may
// have a route to pods of other hosts. Each host must have created its route with one successful call for each
// family. call is the name of this call.
func (v *cloudBed) expectPods(call string) {
	t := v.t
	t.Helper()
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
		if report == nil || report.LastGood.IsZero() || len(report.Routes) != len(v.Families()) {
			t.Fatalf("%s: status %+v, want a route of each family", h.Name(), report)
		}
		for _, r := range report.Routes {
			if !r.Present || r.Table != v.table() {
				t.Errorf("%s: route %+v, want it in place in %s", h.Name(), r, v.table())
			}
		}
		if n := metric(t, h, fmt.Sprintf(`flannel_cloud_calls_total{call=%q,result="ok"}`, call)); n != float64(len(v.Families())) {
			t.Errorf("%s has made %v calls of %s, want one for each family", h.Name(), n, call)
		}
	}
	out := expectFlannelctl(t, v.Host(1), []string{"status"}, "in order at 20",
		fmt.Sprintf("%s to %s in table %s\n", v.subnetOf(1), v.target(1), v.table()))
	t.Log(out)
	v.expectNoSecrets()
}

// testRestart restarts all daemons while packets flow at a high rate in each direction. No
// packet may be lost, and no call may change the cloud.
func (v *cloudBed) testRestart() {
	t := v.t
	t.Helper()
	startAll(t, v.Lab, v.options())
	flows := startFlows(t, v.Lab, fast)
	from, to := v.Pods()[0], v.Pods()[1]
	one, err := from.StartFlow(testContext(t), to, prefix.IPv4, fast) // startFlows may have lowered the rate
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { one.Stop() })
	flows = append(flows, flow{one, fmt.Sprintf("%s to %s at the full rate", from.Name(), to.Name())})
	before := v.Writes()
	for i, h := range v.Hosts() {
		v.stop(i + 1)
		startOne(t, h, v.options())
	}
	pause(t, 3*time.Second) // enough time for more than one comparison of the routes
	expectNothingLost(t, flows)
	if n := v.Writes() - before; n != 0 {
		t.Errorf("%d calls have changed the cloud, want none", n)
	}
}

// expectOutageLogged checks that a host has logged an outage of the cloud in one line. Another line before it
// is allowed if the outage began in the middle of a comparison of the routes: the next comparison then fails
// with another reason, at its first call, with which the host looks for itself in the cloud.
func (v *cloudBed) expectOutageLogged(host int) {
	t := v.t
	t.Helper()
	const first = "find this host in the cloud"
	lines := linesWith(v.Host(host).Daemon(), "data path not in order")
	if len(lines) == 2 && !strings.Contains(lines[0], first) && strings.Contains(lines[1], first) {
		lines = lines[1:]
	}
	if len(lines) != 1 {
		t.Errorf("host %d has logged the outage as %q, want one line", host, lines)
	}
}

// testFaults causes faults of the cloud one after the other, in a cloudBed of four hosts. It starts host 4
// later than the others. An outage of the cloud must lose no packet. After each fault flanneld must have kept
// the leases and must repair the routes. testFaults returns the number of calls that have deleted a route.
func (v *cloudBed) testFaults() (deleted int) {
	t := v.t
	t.Helper()
	for i := 1; i <= 3; i++ {
		start(t, v.Host(i), v.options())
	}
	for i := 1; i <= 3; i++ {
		expectReady(t, v.Host(i).Daemon())
		if _, err := v.Host(i).AddPod(testContext(t), ""); err != nil {
			t.Fatal(err)
		}
	}

	// The cloud does not answer for several comparisons. Then it refuses five calls as too many.
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
	v.expectOutageLogged(1)

	// An operator deletes a route.
	of2 := v.subnetOf(2)
	v.deleteRoute(of2)
	v.expectRoute(of2, 2)
	expectMatrix(t, v.Lab)
	eventually(t, "a repair in the metrics", func() error {
		if n := metric(t, v.Host(2), "flannel_drift_repaired_total"); n != 1 {
			return fmt.Errorf("%v repairs, want 1", n)
		}
		return nil
	})

	// All hosts lose the right to create routes. Host 2 restarts, and its route is deleted. The host must keep
	// its subnet and name the missing right. It must create the route when the right is back.
	missing := "permission " + v.deny(true) + " is missing"
	v.stop(2)
	startOne(t, v.Host(2), v.options())
	v.deleteRoute(of2)
	expectReason(t, v.Host(2).Daemon(), missing)
	if now := v.subnetOf(2); now != of2 {
		t.Errorf("host 2 has %s, want its subnet %s", now, of2)
	}

	// A new host without the right takes no lease.
	expectFailure(t, start(t, v.Host(4), v.options()), missing, "policy to paste")
	expectLeaseCount(t, v.Lab, 3)
	v.deny(false)
	v.expectRoute(of2, 2)
	expectMatrix(t, v.Lab)

	// The table has no room for the route of a new host. The new host must name the limit and its route, and
	// the other hosts must still reach each other.
	v.setQuota(3)
	fourth := start(t, v.Host(4), v.options())
	expectReason(t, fourth, "has reached its limit of 3 routes")
	expectReason(t, fourth, fmt.Sprintf("put route %s to %s in table %s", v.subnetOf(4), v.target(4), v.table()))
	expectReason(t, fourth, "or set Backend.Overflow")
	expectMatrix(t, v.Lab)
	v.setQuota(5) // four routes, and one more because some clouds need it to replace a route
	expectReady(t, fourth)
	of4 := v.subnetOf(4)
	v.expectRoute(of4, 4)

	// Another instance replaces that of host 3, so the route of host 3 leads nowhere. flanneld must replace
	// this route.
	of3 := v.subnetOf(3)
	v.stop(3)
	v.end(3)
	v.setInstance(3, 33)
	startOne(t, v.Host(3), v.options())
	v.expectRoute(of3, 33)
	expectMatrix(t, v.Lab)

	// Host 4 ends for good. The other hosts remove its route when its lease is gone, and no other route.
	v.stop(4)
	v.end(4)
	pause(t, 5*time.Second) // enough time for several comparisons of the routes; the lease of host 4 still exists
	if _, ok := v.routeTo(of4); !ok {
		t.Error("the route of host 4 is gone before its lease")
	}
	outside := netip.MustParsePrefix("10.99.0.0/24")
	v.addRoute(outside, 4)
	c, key := etcdClient(t, v.Lab), subnets+strings.ReplaceAll(of4.String(), "/", "-")
	putKey(t, c, subnets+"10.5.210.0-24", "unreadable") // while daemons cannot read a lease, they must delete no route
	if _, err := c.Delete(testContext(t), key); err != nil {
		t.Fatal(err)
	}
	pause(t, 5*time.Second)
	if _, ok := v.routeTo(of4); !ok {
		t.Error("the route of host 4 is gone while the store has an unreadable lease")
	}
	if _, err := c.Delete(testContext(t), subnets+"10.5.210.0-24"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the route of host 4 removed", func() error {
		if target, ok := v.routeTo(of4); ok {
			return fmt.Errorf("it leads to %s", target)
		}
		return nil
	})
	if _, ok := v.routeTo(outside); !ok {
		t.Error("the route outside of the network is gone")
	}
	expectMatrix(t, v.Lab)
	v.expectNoSecrets()
	return v.deletions()
}
