package kubernetes

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"flanneld/pkg/prefix"
)

// allTests matches Kubernetes' conformance tests of the network.
const (
	allTests  = `\[sig-network\].*\[Conformance\]`
	testCount = 47
)

// shortTests matches those that show in minutes whether pods and services are reachable.
const (
	shortTests = `\[sig-network\] (Networking Granular Checks|DNS should provide DNS for (the cluster|services)|` +
		`Services should (be able to create a functioning NodePort|have session affinity work for NodePort|serve multiport)).*\[Conformance\]`
	shortCount = 9
)

// TestClusters installs flanneld as shipped in clusters of real kubelets and runs
// Kubernetes' conformance tests of the network.
func TestClusters(t *testing.T) {
	type test struct {
		name string
		config
		before    func(*cluster) // may be nil, like meanwhile
		meanwhile func(*cluster, <-chan struct{})
	}
	tests := []test{
		{"vxlan while it is rolled out", config{nodes: 3, families: v4, backend: "vxlan", install: byKubectl}, nil, (*cluster).rollOut},
		{"vxlan while a node reboots", config{nodes: 3, families: v4, backend: "vxlan", install: byKubectl}, (*cluster).cordonLast, (*cluster).rebootLast},
		{"host-gw", config{nodes: 3, families: v4, backend: "host-gw", install: existing}, nil, nil},
		{"nftables", config{nodes: 3, families: v4, backend: "vxlan", nftables: true, install: existingCopies}, nil, nil},
		{"dual stack", config{nodes: 3, families: dual, backend: "vxlan", nftables: true, install: byHelm}, nil, nil},
		{"IPv6", config{nodes: 3, families: v6, backend: "host-gw", install: byHelm}, nil, nil},
	}
	focus, count := allTests, testCount
	if testing.Short() {
		tests = []test{{"vxlan while it is rolled out", config{nodes: 2, families: v4, backend: "vxlan"}, nil, (*cluster).rollOut}}
		focus, count = shortTests, shortCount
	}
	archive, images := flannelImage(t), pack(t, testImages(t))
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := newCluster(t, tt.config, images)
			c.importFlannel(archive)
			c.installFlannel()
			c.expectNodesReady()
			c.expectPods()
			c.importFlannel(archive) // again, while its containers run
			if tt.before != nil {
				tt.before(c)
			}
			c.installDNS()
			var meanwhile func(<-chan struct{})
			if tt.meanwhile != nil {
				meanwhile = func(running <-chan struct{}) { tt.meanwhile(c, running) }
			}
			c.conformance(focus, count, meanwhile)
			c.expectPods()
			c.expectInOrder()
			if tt.shipped() {
				c.takeOut()
			}
		})
	}
}

// rollOut replaces the daemon's pods again and again.
func (c *cluster) rollOut(running <-chan struct{}) {
	c.t.Helper()
	for n := 0; ; n++ {
		select {
		case <-running:
			c.t.Logf("%d times rolled out", n)
			if n == 0 {
				c.t.Error("there was no time to roll it out")
			}
			return
		default:
		}
		c.kubectl("rollout", "restart", "--namespace=kube-flannel", "daemonset/kube-flannel-ds")
		c.kubectl("rollout", "status", "--namespace=kube-flannel", "daemonset/kube-flannel-ds", "--timeout="+patience.String())
	}
}

func (c *cluster) last() *node { return c.nodes[len(c.nodes)-1] }

// cordonLast keeps the pods of Kubernetes' tests off the last node.
func (c *cluster) cordonLast() { c.kubectl("cordon", c.last().Name()) }

// rebootLast kills the last node and boots it again. Its pod must be reachable again.
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

// importFlannel imports the daemon's image on the nodes with the documented command.
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

// expectPods expects a pod on every node that reaches all pods, including itself, and a
// server outside, with its node's address.
func (c *cluster) expectPods() {
	c.t.Helper()
	text, err := os.ReadFile("pods.yaml")
	if err != nil {
		c.t.Fatal(err)
	}
	c.apply("pods", strings.ReplaceAll(string(text), "$IMAGE", agnhost))
	c.kubectl("rollout", "status", "daemonset/pods", "--timeout="+patience.String())
	type pod struct {
		name  string
		node  *node
		addrs []string
	}
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
		for _, f := range c.families { // a packet that leaves has the address of the node
			router := netip.AddrPortFrom(c.lab.RouterAddr(f), outside)
			c.expectAnswer(from.name, router, "/clientip", from.node.Addr(f).String())
		}
	}
}

// expectAnswer requests path of the server from a pod until the answer contains want.
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

// node returns the node of that name.
func (c *cluster) node(name string) *node {
	for _, n := range c.nodes {
		if n.Name() == name {
			return n
		}
	}
	return nil
}
