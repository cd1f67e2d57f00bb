// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend/alivpc/alitest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/cloud/cloudtest/vpctest"
)

// ali simulates Alibaba Cloud. It implements testCloud.
type ali struct {
	subnetTables
	http.Handler
}

// newAli builds a cloudBed in a simulated Alibaba Cloud with the given number of hosts. It starts no daemons.
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

// TestAliVPC checks that pods reach each other with the backend ali-vpc.
//
//stages:rest TestAWSVPC shows the same with another cloud
func TestAliVPC(t *testing.T) {
	t.Parallel()
	newAli(t, 3, dual).expectPods("CreateRouteEntry")
}

// TestAliVPCRestart checks that a restart of the daemons loses no packet.
//
//stages:long TestAWSVPCRestart looks for lost packets with another cloud
func TestAliVPCRestart(t *testing.T) {
	t.Parallel()
	newAli(t, 2, v4).testRestart()
}

// TestAliVPCFaults checks that daemons recover from faults of Alibaba Cloud, and delete only the route of the
// host that ends for good. The simulated cloud shows daemons its route table as it was half a second ago.
//
//stages:long TestAWSVPCFaults has the same with another cloud
func TestAliVPCFaults(t *testing.T) {
	t.Parallel()
	v := newAli(t, 4, v4)
	v.testCloud.(ali).SetLag(500 * time.Millisecond)
	if n := v.testFaults(); n != 1 {
		t.Errorf("%d routes were deleted by daemons, want that of host 4", n)
	}
}

// TestAliVPCKeyInConfiguration checks that the daemon warns about an access key in the network configuration and
// never shows the key, even if it rejects the configuration. The output of flannelctl must not contain the key
// either.
//
//stages:rest TestSecretsAreNeverShown of each cloud has more cases, without a daemon
func TestAliVPCKeyInConfiguration(t *testing.T) {
	t.Parallel()
	v := newAli(t, 1, v4)
	startOne(t, v.Host(1), v.options())
	config := func(more string) string {
		return string(configWith(t, v.Lab, fmt.Sprintf(`{"Type":"ali-vpc","AccessKeySecret":%q%s}`, vpctest.Secret, more)))
	}
	newEdits(t, v.Lab).put(config(""))
	expectLogged(t, v.Host(1).Daemon(), `key \"AccessKeySecret\" may contain a secret`)
	putKey(t, etcdClient(t, v.Lab), "/coreos.com/network/config", config(`,"Cluster":"A B"`))
	eventually(t, "a rejected configuration", func() error {
		if r := statusOf(t, v.Host(1)); !strings.Contains(r.ConfigRejected, "Backend.Cluster") {
			return fmt.Errorf("the status says %q", r.ConfigRejected)
		}
		return nil
	})
	v.expectNoSecrets()
	v.stop(1)
	putKey(t, etcdClient(t, v.Lab), "/coreos.com/network/config", config(""))
	startOne(t, v.Host(1), v.options())
	expectLogged(t, v.Host(1).Daemon(), `key \"AccessKeySecret\" may contain a secret`)
	for _, command := range []string{"status", "doctor"} {
		if out, err := flannelctl(t, v.Host(1), command); out == "" || strings.Contains(out, vpctest.Secret) {
			t.Errorf("flannelctl %s: %v, want an output without the key:\n%s", command, err, out)
		}
	}
	v.expectNoSecrets()
}
