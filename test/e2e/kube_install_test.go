// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/test/lab"
)

// newBareCluster builds a cluster without the roles for flannel, so that tests can install them
// from manifests.
func newBareCluster(t *testing.T, cfg lab.Config) *cluster {
	t.Helper()
	c := newCluster(t, cfg, `{"Type":"vxlan"}`)
	for _, kind := range []string{"clusterroles", "clusterrolebindings"} {
		c.do(http.MethodDelete, "/apis/rbac.authorization.k8s.io/v1/"+kind+"/flannel", nil, "")
	}
	return c
}

// install applies manifests, and gives each daemon the token of a pod on its Node, as kubelet does. The
// admission policy requires such a token.
func (c *cluster) install(option, path string) {
	c.t.Helper()
	c.tool("kubectl", "apply", option, repository(c.t, path))
	for i := range c.Hosts() {
		c.write(fmt.Sprintf("token%d", i+1), []byte(c.boundToken(i+1)))
	}
}

// boundToken returns a token of flanneld's service account that names Node n.
func (c *cluster) boundToken(n int) string {
	c.t.Helper()
	pod := fmt.Sprintf("daemon%d", n)
	c.do(http.MethodPost, "/api/v1/namespaces/kube-flannel/pods", map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": pod},
		"spec": map[string]any{
			"nodeName": nodeName(n), "serviceAccountName": "flannel", "containers": []any{map[string]any{"name": "flanneld", "image": "flanneld"}},
		},
	}, "")
	return strings.TrimSpace(c.tool("kubectl", "create", "token", "flannel", "--namespace=kube-flannel", "--bound-object-kind=Pod", "--bound-object-name="+pod))
}

// tool runs kubectl or helm as an administrator and returns the output. The test fails if
// the program fails or the output contains a warning.
func (c *cluster) tool(name string, args ...string) string {
	c.t.Helper()
	path, err := filepath.Abs("../../bin/tools/" + name)
	if err != nil {
		c.t.Fatal(err)
	}
	config := c.kubeconfig(1, c.write("admin-token", []byte(adminToken)))
	out, err := c.Host(1).Exec(testContext(c.t), "env", append([]string{"HOME=" + c.dir, "KUBECONFIG=" + config, path}, args...)...)
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

// TestKubeManifests checks that the API server accepts all rendered manifests and knows
// all of their fields.
//
//stages:rest it needs kubectl, which takes minutes to build
func TestKubeManifests(t *testing.T) {
	t.Parallel()
	c := newBareCluster(t, lab.Config{Hosts: 1})
	const strict, dryRun = "--validate=strict", "--dry-run=server"
	c.tool("kubectl", "apply", strict, "-f", repository(t, "dist/kubernetes/base/namespace.yaml"))
	rendered, err := filepath.Glob(repository(t, "dist/kubernetes/testdata/*.golden.yaml"))
	if err != nil || len(rendered) == 0 {
		t.Fatalf("no rendered manifests: %v", err)
	}
	for _, file := range rendered {
		args := []string{"apply", strict, dryRun, "-f", file}
		want := "daemonset.apps/kube-flannel-ds created (server dry run)"
		if filepath.Base(file) == "connectivity.golden.yaml" {
			// The API server refuses a Pod without its service account, and a dry run creates none.
			args = slices.DeleteFunc(args, func(arg string) bool { return arg == dryRun })
			want = "pod/flannel-connectivity-test created"
		}
		if out := c.tool("kubectl", args...); !strings.Contains(out, want) {
			t.Errorf("%s: %s", filepath.Base(file), out)
		}
	}
}

// TestKubeManifestsOverExisting checks that applying the manifests of flanneld over
// flannel's replaces them completely, whether flannel's were created or applied, and that
// applying flannel's again restores them completely. A mixture of both would start wrong
// commands.
//
//stages:rest it needs kubectl, which takes minutes to build
func TestKubeManifestsOverExisting(t *testing.T) {
	t.Parallel()
	base := repository(t, "dist/kubernetes/base")
	for name, tc := range map[string]struct{ made, applied []string }{
		"applied": {[]string{"apply"}, []string{"apply"}},
		"created": {[]string{"create"}, []string{"apply", "--server-side", "--force-conflicts"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newBareCluster(t, lab.Config{Hosts: 1})
			old := c.flannelManifest("cp", "-f")
			c.tool("kubectl", append(tc.made, "-f", old)...)
			what := func() string {
				t.Helper()
				return c.tool("kubectl", "get", "clusterrole", "flannel", "--output=jsonpath={.rules}") +
					c.tool("kubectl", "get", "daemonset", "--namespace=kube-flannel", "kube-flannel-ds", "--output=jsonpath={.spec.template.spec}")
			}
			before := what()
			c.tool("kubectl", append(slices.Clone(tc.applied), "--validate=strict", "-k", base)...)
			got := c.tool("kubectl", "get", "daemonset", "--namespace=kube-flannel", "kube-flannel-ds",
				`--output=jsonpath={range .spec.template.spec['initContainers','containers'][*]}{.command}{.args}{"\n"}{end}`)
			const want = `["/opt/bin/install-conf"]["/flannel","/opt/cni/bin/flannel"]
["/opt/bin/install-conf"]["/etc/kube-flannel/cni-conf.json","/etc/cni/net.d/10-flannel.conflist"]
["/opt/bin/flanneld"]["--healthz-ip=127.0.0.1","--ip-masq","--kube-subnet-mgr","--probe","--healthz-port=8081"]
`
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("commands of the containers (-want +got):\n%s", diff)
			}
			for _, where := range []string{"default", "kube-flannel"} {
				got := c.tool("kubectl", "get", "role", "--namespace="+where, "--output=name")
				if (got != "") != (where == "default") {
					t.Errorf("roles in namespace %s: %q, want some in default only", where, got)
				}
			}
			c.tool("kubectl", append(tc.applied, "-f", old)...)
			if diff := cmp.Diff(before, what()); diff != "" {
				t.Errorf("role and pods after going back to flannel (-before +after):\n%s", diff)
			}
		})
	}
}

