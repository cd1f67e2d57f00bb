// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// allTests is a pattern for Kubernetes' conformance tests of the network. testCount is how
// many match.
const (
	allTests  = `\[sig-network\].*\[Conformance\]`
	testCount = 47
)

// shortTests is a pattern for some of these tests, which show within minutes whether pods
// and services are reachable. shortCount is how many match.
const (
	shortTests = `\[sig-network\] (Networking Granular Checks|DNS should provide DNS for (the cluster|services)|` +
		`Services should (be able to create a functioning NodePort|have session affinity work for NodePort|serve multiport)).*\[Conformance\]`
	shortCount = 9
)

// scenario is a cluster and what happens in it.
type scenario struct {
	name string
	config
	installs []install // ways to install the daemon, each over the one before
	focus    string    // pattern for Kubernetes' tests that run at the end; empty if none
	count    int       // number of tests that focus matches
	// before is called before Kubernetes' tests, and meanwhile while they run. Both may be
	// nil.
	before    func(*cluster)
	meanwhile func(*cluster, <-chan struct{})
}

// scenarios returns the scenarios of the long or of the short form. Those of the short form
// contain every way to install, but few of Kubernetes' tests.
func scenarios(short bool) []scenario {
	if short {
		return []scenario{
			{
				name: "vxlan while it is rolled out", config: config{nodes: 2, families: v4, backend: "vxlan"},
				installs: []install{existing, existingCopies, byKubectl},
				focus:    shortTests, count: shortCount, meanwhile: (*cluster).rollOut,
			},
			{name: "dual stack", config: config{nodes: 2, families: dual, backend: "vxlan", nftables: true}, installs: []install{byHelm}},
			{name: "IPv6", config: config{nodes: 2, families: v6, backend: "host-gw"}, installs: []install{byHelm}},
		}
	}
	all := []scenario{
		{
			name: "vxlan while it is rolled out", config: config{families: v4, backend: "vxlan"},
			installs: []install{byKubectl}, meanwhile: (*cluster).rollOut,
		},
		{
			name: "vxlan while a node reboots", config: config{families: v4, backend: "vxlan"},
			installs: []install{byKubectl}, before: (*cluster).cordonLast, meanwhile: (*cluster).rebootLast,
		},
		{name: "host-gw", config: config{families: v4, backend: "host-gw"}, installs: []install{existing}},
		{name: "nftables", config: config{families: v4, backend: "vxlan", nftables: true}, installs: []install{existingCopies}},
		{name: "dual stack", config: config{families: dual, backend: "vxlan", nftables: true}, installs: []install{byHelm}},
		{name: "IPv6", config: config{families: v6, backend: "host-gw"}, installs: []install{byHelm}},
	}
	for i := range all {
		all[i].nodes, all[i].focus, all[i].count = 3, allTests, testCount
	}
	return all
}

// TestClusters installs flanneld in clusters of real kubelets, checks pods and daemons, and
// runs Kubernetes' conformance tests of the network. At the end it removes flanneld from
// clusters with manifests of this repository.
func TestClusters(t *testing.T) {
	archive, images := flannelImage(t), pack(t, testImages(t))
	for _, s := range scenarios(testing.Short()) {
		t.Run(s.name, func(t *testing.T) {
			c := newCluster(t, s.config, images)
			c.importFlannel(archive)
			for _, i := range s.installs {
				c.installFlannel(i)
				c.expectNodesReady()
				c.expectPods()
				c.expectInOrder()
				if i == byHelm {
					c.expectSysdump(archive)
					c.expectConnectivity(archive)
					c.expectHelmTest()
				}
				if i == byKubectl && len(c.families) == 1 && c.families[0] == prefix.IPv4 {
					c.expectFaults() // before new pods of flanneld, because it logs faults as errors
					c.followTutorial()
				}
			}
			c.importFlannel(archive) // import it again while its containers run
			if s.focus != "" {
				c.runTests(s)
			}
			if c.installed.shipped() {
				c.takeOut()
			}
		})
	}
}

// runTests runs Kubernetes' tests of the scenario, and then checks pods and daemons again.
func (c *cluster) runTests(s scenario) {
	c.t.Helper()
	if s.before != nil {
		s.before(c)
	}
	c.installDNS()
	c.conformance(s.focus, s.count, func(running <-chan struct{}) {
		if s.meanwhile != nil {
			s.meanwhile(c, running)
		}
	})
	c.expectPods()
	c.expectInOrder()
}

// rollOut restarts the daemon's rollout again and again until running is closed. A rollout
// replaces the pods one after another, each when kubelet has seen that the one before is
// ready. rollOut also logs how many readiness probes new pods fail. It sets no limit, because each failed
// probe stands for two seconds, and a busy machine needs many of them.
func (c *cluster) rollOut(running <-chan struct{}) {
	c.t.Helper()
	var pods, failed int
	var took time.Duration
	for {
		select {
		case <-running:
			if pods == 0 {
				c.t.Fatal("the tests ended before the first rollout")
			}
			each, probes := took/time.Duration(pods), float64(failed)/float64(pods)
			c.t.Logf("%d pods replaced, in %.1f s each, with %.1f failed readiness probes each", pods, each.Seconds(), probes)
			return
		default:
		}
		start := time.Now()
		c.kubectl("rollout", "restart", "--namespace=kube-flannel", "daemonset/kube-flannel-ds")
		c.kubectl("rollout", "status", "--namespace=kube-flannel", "daemonset/kube-flannel-ds", "--timeout="+patience.String())
		took += time.Since(start)
		for _, n := range c.nodes {
			pods++
			failed += n.failedProbes()
		}
	}
}

var readinessProbes = regexp.MustCompile(`(?m)^prober_probe_total\{container="kube-flannel",.*probe_type="Readiness",result="(\w+)"\} (\d+)$`)

