// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend/awsvpc/ec2test"
	"github.com/flanneld/flanneld/pkg/ping"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// ec2 is EC2 as a testCloud.
type ec2 struct{ *ec2test.Server }

// newVPC builds a VPC with as many instances as hosts. It starts no daemons.
func newVPC(t *testing.T, hosts int, families []prefix.Family) (*cloudBed, ec2) {
	t.Helper()
	c := ec2{ec2test.New()}
	return newCloudBed(t, hosts, families, "aws-vpc", c), c
}

func (e ec2) add(number, host int, addresses []netip.Addr) http.Handler {
	return ec2test.Metadata(e.AddInstance(number, fmt.Sprintf("subnet-%d", host), addresses...))
}

func (e ec2) end(number int) { e.Terminate(fmt.Sprintf("i-%d", number)) }

func (ec2) env(api string) []string {
	return []string{"AWS_ENDPOINT_URL_EC2=http://" + api, "AWS_EC2_METADATA_SERVICE_ENDPOINT=http://" + metadataAddress}
}

func (ec2) table() string { return ec2test.MainTable }

func (ec2) target(number int) string { return fmt.Sprintf("eni-%d", number) }

func (e ec2) routeTo(dst netip.Prefix) (target string, ok bool) {
	return e.RouteTo(ec2test.MainTable, dst)
}

func (e ec2) deleteRoute(dst netip.Prefix) { e.DeleteRoute(ec2test.MainTable, dst) }

func (e ec2) addRoute(dst netip.Prefix, number int) {
	e.AddRoute(ec2test.MainTable, ec2test.Route{Dst: dst, Target: e.target(number), Origin: "CreateRoute"})
}

// forwarding leaves out instances with the source/dest check.
func (e ec2) forwarding() map[netip.Prefix][]netip.Addr {
	to := map[netip.Prefix][]netip.Addr{}
	for dst, i := range e.Forwarding(ec2test.MainTable) {
		to[dst] = i.Addresses
	}
	return to
}

func (e ec2) restricted() (all []netip.Addr) {
	for _, i := range e.Instances() {
		if i.SourceDestCheck {
			all = append(all, i.Addresses...)
		}
	}
	return all
}

func (e ec2) deny(denied bool) string {
	e.Deny("CreateRoute", denied)
	return "ec2:CreateRoute"
}

func (e ec2) setQuota(n int) { e.SetQuota(n) }

func (e ec2) deletions() (n int) {
	for _, c := range e.Calls() {
		if c.Writes() && c.Action == "DeleteRoute" {
			n++
		}
	}
	return n
}

func (ec2) secrets() []string { return []string{ec2test.SecretKey, ec2test.SessionToken} }

// TestAWSVPC checks that pods reach each other, and that the source/dest check is switched off.
func TestAWSVPC(t *testing.T) {
	t.Parallel()
	v, c := newVPC(t, 3, dual)
	v.expectPods("CreateRoute")

	// The router enforces the check, and flanneld notices that another program has set it.
	from, to := v.Host(1).Pods()[0], v.Host(2).Pods()[0]
	c.SetCheck("i-2", true)
	eventually(t, "packets dropped by the source/dest check", func() error {
		if _, err := from.Ping(testContext(t), to.Addrs()[0], ping.Options{Timeout: 100 * time.Millisecond}); err == nil {
			return errors.New("they arrive")
		}
		return nil
	})
	expectMatrix(t, v.Lab)
}

// TestAWSVPCRestart restarts the daemons while packets flow.
func TestAWSVPCRestart(t *testing.T) {
	t.Parallel()
	v, _ := newVPC(t, 2, v4)
	v.testRestart()
}

// TestAWSVPCNewHostWaits starts a host while the cloud does not answer. It gives the reason, and
// notices that the configuration changes.
//
//stages:rest TestAWSVPCFaults has an outage of the cloud
func TestAWSVPCNewHostWaits(t *testing.T) {
	t.Parallel()
	v, _ := newVPC(t, 1, v4)
	v.SetAway(true)
	d := start(t, v.Host(1), v.options())
	expectReason(t, d, "the cloud does not answer")
	expectLeaseCount(t, v.Lab, 0)
	putKey(t, etcdClient(t, v.Lab), "/coreos.com/network/config", `{"Network": "10.5.0.0/16", "Backend": {"Type": "alloc"}}`)
	expectReady(t, d)
	expectLeaseCount(t, v.Lab, 1)
}

// TestAWSVPCFaults causes faults of EC2, whose descriptions are older than the last call.
//
//stages:rest it takes half a minute; TestAWSVPC repairs a fault too, and TestAWSVPCRestart looks for lost packets
func TestAWSVPCFaults(t *testing.T) {
	t.Parallel()
	v, c := newVPC(t, 4, v4)
	c.SetLag(500 * time.Millisecond)
	if n := v.testFaults(); n != 1 {
		t.Errorf("%d routes were deleted by daemons, want only that of host 4", n)
	}
}
