// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend/awsvpc/ec2test"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/status"
	"github.com/flanneld/flanneld/test/lab"
)

// expectByTunnel waits until packets from and to certain hosts go by the tunnel, and all others by the cloud.
// The keys of outside are the numbers of these hosts, from 1. The other hosts must report why they send to such
// a host by the tunnel. The value in outside is a part of this reason, and may be empty.
func (v *cloudBed) expectByTunnel(outside map[int]string) {
	t := v.t
	t.Helper()
	for from, h := range v.Hosts() {
		_, self := outside[from+1]
		want := map[netip.Prefix]string{}
		for to := range v.Hosts() {
			why, is := outside[to+1]
			if to != from && (is || self) {
				want[v.subnetOf(to+1)] = map[bool]string{false: why}[self]
			}
		}
		eventually(t, fmt.Sprintf("%s sends by the tunnel to %v", h.Name(), want), func() error {
			report := statusOf(t, h)
			var o status.Overflow
			if report.Network.Cloud == nil || report.Network.Cloud.Overflow == nil {
				return errors.New("there is no report")
			}
			if o = *report.Network.Cloud.Overflow; o.ByTunnel != len(want) || o.ByCloud != len(v.Hosts())-1-len(want) {
				return fmt.Errorf("it reports %+v", o)
			}
			for _, p := range report.Peers {
				why, byTunnel := want[p.Subnets[0]]
				if byTunnel != (p.Backend == "vxlan") || byTunnel != (p.Waiting != "") || !strings.Contains(p.Waiting, why) || p.State != status.InPlace {
					return fmt.Errorf("it sends to %v by %s (%s), because %q", p.Subnets, p.Backend, p.State, p.Waiting)
				}
			}
			routes, err := h.Routes(testContext(t))
			if err != nil {
				return err
			}
			count := 0
			for _, r := range routes {
				if r.Dev == "flannel.1" && v.HasPods(r.Dst) {
					count++
				}
			}
			if count != len(want) {
				return fmt.Errorf("it has %d IPv4 routes through the tunnel", count)
			}
			return nil
		})
	}
}

// newOverflowBed builds a cloudBed with three hosts and a table with place for two routes. kind is the type of
// the backend, which has vxlan as Overflow. newOverflowBed starts daemons and pods as startInOrder does.
func newOverflowBed(t *testing.T, kind string, c testCloud) *cloudBed {
	t.Helper()
	v := newCloudBed(t, 3, v4, fmt.Sprintf(`{"Type":%q,"Overflow":"vxlan"}`, kind), c)
	v.setQuota(2)
	v.startInOrder()
	return v
}

// startInOrder starts a daemon and a pod on all hosts, one after the other. Before it starts the next host, it
// waits until hosts 1 and 2 have their routes. So these two get the places in a table that is too small.
func (v *cloudBed) startInOrder() {
	t := v.t
	t.Helper()
	for i, h := range v.Hosts() {
		startOne(t, h, v.options())
		if i < 2 {
			v.expectRoute(v.subnetOf(i+1), i+1)
		}
		if _, err := h.AddPod(testContext(t), ""); err != nil {
			t.Fatal(err)
		}
	}
}

// testOverflow checks a cloudBed of newOverflowBed, whose table has no place for the route of host 3. While
// packets flow between all pods, it restarts all daemons and then raises the quota. No packet may be lost. At
// the end the quota is too small again.
func (v *cloudBed) testOverflow() {
	t := v.t
	t.Helper()
	v.expectByTunnel(map[int]string{3: "has no route to it: the quota of routes is used up"})
	expectMatrix(t, v.Lab)
	expectMTU(t, v.Lab, 1450)
	full := "vxlan carries the packets of this host: put route " + v.subnetOf(3).String()
	if o := statusOf(t, v.Host(3)).Network.Cloud.Overflow; !strings.Contains(o.Problem, full) || !strings.Contains(o.Problem, "has reached its limit of 2 routes") {
		t.Errorf("the problem is %q, want the full table", o.Problem)
	}
	expectLogged(t, v.Host(3).Daemon(), "the routes of the cloud to this host are not in order")
	if n := metric(t, v.Host(1), `flannel_cloud_peers{by="tunnel"}`); n != 1 {
		t.Errorf("%v peers by the tunnel in the metrics, want 1", n)
	}
	out := expectFlannelctl(t, v.Host(1), []string{"status"}, "sends to 1 peer by the cloud, to 1 by vxlan", v.subnetOf(3).String()+" by vxlan: table")
	if strings.Contains(out, "aws-vpc") {
		expectOnPage(t, "overflow.md", "flannelctl status", out)
	}

	flows := startFlows(t, v.Lab, fast)
	writes := v.Writes()
	for i, h := range v.Hosts() {
		v.stop(i + 1)
		startOne(t, h, v.options())
	}
	pause(t, 3*time.Second) // more than one comparison
	if n := v.Writes() - writes; n != 0 {
		t.Errorf("%d calls have changed the cloud at restarts, want none", n)
	}
	v.expectByTunnel(map[int]string{3: "the quota of routes is used up"})

	v.setQuota(5) // enough for three routes, and for one more because some clouds need it to replace a route
	v.expectRoute(v.subnetOf(3), 3)
	v.expectByTunnel(nil)
	pause(t, time.Second)
	expectNothingLost(t, flows)
	expectOnce(t, v.Host(3).Daemon(), "the routes of the cloud to this host are in order")
	v.expectNoSecrets()

	// The route of host 3 is deleted, and the table has no place for it any more.
	v.setQuota(2)
	v.deleteRoute(v.subnetOf(3))
	v.expectByTunnel(map[int]string{3: "the quota of routes is used up"})
	expectMatrix(t, v.Lab)
}

