// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/test/lab"
)

// TestKubeAWSVPC checks a cluster in a VPC, with the roles of the manifests. Pods must reach each other by the routes
// to the podCIDRs, restarts must lose no packet, and the route of a deleted Node must be removed.
//
//stages:rest it needs kubectl, which takes minutes to build
func TestKubeAWSVPC(t *testing.T) {
	t.Parallel()
	c := newBareCluster(t, lab.Config{Hosts: 3, Segments: 3})
	c.tool("kubectl", "apply", "-f", repository(t, "dist/kubernetes/base/namespace.yaml"))
	c.install("-k", "dist/kubernetes/base")
	config, err := lab.NetworkConfig(v4, json.RawMessage(`{"Type":"aws-vpc"}`))
	if err != nil {
		t.Fatal(err)
	}
	c.configure(string(config))
	v := newCloudBedOn(t, c.Lab, newEC2())
	options := func(n int) lab.FlanneldOptions {
		o := c.options(n, v.options().Args...)
		o.Env = append(o.Env, append(v.options().Env, "POD_NAMESPACE=kube-flannel")...)
		return o
	}
	for n := 1; n <= 3; n++ {
		start(t, c.Host(n), options(n))
	}
	for n := 1; n <= 3; n++ {
		expectReady(t, c.Host(n).Daemon())
		c.expectNodeCondition(n, "False")
		v.expectRoute(netip.MustParsePrefix(c.podCIDRs(n)[0]), n)
	}
	if err := c.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrix(t, c.Lab)
	flows, writes := startFlows(t, c.Lab, fast), v.Writes()
	for n := 1; n <= 3; n++ {
		v.stop(n)
		startOne(t, c.Host(n), options(n))
	}
	pause(t, 3*time.Second) // enough time for more than one comparison of the routes
	if n := v.Writes() - writes; n != 0 {
		t.Errorf("%d calls have changed the cloud at restarts, want none", n)
	}
	expectNothingLost(t, flows)

	v.stop(3)
	v.end(3)
	pause(t, 5*time.Second) // enough time for several comparisons of the routes; the Node still exists
	gone := netip.MustParsePrefix(c.podCIDRs(3)[0])
	if _, ok := v.routeTo(gone); !ok {
		t.Error("the route of host 3 is gone before its Node")
	}
	c.deleteNode(3)
	eventually(t, "the route of the deleted Node removed", func() error {
		if _, ok := v.routeTo(gone); ok {
			return errors.New("it is there")
		}
		return nil
	})
	from, to := c.Host(1).Pods()[0], c.Host(2).Pods()[0]
	if _, err := from.Ping(testContext(t), to.Addrs()[0], lab.Echo{Timeout: time.Second}); err != nil {
		t.Errorf("the other Nodes do not reach each other: %v", err)
	}
	if n := v.deletions(); n != 1 {
		t.Errorf("%d routes were deleted, want only that of host 3", n)
	}
	requests := []string{"list networkpolicies", "list nodes", "patch nodes/status", "watch nodes"}
	if diff := cmp.Diff(requests, c.requests(0)); diff != "" {
		t.Errorf("requests to the API server (-want +got):\n%s", diff)
	}
	v.expectNoSecrets()
}
