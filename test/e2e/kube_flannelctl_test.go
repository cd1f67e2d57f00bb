package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"flanneld/pkg/lab"
)

// TestKubeFlannelctl looks at a cluster's leases, those that are none included.
func TestKubeFlannelctl(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1, Families: dual}, `{"Type":"vxlan"}`)
	c.startDaemons()
	h, config := c.Host(1), filepath.Join(c.dir, "kubeconfig1")
	c.addNodeWith(101, map[string]string{annotation("kube-subnet-manager"): "true"})
	c.addNode(102, nil)
	out := mustCtl(t, h, []string{"leases", "--kubeconfig-file=" + config})
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 3 || !strings.HasPrefix(lines[0], "NODE ") {
		t.Fatalf("leases are\n%s", out)
	}
	for i, want := range []string{
		fmt.Sprintf("%s %s %s,%s vxlan", nodeName(1), strings.Join(c.podCIDRs(1), ","), h.Addr(4), h.Addr(6)),
		nodeName(101) + " - - - no podCIDR assigned yet",
	} {
		if got := strings.Join(strings.Fields(lines[i+1]), " "); got != want {
			t.Errorf("line %d is %q, want %q", i+1, got, want)
		}
	}
	refusedCtl(t, h, []string{"leases", "-w", "--kubeconfig-file=" + config}, "kubectl get nodes --watch")
	refusedCtl(t, h, []string{"leases", "--kubeconfig-file=/nowhere"}, `--kubeconfig-file "/nowhere" cannot be read`)
}
