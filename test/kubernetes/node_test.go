// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// node is a host of the lab that runs node.sh.
type node struct {
	*lab.Host
	c       *cluster
	variant string     // variant of iptables
	cgroups []string   // its cgroup in each hierarchy, while the node runs
	machine *exec.Cmd  // nil before the first boot
	ended   chan error // receives the result of machine, and is then closed
}

// variant returns the variant of iptables that kubelet and kube-proxy use on a node, counted
// from 0. A cluster with two nodes has both variants.
func variant(node int) string { return []string{"nft", "legacy"}[node%2] }

// newNode writes the configuration of the node's programs, and returns the node. boot starts
// it.
func (c *cluster) newNode(h *lab.Host, variant string) *node {
	c.t.Helper()
	n := &node{Host: h, c: c, variant: variant}
	if err := os.MkdirAll(h.Path("/var/lib/node"), 0o755); err != nil {
		c.t.Fatal(err)
	}
	n.put("containerd.toml", n.containerd())
	n.putJSON("kubelet.json", n.kubelet())
	n.putJSON("kube-proxy.json", n.kubeProxy())
	return n
}

func (n *node) put(name, text string) {
	n.c.t.Helper()
	if err := os.WriteFile(filepath.Join(n.Path("/var/lib/node"), name), []byte(text), 0o600); err != nil {
		n.c.t.Fatal(err)
	}
}

func (n *node) putJSON(name string, value any) {
	n.c.t.Helper()
	text, err := json.Marshal(value)
	if err != nil {
		n.c.t.Fatal(err)
	}
	n.put(name, string(text))
}

// containerd returns a configuration of containerd with the default folders and socket, because
// Kubernetes' pages about installation expect these.
func (n *node) containerd() string {
	return `version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '` + registry + `/pause:test'
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['/opt/cni/bin']
conf_dir = '/etc/cni/net.d'
`
}

func (n *node) kubelet() map[string]any {
	return map[string]any{
		"kind": "KubeletConfiguration", "apiVersion": "kubelet.config.k8s.io/v1beta1",
		"address": n.anyAddress(), "authentication": map[string]any{"anonymous": map[string]any{"enabled": true}, "webhook": map[string]any{"enabled": false}},
		"authorization": map[string]any{"mode": "AlwaysAllow"},
		"clusterDomain": "cluster.local", "clusterDNS": []string{networksOf(n.c.families[0]).dns.String()},
		"containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
		"cgroupDriver":             "cgroupfs", "failCgroupV1": false, "failSwapOn": false, "oomScoreAdj": 0, "protectKernelDefaults": true,
		"enforceNodeAllocatable": []string{}, "imageGCHighThresholdPercent": 100,
		"evictionHard": map[string]string{"memory.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%"},
	}
}

