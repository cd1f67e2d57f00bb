package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"flanneld/pkg/lab"
	"flanneld/pkg/prefix"
)

// bare is a cluster in which nothing is installed.
func bare(t *testing.T, cfg lab.Config) *cluster {
	t.Helper()
	c := newCluster(t, cfg, `{"Type":"vxlan"}`)
	for _, kind := range []string{"clusterroles", "clusterrolebindings"} {
		c.do(http.MethodDelete, "/apis/rbac.authorization.k8s.io/v1/"+kind+"/flannel", nil, "")
	}
	return c
}

// tool runs kubectl or helm as an administrator does, and fails the test on
// warnings of the API server, too.
func (c *cluster) tool(name string, args ...string) string {
	c.t.Helper()
	path, err := filepath.Abs("../../bin/tools/" + name)
	if err != nil {
		c.t.Fatal(err)
	}
	config := c.kubeconfig(1, c.write("admin-token", []byte(adminToken)))
	out, err := c.Host(1).Exec(background(c.t), "env", append([]string{"HOME=" + c.dir, "KUBECONFIG=" + config, path}, args...)...)
	if err != nil || strings.Contains(string(out), "Warning:") {
		c.t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func repository(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("../..", path))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// TestKubeManifests has the API server check all that is shipped, down to fields
// that it does not know.
func TestKubeManifests(t *testing.T) {
	t.Parallel()
	c := bare(t, lab.Config{Hosts: 1})
	const strict, dryRun = "--validate=strict", "--dry-run=server"
	c.tool("kubectl", "apply", strict, "-f", repository(t, "dist/kubernetes/base/namespace.yaml"))
	rendered, err := filepath.Glob(repository(t, "dist/kubernetes/testdata/*.golden.yaml"))
	if err != nil || len(rendered) == 0 {
		t.Fatalf("nothing was rendered: %v", err)
	}
	for _, file := range rendered {
		if out := c.tool("kubectl", "apply", strict, dryRun, "-f", file); !strings.Contains(out, "daemonset.apps/kube-flannel-ds created (server dry run)") {
			t.Errorf("%s: %s", filepath.Base(file), out)
		}
	}

	// What is shipped is applied over what there is.
	c.tool("kubectl", "apply", strict, "-f", c.existing("/opt/bin/install-conf"))
	out := c.tool("kubectl", "apply", strict, "-k", repository(t, "dist/kubernetes/base"))
	for _, want := range []string{"daemonset.apps/kube-flannel-ds configured", "role.rbac.authorization.k8s.io/flannel-events created"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
	for _, where := range []string{"default", "kube-flannel"} {
		got := c.tool("kubectl", "get", "role", "--namespace="+where, "--output=name")
		if (got != "") != (where == "default") {
			t.Errorf("roles in %s: %q", where, got)
		}
	}
}

// existing writes the manifest of a cluster that runs flannel, with that command
// to install the CNI configuration.
func (c *cluster) existing(install ...string) string {
	c.t.Helper()
	text, err := os.ReadFile("testdata/existing.yaml")
	if err != nil {
		c.t.Fatal(err)
	}
	return c.write("existing.yaml", []byte(strings.Replace(string(text), "[INSTALL]", "["+strings.Join(install, ", ")+"]", 1)))
}

// TestKubeInstall installs in the ways that the documentation gives, and in those
// that clusters have that run flannel, with nothing but the image exchanged. The
// pods run in the image's file system, with their ServiceAccount, their folders
// and no more capabilities than they say.
func TestKubeInstall(t *testing.T) {
	root, config := image(t)
	for name, tc := range map[string]struct {
		families []prefix.Family
		install  func(c *cluster)
	}{
		"kustomize": {v4, (*cluster).installBase},
		"helm": {dual, func(c *cluster) {
			c.tool("helm", "install", "flannel", repository(c.t, "dist/kubernetes/chart"), "--namespace=kube-flannel", "--create-namespace",
				"--set=podCidr="+lab.PodNetwork(prefix.IPv4).String(), "--set=podCidrv6="+lab.PodNetwork(prefix.IPv6).String(),
				"--set=flannel.enableNFTables=true")
		}},
		"helm IPv6": {v6, func(c *cluster) {
			c.tool("helm", "install", "flannel", repository(c.t, "dist/kubernetes/chart"), "--namespace=kube-flannel", "--create-namespace",
				"--set=podCidr=", "--set=podCidrv6="+lab.PodNetwork(prefix.IPv6).String(), "--set=flannel.backend=host-gw")
		}},
		"existing": {v4, func(c *cluster) { c.tool("kubectl", "apply", "-f", c.existing("/opt/bin/install-conf")) }},
		"existing that copies": {v4, func(c *cluster) {
			c.tool("kubectl", "apply", "-f", c.existing("cp", "-f"))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			c := bare(t, lab.Config{Families: tc.families})
			tc.install(c)
			k := &kubelet{c: c, image: root, env: config.Config.Env, address: c.addr()}
			k.publishRoot("kube-flannel")
			for n := 1; n <= len(c.Hosts()); n++ {
				h := c.Host(n)
				k.run(h, k.schedule("kube-flannel", "kube-flannel-ds", n), func(done string) {
					_, plugin := os.Stat(h.Path(onNode("/opt/cni/bin/flannel")))
					_, conf := os.Stat(h.Path(onNode("/etc/cni/net.d/10-flannel.conflist")))
					if plugin != nil || (conf == nil) != (done == "install-cni") {
						t.Errorf("after %s: plugin %v, configuration %v", done, plugin, conf)
					}
				})
			}
			for n, h := range c.Hosts() {
				expectReady(t, h.Daemon())
				c.expectCondition(n+1, "False")
			}
			if err := c.AddPods(background(t)); err != nil {
				t.Fatal(err)
			}
			expectMatrix(t, c.Lab)
			expectMasquerade(t, c.Host(1))
			if denied := c.denied(); len(denied) > 0 {
				t.Errorf("asked for more than the role has: %q", denied)
			}
		})
	}
}

// installBase applies the plain manifests with the network of the lab.
func (c *cluster) installBase() {
	base, err := filepath.Rel(c.dir, repository(c.t, "dist/kubernetes/base"))
	if err != nil {
		c.t.Fatal(err)
	}
	network, err := lab.NetworkConfig(c.Families(), []byte(`{"Type":"vxlan"}`))
	if err != nil {
		c.t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(c.dir, "overlay"), 0o700); err != nil {
		c.t.Fatal(err)
	}
	c.write("overlay/kustomization.yaml", fmt.Appendf(nil, `resources: [../%s]
images: [{name: flanneld, newName: registry.example.com/flanneld, newTag: v1}]
patches:
  - patch: |-
      apiVersion: v1
      kind: ConfigMap
      metadata: {name: kube-flannel-cfg, namespace: kube-flannel}
      data: {net-conf.json: '%s'}
`, base, network))
	c.tool("kubectl", "apply", "-k", filepath.Join(c.dir, "overlay"))
}

// expectMasquerade wants rules on the host, of whichever kind.
func expectMasquerade(t *testing.T, h *lab.Host) {
	t.Helper()
	eventually(t, "rules", func() error {
		out, err := h.Exec(background(t), "sh", "-c", "iptables-save; iptables-legacy-save; ip6tables-save; ip6tables-legacy-save; nft list ruleset")
		if err == nil && !strings.Contains(strings.ToLower(string(out)), "masquerade") {
			err = fmt.Errorf("none that masquerade: %s", out)
		}
		return err
	})
}

// denied returns the API server's counters of requests that it has forbidden.
func (c *cluster) denied() []string {
	c.t.Helper()
	var lines []string
	for line := range strings.Lines(string(c.do(http.MethodGet, "/metrics", nil, ""))) {
		if strings.HasPrefix(line, "apiserver_request_total{") && strings.Contains(line, `code="403"`) {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}