// runBlock runs the commands of a block on a page as an administrator. begins is the text
// with which the block begins.
func (c *cluster) runBlock(page, begins string) {
	c.t.Helper()
	command := pageBlock(c.t, page, begins)
	out, err := c.Host(1).Exec(testContext(c.t), "env", "HOME="+c.dir, "PATH="+repository(c.t, "bin/tools")+":/usr/bin:/bin",
		"KUBECONFIG="+c.kubeconfig(1, c.write("admin-token", []byte(adminToken))), "sh", "-ec", "cd "+c.dir+"\n"+command)
	if err != nil {
		c.t.Fatalf("%s: %v: %s", command, err, out)
	}
}

// TestPageKubernetesInstall runs the commands of kubernetes.md, except those that
// remove flanneld, and checks the images and the configuration after them.
//
//stages:rest it needs kubectl and helm, which take minutes to build
func TestPageKubernetesInstall(t *testing.T) {
	t.Parallel()
	const page, name = "kubernetes.md", "registry.example.com/flanneld:v1"
	for how, begins := range map[string]string{"kubectl": "kubectl apply -k .", "helm": "helm install"} {
		t.Run(how, func(t *testing.T) {
			c := newBareCluster(t, lab.Config{Hosts: 1})
			dir := c.dir
			if err := os.Symlink(repository(t, "dist"), filepath.Join(dir, "dist")); err != nil {
				t.Fatal(err)
			}
			overlay := pageBlock(t, page, "# kustomization.yaml")
			if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(overlay), 0o600); err != nil {
				t.Fatal(err)
			}
			typed := func(begins string) {
				t.Helper()
				c.runBlock(page, begins)
			}
			expectImages := func() {
				t.Helper()
				images := c.tool("kubectl", "get", "daemonset", "--namespace=kube-flannel", "kube-flannel-ds",
					"--output=jsonpath={.spec.template.spec['containers','initContainers'][*].image}")
				if want := strings.TrimSpace(strings.Repeat(name+" ", 3)); images != want {
					t.Errorf("the images are %q, want %q", images, want)
				}
			}
			typed(begins)
			expectImages()
			typed("kubectl label namespace")
			expectReconfigured(t, c, how == "helm", func() { // only the chart makes Kubernetes replace the pods
				if how == "helm" {
					c.tool("helm", "upgrade", "flannel", filepath.Join(dir, "dist/kubernetes/chart"), "--namespace=kube-flannel",
						"--reuse-values", "--set=flannel.backend=host-gw")
					return
				}
				changed := strings.Replace(overlay, `"vxlan"`, `"host-gw"`, 1)
				if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(changed), 0o600); err != nil {
					t.Fatal(err)
				}
				typed(begins)
			})
			if how == "helm" {
				typed("helm upgrade")
				expectImages()
				if conf := c.tool("kubectl", "get", "--namespace=kube-flannel", "configmap/kube-flannel-cfg", "--output=yaml"); !strings.Contains(conf, "host-gw") {
					t.Errorf("configuration after the upgrade: %s, want host-gw", conf)
				}
			}
			c.tool("kubectl", "--namespace=kube-flannel", "set", "image", "daemonset/kube-flannel-ds", "*=flannel:old")
			typed("kubectl --namespace=kube-flannel set image")
			expectImages()
		})
	}
}

