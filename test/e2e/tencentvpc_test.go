// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend/tencentvpc/tencenttest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// tencent simulates Tencent Cloud. It implements testCloud. The target of a route is an address of the instance.
type tencent struct {
	subnetTables
	http.Handler
	addresses *sync.Map // the first address (netip.Addr) of each instance, by its number
}

// newTencent builds a cloudBed in Tencent Cloud with the given number of hosts. It starts no daemons.
func newTencent(t *testing.T, hosts int) *cloudBed {
	t.Helper()
	return newCloudBed(t, hosts, []prefix.Family{prefix.IPv4}, `{"Type":"tencent-vpc"}`, newTencentCloud())
}

func newTencentCloud() tencent {
	s := tencenttest.New()
	addresses := &sync.Map{}
	target := func(number int) string {
		a, _ := addresses.Load(number)
		return fmt.Sprint(a)
	}
	return tencent{subnetTables{s.State, target, "DeleteRoutes", "CreateRoutes", "vpc:CreateRoutes"}, s, addresses}
}

func (c tencent) add(number, host int, addresses []netip.Addr) http.Handler {
	c.addresses.Store(number, addresses[0])
	return tencenttest.Metadata(c.AddInstance(number, fmt.Sprintf("subnet-%d", host), addresses...))
}

func (tencent) env(api string) []string {
	return []string{
		"TENCENTCLOUD_VPC_ENDPOINT=http://" + api, "TENCENTCLOUD_CVM_ENDPOINT=http://" + api,
		"TENCENTCLOUD_METADATA_ENDPOINT=http://" + metadataAddress,
	}
}

// TestTencentVPC checks that pods reach each other with the backend tencent-vpc.
//
//stages:rest TestAWSVPC shows the same with another cloud
func TestTencentVPC(t *testing.T) {
	t.Parallel()
	newTencent(t, 3).expectPods("CreateRoutes")
}

// TestTencentVPCRestart checks that a restart of the daemons loses no packet.
//
//stages:long TestAWSVPCRestart looks for lost packets with another cloud
func TestTencentVPCRestart(t *testing.T) {
	t.Parallel()
	newTencent(t, 2).testRestart()
}

// TestTencentVPCFaults checks that daemons recover from faults of Tencent Cloud, and delete only the route of
// the host that ends for good. Calls read the route table as it was half a second ago.
//
//stages:long TestAWSVPCFaults has the same with another cloud
func TestTencentVPCFaults(t *testing.T) {
	t.Parallel()
	v := newTencent(t, 4)
	v.testCloud.(tencent).SetLag(500 * time.Millisecond)
	if n := v.testFaults(); n != 1 {
		t.Errorf("%d routes were deleted by daemons, want that of host 4", n)
	}
}