func (n *node) kubeProxy() map[string]any {
	mode := "iptables"
	if n.c.nftables {
		mode = "nftables"
	}
	return map[string]any{
		"kind": "KubeProxyConfiguration", "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
		"clientConnection": map[string]any{"kubeconfig": n.c.kubeconfig("kube-proxy")},
		"hostnameOverride": n.Name(), "bindAddress": n.anyAddress(), "mode": mode, "clusterCIDR": n.c.podNetworks(), "oomScoreAdj": 0,
		"conntrack": map[string]any{"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
	}
}

func (n *node) anyAddress() string {
	if n.c.families[0] == prefix.IPv6 {
		return "::"
	}
	return "0.0.0.0"
}

// enterCgroups is a script that makes the cgroups in its first argument the root of a cgroup
// namespace, and runs there the script in the next argument as process 1. With cgroups of
// version 2, kubelet enables controllers for the groups below the root. The kernel allows that
// only if the root contains no processes. So enterCgroups moves itself to a group below the
// root.
const enterCgroups = `for cgroup in $1; do echo $$ >"$cgroup/cgroup.procs"; done
exec unshare --cgroup -- bash -euc '
	for cgroup in $1; do
		[ ! -e "$cgroup/cgroup.controllers" ] || { mkdir "$cgroup/services" && echo $$ >"$cgroup/services/cgroup.procs"; }
	done
	shift
	exec unshare --pid --mount --uts --ipc --fork --kill-child -- bash "$@"' bash "$@"`

// boot empties /run, starts the node with the contents of its disk, and waits until containerd
// answers.
func (n *node) boot() {
	t := n.c.t
	t.Helper()
	n.run("find", "/run", "-mindepth", "1", "-delete")
	var err error
	if n.cgroups, err = makeCgroups(n.Name()); err != nil {
		t.Fatal(err)
	}
	console, err := os.OpenFile(filepath.Join(n.c.dir, n.Name()+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer console.Close()
	script, err := filepath.Abs("node.sh")
	if err != nil {
		t.Fatal(err)
	}
	addrs := n.c.join(func(f prefix.Family) string { return n.Addr(f).String() })
	n.machine = exec.Command("bash", "-euc", enterCgroups, "bash", strings.Join(n.cgroups, " "), script, n.Name(), addrs, filepath.Dir(tool(t, "kubectl")), n.c.kubeconfig(n.Name()), n.variant)
	n.machine.Stdout, n.machine.Stderr = console, console
	if err := n.Start(n.machine); err != nil {
		t.Fatal(err)
	}
	n.ended = make(chan error, 1)
	machine, ended := n.machine, n.ended
	go func() { ended <- machine.Wait(); close(ended) }()
	eventually(t, "containerd of "+n.Name(), func(ctx context.Context) error {
		select {
		case err := <-ended:
			t.Fatalf("%s: %v", n.Name(), err)
		default:
		}
		out, err := n.Exec(ctx, tool(t, "containerd/ctr"), "version")
		if err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
}

// kill kills all processes of the node, like a power failure, and removes its cgroups.
func (n *node) kill() error {
	if n.machine == nil {
		return nil
	}
	_ = n.machine.Process.Kill() // may have ended already
	<-n.ended
	var errs []error
	for _, dir := range n.cgroups { // removeCgroup waits until its last process has ended
		errs = append(errs, removeCgroup(dir))
	}
	return errors.Join(errs...)
}

// reboot kills the node, removes its devices, routes and rules from the kernel, and boots it
// again.
func (n *node) reboot() {
	n.c.t.Helper()
	if err := n.kill(); err != nil {
		n.c.t.Fatal(err)
	}
	n.run("sh", "-ec", `
		for link in $(ip -o link show | sed -E 's/^[0-9]+: ([^:@]+).*/\1/'); do
			case $link in lo | eth0) ;; *) ip link del "$link" 2>/dev/null || ! ip link show "$link" ;; esac
		done
		nft flush ruleset
		for family in -4 -6; do
			ip $family route show | grep -v -e '^default' -e 'proto kernel' | while read -r route; do ip $family route del $route; done
		done
		ip nexthop flush`)
	err := n.Netlink(background(n.c.t), func(h *netlink.Handle) error { return h.ConntrackTableFlush(netlink.ConntrackTable) })
	if err != nil {
		n.c.t.Fatal(err)
	}
	n.boot()
}

// run runs a command of this machine in the network and mount namespaces of the lab's host, and
// returns its output. The test fails if the command does.
func (n *node) run(name string, args ...string) string {
	n.c.t.Helper()
	out, err := n.Exec(background(n.c.t), name, args...)
	if err != nil {
		n.c.t.Fatalf("%s: %s %s: %v: %s", n.Name(), name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// ctr runs ctr with containerd's namespace that kubelet uses.
func (n *node) ctr(args ...string) string {
	n.c.t.Helper()
	return n.run(tool(n.c.t, "containerd/ctr"), append([]string{"--namespace=k8s.io"}, args...)...)
}
