// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// expectConnectivity runs flannelctl connectivity test in good order, with each half of the way of packets broken on one
// node, and until a signal. It must name the half, and leave nothing. archive is the path of flanneld's image, beside
// which are its programs.
func (c *cluster) expectConnectivity(archive string) {
	c.t.Helper()
	program := filepath.Join(filepath.Dir(archive), "bin", "flannelctl")
	pairs := len(c.nodes) * (len(c.nodes) - 1)
	all := len(c.nodes) * len(c.families)
	fine := []string{
		fmt.Sprintf("paths: %d ok, 0 broken, 0 unknown", pairs), fmt.Sprintf("same Node: %d of %[1]d ok", 2*all), fmt.Sprintf("service: %d of %[1]d ok", all),
	}
	run := func(code int, want ...string) {
		c.t.Helper()
		out, err := c.lab.Underlay().Exec(background(c.t), "env", c.access(), program, "connectivity", "test")
		got := 0
		if failure := (*exec.ExitError)(nil); errors.As(err, &failure) {
			got = failure.ExitCode()
		} else if err != nil {
			c.t.Fatal(err)
		}
		for _, w := range want {
			if got != code || !strings.Contains(string(out), w) {
				c.t.Errorf("connectivity test exits with %d, want %d and %q in\n%s", got, code, w, out)
			}
		}
		c.t.Logf("%s", out)
		c.expectNoTestPods()
	}
	run(0, fine...)

	// kube-proxy and kubelet do not send through the bridge.
	broken := c.nodes[0]
	for _, fault := range []struct{ name, hook, match, want string }{
		{"packets of pods are not forwarded", "forward priority -300", `iifname "cni0" oifname != "cni0" meta l4proto { tcp, icmp, ipv6-icmp }`, "all gateways answer"},
		{"packets of pods do not reach the gateway", "prerouting priority -310", `iifname "cni0" meta l4proto { tcp, icmp }`, "within their Node"},
	} {
		if fault.want == "within their Node" && c.families[0] == prefix.IPv6 {
			continue // without neighbour discovery a pod does not start
		}
		c.t.Run(fault.name, func(*testing.T) {
			broken.run("nft", fmt.Sprintf("add table inet fault; add chain inet fault c { type filter hook %s; }; add rule inet fault c %s drop", fault.hook, fault.match))
			run(1, fault.want, broken.Name()+" -> ", ": network")
			broken.run("nft", "delete table inet fault")
		})
	}
	run(0, fine...)

	for _, role := range []string{"target", "probe"} {
		cmd := exec.Command(program, "connectivity", "test")
		cmd.Env = []string{c.access()}
		if err := c.lab.Underlay().Start(cmd); err != nil {
			c.t.Fatal(err)
		}
		eventually(c.t, "pods of the role "+role, func(ctx context.Context) error {
			if out, err := c.try(ctx, "get", "pods", "--namespace=kube-flannel", "--selector=app=flannel-connectivity,role="+role, "--output=name"); err != nil || out == "" {
				return fmt.Errorf("no pods: %w", err)
			}
			return nil
		})
		if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
			c.t.Fatal(err)
		}
		if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != 2 {
			c.t.Errorf("after SIGINT: %s, want exit code 2", cmd.ProcessState)
		}
		c.expectNoTestPods()
	}
}

// expectNoTestPods waits until no object of a connectivity test exists. Kubelet needs a moment to end deleted pods.
func (c *cluster) expectNoTestPods() {
	c.t.Helper()
	eventually(c.t, "all is deleted", func(ctx context.Context) error {
		out, err := c.try(ctx, "get", "pods,services", "--namespace=kube-flannel", "--selector=app=flannel-connectivity", "--output=name")
		if err == nil && out != "" {
			err = fmt.Errorf("there are still %s", out)
		}
		return err
	})
}

// expectHelmTest runs helm test. If it succeeds, it must leave nothing. If it fails, it must leave its pod with the log,
// but not the rights of the pod.
func (c *cluster) expectHelmTest() {
	c.t.Helper()
	args := []string{c.access(), "HOME=" + c.dir, tool(c.t, "helm"), "test", "flannel", "--namespace=kube-flannel", "--timeout=" + patience.String()}
	left := func(kinds string) string {
		c.expectNoTestPods()
		return c.kubectl("get", kinds, "--namespace=kube-flannel", "--selector=app=flannel-connectivity-test", "--output=name")
	}
	const rights = "roles,rolebindings,serviceaccounts"
	c.onRouter("env", args...)
	if out := left(rights + ",pods"); out != "" {
		c.t.Errorf("helm test has left %s", out)
	}

	const table = "table inet fault { chain c { type filter hook forward priority -300; iifname cni0 meta l4proto { tcp, icmp, ipv6-icmp } drop; } ; }"
	broken := c.nodes[0]
	broken.run("nft", table)
	out, err := c.lab.Underlay().Exec(background(c.t), "env", append(args, "--logs")...)
	broken.run("nft", "delete table inet fault")
	if err == nil || !strings.Contains(string(out), broken.Name()+" -> ") {
		c.t.Errorf("helm test with a fault: %v\n%s", err, out)
	}
	if out := left(rights); out != "" {
		c.t.Errorf("helm test with a fault has left %s", out)
	}
	c.kubectl("delete", "pod", "flannel-connectivity-test", "--namespace=kube-flannel")
}
