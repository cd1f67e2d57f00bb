// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend/alivpc/alitest"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// ali is Alibaba Cloud as a testCloud.
type ali struct {
	subnetTables
	http.Handler
}

// newAli builds a VPC with as many instances as hosts. It starts no daemons.
func newAli(t *testing.T, hosts int, families []prefix.Family) *cloudBed {
	t.Helper()
	return newCloudBed(t, hosts, families, `{"Type":"ali-vpc"}`, newAlibaba())
}

func newAlibaba() ali {
	s := alitest.New()
	instance := func(number int) string { return fmt.Sprintf("i-%d", number) }
	return ali{subnetTables{s.State, instance, "DeleteRouteEntry", "CreateRouteEntry", "vpc:CreateRouteEntry"}, s}
}

func (a ali) add(number, host int, addresses []netip.Addr) http.Handler {
	return alitest.Metadata(a.AddInstance(number, fmt.Sprintf("vsw-%d", host), addresses...))
}

func (ali) env(api string) []string {
	return []string{
		"ALIBABA_CLOUD_VPC_ENDPOINT=http://" + api, "ALIBABA_CLOUD_ECS_ENDPOINT=http://" + api,
		"ALIBABA_CLOUD_METADATA_ENDPOINT=http://" + metadataAddress,
	}
}

// TestAliVPC checks that pods reach each other.
//
//stages:rest TestAWSVPC shows the same with another cloud
func TestAliVPC(t *testing.T) {
	t.Parallel()
	newAli(t, 3, dual).expectPods("CreateRouteEntry")
}

// TestAliVPCRestart restarts the daemons while packets flow.
func TestAliVPCRestart(t *testing.T) {
	t.Parallel()
	newAli(t, 2, v4).testRestart()
}

// TestAliVPCFaults causes faults of Alibaba Cloud.
//
//stages:rest it takes half a minute; TestAliVPCRestart looks for lost packets
func TestAliVPCFaults(t *testing.T) {
	t.Parallel()
	v := newAli(t, 4, v4)
	v.testCloud.(ali).SetLag(500 * time.Millisecond)
	if n := v.testFaults(); n != 1 {
		t.Errorf("%d routes were deleted by daemons, want that of host 4", n)
	}
}