// failedProbes returns how many readiness probes the daemon's present pod on the node has
// failed. kubelet forgets the number when the pod is gone.
func (n *node) failedProbes() int {
	n.c.t.Helper()
	counts := map[string]int{}
	for _, m := range readinessProbes.FindAllStringSubmatch(n.c.kubectl("get", "--raw=/api/v1/nodes/"+n.Name()+"/proxy/metrics/probes"), -1) {
		count, err := strconv.Atoi(m[2])
		if err != nil {
			n.c.t.Fatal(err)
		}
		counts[m[1]] += count
	}
	if counts["successful"] == 0 { // the pod is ready, so one probe must have been successful
		n.c.t.Errorf("%s: kubelet counts no readiness probe that was successful: %v", n.Name(), counts)
	}
	return counts["failed"]
}

func (c *cluster) last() *node { return c.nodes[len(c.nodes)-1] }

// cordonLast keeps the pods of Kubernetes' tests off the last node.
func (c *cluster) cordonLast() { c.kubectl("cordon", c.last().Name()) }

// rebootLast kills the last node and boots it again. It checks that the pods on it start
// again, that all nodes are ready, and that all pods are reachable.
func (c *cluster) rebootLast(<-chan struct{}) {
	c.t.Helper()
	c.last().reboot()
	for _, labels := range []string{"app=flannel", "app=pods"} {
		eventually(c.t, labels+" after the reboot", func(ctx context.Context) error {
			out, err := c.try(ctx, "get", "pods", "--all-namespaces", "--selector="+labels, "--field-selector=spec.nodeName="+c.last().Name(),
				"--output=jsonpath={.items[*].status.containerStatuses[*].restartCount} {.items[*].status.containerStatuses[*].ready}")
			if err == nil && (strings.HasPrefix(out, "0") || !strings.HasSuffix(out, "true")) {
				err = fmt.Errorf("times started again, ready: %s", out)
			}
			return err
		})
	}
	c.expectNodesReady()
	c.expectPods()
}

// importFlannel imports the daemon's image on all nodes, with the command on the
// installation page.
func (c *cluster) importFlannel(archive string) {
	c.t.Helper()
	command := regexp.MustCompile(`(?m)^    (ctr .* images import )\S+\.oci\.tar$`).FindStringSubmatch(installPage(c.t))
	if command == nil {
		c.t.Fatal("the documentation says nothing about an import")
	}
	path := "PATH=" + filepath.Dir(tool(c.t, "containerd/ctr")) + ":" + os.Getenv("PATH")
	for _, n := range c.nodes {
		n.run("env", path, "sh", "-c", command[1]+archive)
	}
}

// expectPods starts a pod on every node. It checks that each pod reaches all pods, including
// itself, and that it reaches a server outside of the cluster, which must see the address of
// the pod's node.
func (c *cluster) expectPods() {
	c.t.Helper()
	text, err := os.ReadFile("pods.yaml")
	if err != nil {
		c.t.Fatal(err)
	}
	c.apply("pods", strings.ReplaceAll(string(text), "$IMAGE", agnhost))
	c.kubectl("rollout", "status", "daemonset/pods", "--timeout="+patience.String())
	pods := c.testPods()
	for _, from := range pods {
		for _, to := range pods {
			for _, text := range to.addrs {
				addr := netip.MustParseAddr(text)
				if !networksOf(prefix.FamilyOf(addr)).pods.Contains(addr) {
					c.t.Errorf("%s has %s", to.name, addr)
				}
				c.expectAnswer(from.name, netip.AddrPortFrom(addr, 8080), "/hostname", to.name)
			}
		}
		for _, f := range c.families { // a packet that leaves the cluster has the address of the node
			router := netip.AddrPortFrom(c.lab.RouterAddr(f), outside)
			c.expectAnswer(from.name, router, "/clientip", from.node.Addr(f).String())
		}
	}
}

// pod is one of those that expectPods starts.
type pod struct {
	name  string
	node  *node
	addrs []string
}

// testPods returns the pods of expectPods, one on every node, when all have addresses.
func (c *cluster) testPods() []pod {
	c.t.Helper()
	var pods []pod
	eventually(c.t, "pods", func(ctx context.Context) error {
		out, err := c.try(ctx, "get", "pods", "--selector=app=pods", `--output=jsonpath={range .items[*]}{.metadata.name} {.spec.nodeName} {.status.podIPs[*].ip}{"\n"}{end}`)
		pods = nil
		for line := range strings.Lines(out) {
			if words := strings.Fields(line); len(words) == 2+len(c.families) {
				pods = append(pods, pod{words[0], c.node(words[1]), words[2:]})
			}
		}
		if err == nil && len(pods) != len(c.nodes) {
			err = fmt.Errorf("%d pods with addresses on %d nodes: %s", len(pods), len(c.nodes), out)
		}
		return err
	})
	return pods
}

// expectAnswer sends requests for path from a pod to the server, until the answer contains
// want.
func (c *cluster) expectAnswer(pod string, server netip.AddrPort, path, want string) {
	c.t.Helper()
	eventually(c.t, fmt.Sprintf("%s asks %s", pod, server), func(ctx context.Context) error {
		out, err := c.try(ctx, "exec", pod, "--", "curl", "--silent", "--show-error", "--max-time", "5", "http://"+server.String()+path)
		if err == nil && !strings.Contains(out, want) {
			err = fmt.Errorf("the answer is %q, want %q", out, want)
		}
		return err
	})
}

// node returns the node of that name, or nil if there is none.
func (c *cluster) node(name string) *node {
	for _, n := range c.nodes {
		if n.Name() == name {
			return n
		}
	}
	return nil
}
