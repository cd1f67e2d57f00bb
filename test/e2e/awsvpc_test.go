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
	"github.com/flanneld/flanneld/test/lab"
)

// ec2 simulates EC2. It implements testCloud.
type ec2 struct {
	subnetTables
	http.Handler
	server *ec2test.Server
}

// newVPC builds a cloudBed in a simulated EC2 with the given number of hosts. It starts no daemons.
func newVPC(t *testing.T, hosts int, families []prefix.Family) (*cloudBed, ec2) {
	t.Helper()
	c := newEC2()
	return newCloudBed(t, hosts, families, `{"Type":"aws-vpc"}`, c), c
}

func newEC2() ec2 {
	s := ec2test.New()
	instance := func(number int) string { return fmt.Sprintf("eni-%d", number) }
	return ec2{subnetTables{s.State, instance, "DeleteRoute", "CreateRoute", "ec2:CreateRoute"}, s, s}
}

func (e ec2) add(number, host int, addresses []netip.Addr) http.Handler {
	return ec2test.Metadata(e.server.AddInstance(number, fmt.Sprintf("subnet-%d", host), addresses...))
}

func (ec2) env(api string) []string {
	return []string{"AWS_ENDPOINT_URL_EC2=http://" + api, "AWS_EC2_METADATA_SERVICE_ENDPOINT=http://" + metadataAddress}
}

// TestAWSVPC checks that pods reach each other, and that daemons switch the source/destination check
// of their instances off.
func TestAWSVPC(t *testing.T) {
	t.Parallel()
	v, c := newVPC(t, 3, dual)
	v.expectPods("CreateRoute")
	expectOnPage(t, "backends/aws-vpc.md", "flannelctl status", expectFlannelctl(t, v.Host(1), []string{"status"}))

	// Another program switches the check on for one instance. The router then drops packets until
	// flanneld notices the change and switches the check off again.
	from, to := v.Host(1).Pods()[0], v.Host(2).Pods()[0]
	c.Restrict("i-2", true)
	eventually(t, "packets dropped by the source/dest check", func() error {
		if _, err := from.Ping(testContext(t), to.Addrs()[0], lab.Echo{Timeout: 100 * time.Millisecond}); err == nil {
			return errors.New("they arrive")
		}
		return nil
	})
	expectMatrix(t, v.Lab)
}

// TestAWSVPCRestart checks that a restart of the daemons loses no packet.
func TestAWSVPCRestart(t *testing.T) {
	t.Parallel()
	v, _ := newVPC(t, 2, v4)
	v.testRestart()
}

// TestAWSVPCNewHostWaits checks a new host that starts while the cloud does not answer. The host
// must give the reason and take no lease. When the configuration changes to another backend, the
// host must take a lease and become ready.
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

// TestAWSVPCTwoTables gives the cloud subnet of host 2 a table of its own, which host 1 does not write. Both hosts must
// say that they do not reach each other, and name the table.
//
//stages:rest a host waits a minute for the route of another
func TestAWSVPCTwoTables(t *testing.T) {
	t.Parallel()
	v, c := newVPC(t, 2, v4)
	c.AddTable("rtb-2", "subnet-2")
	for _, h := range v.Hosts() {
		start(t, h, v.options())
	}
	for n, other := range []string{"rtb-2", "rtb-main"} {
		within(t, 2*time.Minute, "the other table is named", func() error {
			if code, body, _ := v.Host(n+1).Daemon().Get(testContext(t), "/readyz"); code == http.StatusOK || !strings.Contains(body, "follow the route tables "+other) {
				return fmt.Errorf("status %d, %q", code, body)
			}
			return nil
		})
	}
}

// TestAWSVPCFaults checks that daemons recover from faults of EC2, and delete only the route of the
// host that ends for good. The simulated cloud shows daemons its route table as it was half a second
// ago.
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