// expectReconfigured calls change. Afterwards the ConfigMap must contain host-gw. The
// template of the DaemonSet must differ if and only if replaced is true: then Kubernetes
// replaces the pods.
func expectReconfigured(t *testing.T, c *cluster, replaced bool, change func()) {
	t.Helper()
	get := func(what, path string) string {
		t.Helper()
		return c.tool("kubectl", "get", "--namespace=kube-flannel", what, "--output=jsonpath={"+path+"}")
	}
	before := get("daemonset/kube-flannel-ds", ".spec.template")
	change()
	if conf := get("configmap/kube-flannel-cfg", `.data.net-conf\.json`); !strings.Contains(conf, `"host-gw"`) {
		t.Errorf("configuration: %s, want host-gw", conf)
	}
	if after := get("daemonset/kube-flannel-ds", ".spec.template"); (after != before) != replaced {
		t.Errorf("pods replaced = %v, want %v", after != before, replaced)
	}
}

// flannelManifest writes the manifest of a cluster that runs flannel, and returns its path.
// install is the command of the init container that installs the CNI configuration.
func (c *cluster) flannelManifest(install ...string) string {
	c.t.Helper()
	text, err := os.ReadFile("testdata/existing.yaml")
	if err != nil {
		c.t.Fatal(err)
	}
	return c.write("existing.yaml", []byte(strings.Replace(string(text), "[INSTALL]", "["+strings.Join(install, ", ")+"]", 1)))
}

// requests returns the requests of the daemons to the API server, such as "list nodes",
// sorted and without duplicates. If status is not 0, it returns only requests that the API
// server answered with that status.
func (c *cluster) requests(status int) []string {
	c.t.Helper()
	text, err := os.ReadFile(filepath.Join(c.dir, auditLog))
	if err != nil {
		c.t.Fatal(err)
	}
	var asked []string
	for line := range strings.Lines(string(text)) {
		var entry struct {
			Verb           string
			ObjectRef      struct{ Resource, Subresource string }
			ResponseStatus struct{ Code int }
		}
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			continue // the API server is still writing this line
		}
		if status == 0 || entry.ResponseStatus.Code == status {
			resource := strings.TrimSuffix(entry.ObjectRef.Resource+"/"+entry.ObjectRef.Subresource, "/")
			asked = append(asked, entry.Verb+" "+resource)
		}
	}
	slices.Sort(asked)
	return slices.Compact(asked)
}

// refused returns what the API server has refused, as requests does. The log has a request only a moment
// after its answer, so refused waits for the first.
func (c *cluster) refused() (got []string) {
	c.t.Helper()
	eventually(c.t, "refused request", func() error {
		if got = c.requests(http.StatusForbidden); len(got) == 0 {
			return errors.New("there is none")
		}
		return nil
	})
	return got
}

