// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"path"
	"testing"
	"time"

	"github.com/flanneld/flanneld/backend/gce/gcetest"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// gce simulates Google Cloud. It implements testCloud.
type gce struct{ *gcetest.Server }

// newGCE builds a cloudBed in a simulated Google Cloud with the given number of hosts. It starts no daemons.
func newGCE(t *testing.T, hosts int, families []prefix.Family) (*cloudBed, gce) {
	t.Helper()
	c := newGoogle()
	return newCloudBed(t, hosts, families, `{"Type":"gce"}`, c), c
}

func newGoogle() gce {
	c := gce{gcetest.New()}
	c.SetDelay(300 * time.Millisecond)
	return c
}

func (g gce) add(number, _ int, addresses []netip.Addr) http.Handler {
	name := g.AddInstance(number, addresses...).Name
	g.SetScopes(name, "cloud-platform") // a new host needs this scope to check its permissions in the project
	return g.Metadata(name)
}

func (g gce) end(number int) { g.Delete(fmt.Sprintf("host-%d", number)) }

func (gce) env(api string) []string {
	return []string{
		"CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE=http://" + api + "/compute/v1/", "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER=http://" + api,
		"GCE_METADATA_HOST=" + metadataAddress,
	}
}

func (gce) table() string { return gcetest.Network }

func (gce) target(number int) string { return fmt.Sprintf("%s/host-%d", gcetest.Zone, number) }

// routeTo returns an empty target and true if there are several routes to dst, which happens while a route is
// replaced.
func (g gce) routeTo(dst netip.Prefix) (target string, ok bool) {
	all := g.RoutesTo(gcetest.Network, dst)
	if len(all) != 1 {
		return "", len(all) > 0
	}
	return gcetest.Zone + "/" + path.Base(all[0].Instance), true
}

func (g gce) deleteRoute(dst netip.Prefix) { g.DeleteRoutes(gcetest.Network, dst) }

func (g gce) addRoute(dst netip.Prefix, number int) {
	g.AddRoute(gcetest.Route{
		Name: "by-hand", Network: gcetest.NetworkURL(gcetest.Network), DestRange: dst.String(), Priority: 1000,
		Instance: fmt.Sprintf("projects/%s/zones/%s/instances/host-%d", gcetest.Project, gcetest.Zone, number),
	})
}

// forwarding leaves out routes to instances that cannot forward.
func (g gce) forwarding() map[netip.Prefix][]netip.Addr {
	to := map[netip.Prefix][]netip.Addr{}
	for dst, i := range g.Forwarding(gcetest.Network) {
		to[dst] = i.Addresses
	}
	return to
}

func (g gce) restricted() (all []netip.Addr) {
	for _, i := range g.Instances() {
		if !i.CanIPForward {
			all = append(all, i.Addresses...)
		}
	}
	return all
}

func (g gce) deny(denied bool) string {
	g.Deny("compute.routes.create", denied)
	return "compute.routes.create"
}

func (g gce) setQuota(n int) { g.SetQuota(n, false) }

func (g gce) deletions() (n int) {
	for _, c := range g.Calls() {
		if c.Writes() && c.Name == "routes.delete" {
			n++
		}
	}
	return n
}

func (gce) secrets() []string { return []string{gcetest.Token} }

// TestGCE checks that pods reach each other, and that a host whose instance cannot forward is not ready and
// gives the reason.
func TestGCE(t *testing.T) {
	t.Parallel()
	v, c := newGCE(t, 3, dual)
	v.expectPods("routes.insert")

	from, to := v.Host(1).Pods()[0], v.Host(2).Pods()[0]
	c.SetForward("host-2", false)
	eventually(t, "packets dropped without canIpForward", func() error {
		if _, err := from.Ping(testContext(t), to.Addrs()[0], lab.Echo{Timeout: 100 * time.Millisecond}); err == nil {
			return errors.New("they arrive")
		}
		return nil
	})
	expectReason(t, v.Host(2).Daemon(), "instance zone-a/host-2 cannot forward packets of pods, because its canIpForward is off")
	c.SetForward("host-2", true)
	expectReady(t, v.Host(2).Daemon())
	expectMatrix(t, v.Lab)
}

// TestGCERestart checks that a restart of the daemons loses no packet.
//
//stages:long TestAWSVPCRestart looks for lost packets with another cloud
func TestGCERestart(t *testing.T) {
	t.Parallel()
	v, _ := newGCE(t, 2, v4)
	v.testRestart()
}

// TestGCEFaults checks that daemons recover from faults of Google Cloud. They must delete only two routes: that
// of the host that ends for good, and that of the instance that is replaced. Two instances must never share the
// packets to a subnet.
//
//stages:rest it takes half a minute; TestAWSVPCRestart looks for lost packets with another cloud
func TestGCEFaults(t *testing.T) {
	t.Parallel()
	v, c := newGCE(t, 4, v4)
	if n := v.testFaults(); n != 2 {
		t.Errorf("%d routes were deleted by daemons, want those of host 4 and of the former instance of host 3", n)
	}
	if n := c.Shared(); n > 0 {
		t.Errorf("%d times two instances shared the packets to a subnet, want never", n)
	}
}