// expectLogged waits until the log of a daemon contains text.
func expectLogged(t *testing.T, d *lab.Daemon, text string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%q in the log", text), func() error {
		if !strings.Contains(d.Log(), text) {
			return errors.New("it is not there")
		}
		return nil
	})
}

// TestAWSVPCOverflow checks that vxlan carries the packets of a host if the table has no place for its route.
func TestAWSVPCOverflow(t *testing.T) {
	t.Parallel()
	newOverflowBed(t, "aws-vpc", newEC2()).testOverflow()
}

// TestGCEOverflow is TestAWSVPCOverflow in Google Cloud.
//
//stages:long TestAWSVPCOverflow shows the same with another cloud
func TestGCEOverflow(t *testing.T) {
	t.Parallel()
	newOverflowBed(t, "gce", newGoogle()).testOverflow()
}

// TestOverflowOutside checks two hosts in a VPC, one in another VPC, and one outside of the cloud. Packets from
// and to the last two must go by the tunnel, because the router has only the routes of the first VPC. Restarts
// of the last two must lose no packet.
//
//stages:rest TestGCE and TestAWSVPC show routes of clouds
func TestOverflowOutside(t *testing.T) {
	t.Parallel()
	v := newCloudBed(t, 4, dual, `{"Type":"aws-vpc","Overflow":{"Type":"vxlan","VNI":1}}`, newEC2())
	other := ec2test.New()
	other.AddTable("rtb-other", "subnet-3")
	v.setServers(3, other, ec2test.Metadata(other.AddInstance(3, "subnet-3", v.Host(3).Addr(prefix.IPv4), v.Host(3).Addr(prefix.IPv6))))
	v.setServers(4, http.NotFoundHandler(), http.NotFoundHandler())
	for _, h := range v.Hosts() { // this filter drops packets if the two directions do not go by the same device
		if out, err := h.Exec(testContext(t), "sysctl", "-w", "net.ipv4.conf.all.rp_filter=1"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	startAll(t, v.Lab, v.options())
	v.expectByTunnel(map[int]string{3: `table "rtb-main" has no route to it`, 4: "has no route to it: the cloud does not answer"})
	expectMatrix(t, v.Lab)
	expectMTU(t, v.Lab, 1430)
	expectOnce(t, v.Host(1).Daemon(), "rp_filter is strict")
	if target, _ := other.RouteTo("rtb-other", v.subnetOf(3)); target != "eni-3" {
		t.Errorf("the route of host 3 in its own VPC leads to %q", target)
	}
	if o := statusOf(t, v.Host(4)).Network.Cloud.Overflow; !strings.Contains(o.Problem, "vxlan carries the packets of this host") || !strings.Contains(o.Problem, "metadata service") {
		t.Errorf("the problem of host 4 is %q, want the reason", o.Problem)
	}

	// The two hosts outside restart while packets flow.
	flows := startFlows(t, v.Lab, 100)
	for i := 3; i <= 4; i++ {
		v.stop(i)
		startOne(t, v.Host(i), v.options())
	}
	pause(t, 3*time.Second)
	expectNothingLost(t, flows)

	// Host 1 loses its right to put routes, and its route. Its log must say which permission is missing.
	v.deny(true)
	v.deleteRoute(v.subnetOf(1))
	v.expectByTunnel(map[int]string{1: "permissions are missing", 3: "", 4: ""})
	expectLogged(t, v.Host(1).Daemon(), "permission ec2:CreateRoute is missing")
	expectMatrix(t, v.Lab)
	v.deny(false)
	v.expectByTunnel(map[int]string{3: "", 4: ""})
	expectMatrix(t, v.Lab)
}

// TestOverflowFollowed checks that no packet is lost when Overflow is added to the configuration of a running
// network, and when it is removed.
//
//stages:rest TestAWSVPCOverflow changes the way of packets more often
func TestOverflowFollowed(t *testing.T) {
	t.Parallel()
	v, _ := newVPC(t, 2, v4)
	startAll(t, v.Lab, v.options())
	flows := startFlows(t, v.Lab, fast)
	e := newEdits(t, v.Lab)
	e.put(string(configWith(t, v.Lab, `{"Type":"aws-vpc","Overflow":"vxlan"}`)))
	v.expectByTunnel(nil)
	e.put(string(configWith(t, v.Lab, `{"Type":"aws-vpc"}`)))
	eventuallyWithout(t, v.Lab, "flannel.1")
	expectNothingLost(t, flows)
	expectMatrix(t, v.Lab)
}