// errorLines returns the lines that the daemon logged as errors.
func errorLines(d *lab.Daemon) []string {
	var lines []string
	for line := range strings.Lines(d.Log()) {
		if strings.HasPrefix(line, "E") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

// revokeVerb removes a verb on a resource from a role, and waits until the API server
// refuses it. restore adds the verb again, and waits until the API server allows it. role
// is the path of the role below the API group.
func (c *cluster) revokeVerb(role, resource, verb string) (restore func()) {
	c.t.Helper()
	type rule struct {
		APIGroups []string `json:"apiGroups"`
		Resources []string `json:"resources"`
		Verbs     []string `json:"verbs"`
	}
	path := "/apis/rbac.authorization.k8s.io/v1/" + role
	var have, less struct {
		Rules []rule `json:"rules"`
	}
	if err := json.Unmarshal(c.do(http.MethodGet, path, nil, ""), &have); err != nil {
		c.t.Fatal(err)
	}
	for _, r := range have.Rules {
		if slices.Contains(r.Resources, resource) {
			r.Verbs = slices.DeleteFunc(slices.Clone(r.Verbs), func(v string) bool { return v == verb })
		}
		if len(r.Verbs) > 0 {
			less.Rules = append(less.Rules, r)
		}
	}
	c.expectAllowed(verb, resource, true)
	c.do(http.MethodPatch, path, less, "application/merge-patch+json")
	c.expectAllowed(verb, resource, false)
	return func() {
		c.do(http.MethodPatch, path, have, "application/merge-patch+json")
		c.expectAllowed(verb, resource, true)
	}
}

// expectAllowed waits until the API server allows the daemons a verb on a resource, or
// refuses it if want is false. The API server needs a moment to notice a changed role.
func (c *cluster) expectAllowed(verb, resource string, want bool) {
	c.t.Helper()
	name, sub, _ := strings.Cut(resource, "/")
	attributes := map[string]any{"verb": verb, "resource": name, "subresource": sub}
	switch name {
	case "events":
		attributes["namespace"] = "default"
	case "networkpolicies":
		attributes["group"] = "networking.k8s.io"
	}
	eventually(c.t, "role", func() error {
		raw := c.do(http.MethodPost, "/apis/authorization.k8s.io/v1/subjectaccessreviews", map[string]any{
			"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
			"spec": map[string]any{"user": flannelUser, "resourceAttributes": attributes},
		}, "")
		var review struct{ Status struct{ Allowed bool } }
		if err := json.Unmarshal(raw, &review); err != nil {
			return err
		}
		if review.Status.Allowed != want {
			return fmt.Errorf("%s %s allowed: %v", verb, resource, review.Status.Allowed)
		}
		return nil
	})
}

// addPolicy adds a NetworkPolicy in the namespace default.
func (c *cluster) addPolicy() {
	c.t.Helper()
	c.do(http.MethodPost, "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies", map[string]any{
		"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
		"metadata": map[string]any{"name": "nobody"}, "spec": map[string]any{"podSelector": map[string]any{}},
	}, "")
}

// TestKubeNetworkPolicies checks that a daemon logs an error if there are NetworkPolicies,
// because it does not enforce them. If there are none, the daemon must log no error.
//
//stages:rest it needs kubectl, which takes minutes to build
func TestKubeNetworkPolicies(t *testing.T) {
	t.Parallel()
	c := newBareCluster(t, lab.Config{Hosts: 1})
	c.install("-k", "dist/kubernetes/base")
	c.startDaemons()
	expectStop(t, c.Host(1).Daemon())
	if got := errorLines(c.Host(1).Daemon()); len(got) > 0 {
		t.Errorf("errors without NetworkPolicies: %q, want none", got)
	}
	c.addPolicy()
	d := start(t, c.Host(1), c.options(1))
	expectLog(t, d, `there are NetworkPolicies, and flanneld does not enforce them: without another program that does they have no effect" example="default/nobody"`)
	c.ready()
}

// TestKubeRole checks that the shipped roles allow what the daemon needs and nothing else.
// If one of their verbs is missing, the daemon must go on without the work that needs it.
// When the verb is allowed again, the daemon must do this work without a restart.
//
//stages:rest it needs kubectl, which takes minutes to build
func TestKubeRole(t *testing.T) {
	t.Parallel()
	const role = "clusterroles/flannel"
	t.Run("every verb is used", func(t *testing.T) {
		t.Parallel()
		c := newBareCluster(t, lab.Config{Hosts: 1})
		c.install("-k", "dist/kubernetes/base")
		c.startDaemons()
		c.addHostile(112)
		eventually(t, "requests", func() error {
			want := []string{"create events", "list networkpolicies", "list nodes", "patch nodes/status", "watch nodes"}
			if diff := cmp.Diff(want, c.requests(0)); diff != "" {
				return fmt.Errorf("(-want +got):\n%s", diff)
			}
			return nil
		})
	})
	for _, tc := range []struct {
		role, resource, verb string
		missed               func(c *cluster) // checks that the daemon does not do the work without the verb
		done                 func(c *cluster) // checks that the daemon does the work with the verb
	}{
		{role, "nodes", "list", (*cluster).notReady, func(c *cluster) {
			c.ready()
			c.addNode(101, c.peerAnnotations(101))
			expectKernel(c.t, c.Host(1), c.peerEntries(101), nil)
		}},
		{role, "nodes", "watch", func(c *cluster) {
			expectLog(c.t, c.Host(1).Daemon(), `cannot watch resource \"nodes\"`)
		}, func(c *cluster) {
			expectLog(c.t, c.Host(1).Daemon(), "is usable again")
			c.addNode(101, c.peerAnnotations(101))
			expectKernel(c.t, c.Host(1), c.peerEntries(101), nil)
		}},
		{role, "nodes/status", "patch", func(c *cluster) {
			expectLog(c.t, c.Host(1).Daemon(), `cannot patch resource \"nodes/status\"`)
			if n := c.node(1); n.annotation("public-ip") != "" || n.networkUnavailable() != "" {
				c.t.Errorf("patched without permission: %+v", n)
			}
		}, func(c *cluster) {
			c.ready()
			c.expectNodeCondition(1, "False")
		}},
		{role, "networkpolicies", "list", func(c *cluster) {
			c.addPolicy()
			c.refused()
			c.ready()
			if got := errorLines(c.Host(1).Daemon()); len(got) > 0 {
				c.t.Errorf("errors in the log: %q, want none", got)
			}
		}, (*cluster).ready},
		{"namespaces/default/roles/flannel-events", "events", "create", func(c *cluster) {
			c.ready()
			c.addHostile(111)
			c.refused()
			if got := c.events(1); len(got) > 0 {
				c.t.Errorf("Events created without permission: %q", got)
			}
		}, func(c *cluster) {
			c.addHostile(112)
			eventually(c.t, "event", func() error {
				if got := c.events(1); !slices.ContainsFunc(got, func(e string) bool { return strings.Contains(e, nodeName(112)) }) {
					return fmt.Errorf("events are %q", got)
				}
				return nil
			})
		}},
	} {
		t.Run(tc.verb+" "+strings.ReplaceAll(tc.resource, "/", " "), func(t *testing.T) {
			t.Parallel()
			c := newBareCluster(t, lab.Config{Hosts: 1})
			c.install("-k", "dist/kubernetes/base")
			restore := c.revokeVerb(tc.role, tc.resource, tc.verb)
			d := start(t, c.Host(1), c.options(1))
			tc.missed(c)
			if got, want := c.refused(), tc.verb+" "+tc.resource; !slices.Equal(got, []string{want}) {
				t.Errorf("refused requests: %q, want only %s", got, want)
			}
			restore()
			tc.done(c)
			if err := d.Ended(); err != nil {
				t.Error(err)
			}
		})
	}
}

func (c *cluster) ready() {
	c.t.Helper()
	expectReady(c.t, c.Host(1).Daemon())
}

// notReady waits until the daemon on host 1 logs that a request is forbidden, and checks
// that it is not ready then.
func (c *cluster) notReady() {
	c.t.Helper()
	d := c.Host(1).Daemon()
	expectLog(c.t, d, "is forbidden")
	if status, _, err := d.Get(testContext(c.t), "/readyz"); err == nil {
		c.t.Errorf("/readyz answers %d without permission, want an error", status)
	}
}

// addHostile adds Node n, which claims the subnet of host 1, and waits until the daemon on
// host 1 refuses it.
func (c *cluster) addHostile(n int) {
	c.t.Helper()
	c.addNodeWith(n, c.peerAnnotations(n), c.podCIDRs(1)...)
	eventually(c.t, "refusal", func() error {
		for _, line := range linesWith(c.Host(1).Daemon(), "lease refused") {
			if strings.Contains(line, nodeName(n)) {
				return nil
			}
		}
		return fmt.Errorf("%s is not refused", nodeName(n))
	})
}
