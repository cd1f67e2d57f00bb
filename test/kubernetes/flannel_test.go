// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

const version = "test" // tag of the daemon's image

// flannelImage builds the archive with the daemon's image by `make image`, and returns its path.
func flannelImage(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "flanneld.tar")
	build := exec.CommandContext(t.Context(), "make", "--no-print-directory", "image", "ARCHIVE="+file, "VERSION="+version, "BIN="+filepath.Join(dir, "bin"))
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("make image: %v: %s", err, out)
	}
	return file
}

// install is a way to install the daemon. All of them use the image that the test has imported.
type install int

const (
	byKubectl install = iota
	byHelm
	existing       // the manifest of a cluster that runs flannel, with the image replaced
	existingCopies // another such manifest, whose init containers call cp
)

// shipped reports whether the manifests are those of this repository. With them the state
// outlives the pod, and the role allows all requests of the daemon.
func (i install) shipped() bool { return i == byKubectl || i == byHelm }

func (c *cluster) installFlannel(i install) {
	c.t.Helper()
	c.installed, c.auditedBefore = i, len(c.audit())
	switch i {
	case byKubectl:
		c.installBase()
	case byHelm:
		c.installChart()
	case existing:
		c.exchangeImage("/opt/bin/install-conf")
	case existingCopies:
		c.exchangeImage("cp, -f")
	}
}

// installBase applies the base manifests through an overlay, as
// Documentation/kubernetes.md shows.
func (c *cluster) installBase() {
	c.t.Helper()
	if err := os.CopyFS(filepath.Join(c.dir, "dist/kubernetes/base"), os.DirFS("../../dist/kubernetes/base")); err != nil {
		c.t.Fatal(err)
	}
	network, err := json.Marshal(map[string]any{
		"Network": networksOf(prefix.IPv4).pods, "Backend": map[string]any{"Type": c.backend}, "EnableNFTables": c.nftables,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.write("kustomization.yaml", fmt.Sprintf(`resources: [dist/kubernetes/base]
images: [{name: flanneld, newTag: %s}]
patches:
  - patch: |-
      apiVersion: v1
      kind: ConfigMap
      metadata: {name: kube-flannel-cfg, namespace: kube-flannel}
      data: {net-conf.json: '%s'}
`, version, network))
	c.kubectl("apply", "-k", c.dir)
}

func (c *cluster) installChart() {
	c.t.Helper()
	network := map[prefix.Family]string{}
	for _, f := range c.families {
		network[f] = networksOf(f).pods.String()
	}
	chart, err := filepath.Abs("../../dist/kubernetes/chart")
	if err != nil {
		c.t.Fatal(err)
	}
	c.onRouter("env", c.access(), "HOME="+c.dir, tool(c.t, "helm"), "install", "flannel", chart, "--namespace=kube-flannel", "--create-namespace",
		"--set=podCidr="+network[prefix.IPv4], "--set=podCidrv6="+network[prefix.IPv6], "--set=flannel.image.tag="+version,
		"--set=flannel.backend="+c.backend, fmt.Sprintf("--set=flannel.enableNFTables=%v", c.nftables))
	c.kubectl("label", "namespace", "kube-flannel", "pod-security.kubernetes.io/enforce=privileged")
}

// exchangeImage applies a manifest of flannel and replaces its image. installs is the command of
// the init containers, as a YAML list without its brackets.
func (c *cluster) exchangeImage(installs string) {
	c.t.Helper()
	text, err := os.ReadFile("../e2e/testdata/existing.yaml")
	if err != nil {
		c.t.Fatal(err)
	}
	c.apply("existing", strings.NewReplacer("[INSTALL]", "["+installs+"]", "10.5.0.0/16", networksOf(prefix.IPv4).pods.String(),
		`"vxlan"`, fmt.Sprintf("%q", c.backend), `"EnableNFTables": false`, fmt.Sprintf(`"EnableNFTables": %v`, c.nftables)).Replace(string(text)))
	c.kubectl("--namespace=kube-flannel", "set", "image", "daemonset/kube-flannel-ds", "*=flanneld:"+version)
}

// expectNodesReady waits until the daemon's pods and all nodes are ready. Without the network a
// node is not ready.
func (c *cluster) expectNodesReady() {
	c.t.Helper()
	c.kubectl("rollout", "status", "--namespace=kube-flannel", "daemonset/kube-flannel-ds", "--timeout="+patience.String())
	c.kubectl("wait", "nodes", "--all", "--for=condition=Ready", "--timeout="+patience.String())
	for _, n := range c.nodes {
		eventually(c.t, "condition of "+n.Name(), func(ctx context.Context) error {
			out, err := c.try(ctx, "get", "node", n.Name(), `--output=jsonpath={.status.conditions[?(@.type=="NetworkUnavailable")].status}`)
			if err == nil && out != "False" {
				err = fmt.Errorf("NetworkUnavailable is %q", out)
			}
			return err
		})
	}
}

// expectInOrder checks status, leases and log of every daemon, the state and the rules on every
// node, and that the role allows all requests. With manifests of flannel, one request must be
// refused.
func (c *cluster) expectInOrder() {
	c.t.Helper()
	pods := strings.Fields(c.kubectl("get", "pods", "--namespace=kube-flannel", "--output=jsonpath={.items[*].metadata.name}"))
	if len(pods) != len(c.nodes) {
		c.t.Errorf("pods of the daemon on %d nodes: %q", len(c.nodes), pods)
	}
	for _, pod := range pods {
		flannelctl := func(args ...string) string {
			c.t.Helper()
			return c.kubectl(append([]string{"exec", "--namespace=kube-flannel", pod, "--container=kube-flannel", "--", "flannelctl"}, args...)...)
		}
		if out := flannelctl("status"); !strings.Contains(out, fmt.Sprintf("%d in place", len(c.nodes)-1)) {
			c.t.Errorf("%s: status is %s", pod, out)
		}
		if out := flannelctl("leases", "--kube-subnet-mgr"); strings.Count(out, "\n") != len(c.nodes) { // a heading and a line for each node; the last newline is trimmed
			c.t.Errorf("%s: leases are %s", pod, out)
		}
		for line := range strings.Lines(c.kubectl("logs", "--namespace=kube-flannel", pod)) {
			if strings.HasPrefix(line, "E") {
				c.t.Errorf("%s: %s", pod, line)
			}
		}
	}
	for i, n := range c.nodes {
		kept, err := filepath.Glob(n.Path("/var/lib/flannel/*.json"))
		if err != nil || (len(kept) > 0) != c.installed.shipped() {
			c.t.Errorf("%s: state on the node is %q, %v", n.Name(), kept, err)
		}
		program := map[prefix.Family]string{prefix.IPv4: "iptables-", prefix.IPv6: "ip6tables-"}[c.families[0]] + variant(i) + "-save"
		if rules := n.run(program); !c.nftables && !strings.Contains(strings.ToLower(rules), "flannel") {
			c.t.Errorf("%s: no rules of the daemon in %s, which kube-proxy uses: %s", n.Name(), program, rules)
		}
	}
	want := ""
	if !c.installed.shipped() { // the daemon sends this request only to print a warning
		want = "list networkpolicies"
	}
	if got := c.refused(); strings.Join(got, ", ") != want {
		c.t.Errorf("asked for more than the role allows: %q, want %q", got, want)
	}
}

// daemonPod returns the name of flanneld's pod on a node.
func (c *cluster) daemonPod(n *node) string {
	c.t.Helper()
	return c.kubectl("get", "pods", "--namespace=kube-flannel", "--selector=app=flannel", "--field-selector=spec.nodeName="+n.Name(),
		"--output=jsonpath={.items[0].metadata.name}")
}

// audit returns the API server's log of the daemons' requests, from the start of the cluster on.
// It is empty before the first request.
func (c *cluster) audit() string {
	c.t.Helper()
	text, err := os.ReadFile(filepath.Join(c.dir, auditLog))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // no error before the first request
		c.t.Fatal(err)
	}
	return string(text)
}

// refused returns the kinds of request that the API server has refused to the daemons since the
// last installation, sorted and each once.
func (c *cluster) refused() []string {
	c.t.Helper()
	var refused []string
	for line := range strings.Lines(c.audit()[c.auditedBefore:]) {
		var entry struct {
			Verb           string
			ObjectRef      struct{ Resource string }
			ResponseStatus struct{ Code int }
		}
		if err := json.Unmarshal([]byte(line), &entry); err == nil && entry.ResponseStatus.Code == http.StatusForbidden { // the last line may be incomplete
			refused = append(refused, entry.Verb+" "+entry.ObjectRef.Resource)
		}
	}
	slices.Sort(refused)
	return slices.Compact(refused)
}

// takeOut removes flanneld, and everything that it has left on the nodes, with the commands on
// the page Documentation/kubernetes.md. It checks that nothing is left.
func (c *cluster) takeOut() {
	c.t.Helper()
	switch c.installed {
	case byHelm:
		c.onRouter("env", c.access(), "HOME="+c.dir, tool(c.t, "helm"), "uninstall", "flannel", "--namespace=kube-flannel", "--wait")
	default:
		c.kubectl("delete", "-k", c.dir)
	}
	c.typed("kubectl create namespace flannel-cleanup")
	c.typed("for node in")
	c.kubectl("wait", "pods", "--namespace=flannel-cleanup", "--all", "--for=jsonpath={.status.phase}=Succeeded", "--timeout="+patience.String())
	for _, n := range c.nodes {
		left := n.run("sh", "-c", `ip -o link 2>/dev/null | grep flannel # it warns about peers in other namespaces
			ip route show proto 98; ip -6 route show proto 98
			{ iptables-save; ip6tables-save; iptables-legacy-save; ip6tables-legacy-save; nft list ruleset; } 2>&1 |
				grep -i flannel | grep -v kube-flannel/flannel-connectivity # kube-proxy removes chains of deleted Services later
			ls /run/flannel/*.env /var/lib/flannel/* /var/lib/node/disk/etc/cni/net.d/* 2>/dev/null || :`)
		if left != "" {
			c.t.Errorf("left on %s:\n%s", n.Name(), left)
		}
	}
	c.typed("kubectl annotate nodes")
	if notes := c.kubectl("get", "nodes", "--output=jsonpath={.items[*].metadata.annotations}"); strings.Contains(notes, "flannel.alpha.coreos.com") {
		c.t.Errorf("annotations are left: %s", notes)
	}
}

// typed runs the commands of a block on the installation page on the router. The block is the
// first one that starts with the text in begins. typed replaces the image in the commands by the
// imported one.
func (c *cluster) typed(begins string) {
	c.t.Helper()
	c.shell(block(c.t, "kubernetes.md", begins))
}

// shell runs commands of a page on the router, with the imported image.
func (c *cluster) shell(commands string) {
	c.t.Helper()
	commands = strings.ReplaceAll(commands, "registry.example.com/flanneld:v1", "flanneld:"+version)
	path := "PATH=" + filepath.Dir(tool(c.t, "kubectl")) + ":" + os.Getenv("PATH")
	c.onRouter("env", c.access(), path, "HOME="+c.dir, "sh", "-ec", "cd "+c.dir+"\n"+commands)
}

// block returns the first block of a page that begins with the text begins, up to an empty line.
func block(t *testing.T, page, begins string) string {
	t.Helper()
	text, err := os.ReadFile("../../Documentation/" + page)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "\n\n    "+begins)
	if !found {
		t.Fatalf("%s shows no %s", page, begins)
	}
	lines, _, _ := strings.Cut(rest, "\n\n")
	return begins + strings.ReplaceAll(lines, "\n    ", "\n")
}

// followTutorial puts the pods of the tutorial on the nodes, and lets each ping all others, also while the
// daemons' pods are replaced.
func (c *cluster) followTutorial() {
	c.t.Helper()
	const page = "tutorial-kubernetes.md"
	c.write("hello.yaml", strings.Replace(block(c.t, page, "# hello.yaml"), "flanneld:v1", "flanneld:"+version, 1))
	c.shell(block(c.t, page, "kubectl apply -f hello.yaml"))
	everyPod := block(c.t, page, "for from in")
	c.shell(everyPod)
	c.shell(block(c.t, page, "kubectl delete pods --namespace=kube-flannel"))
	c.shell(everyPod)
	c.shell(block(c.t, page, "kubectl delete -f hello.yaml"))
	c.expectNodesReady()
}

func installPage(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile("../../Documentation/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(page)
}

// installDNS installs the cluster's DNS, which Kubernetes' tests use, and waits until it is
// ready.
func (c *cluster) installDNS() {
	c.t.Helper()
	policy := "SingleStack"
	if len(c.families) > 1 {
		policy = "RequireDualStack"
	}
	text, err := os.ReadFile("dns.yaml")
	if err != nil {
		c.t.Fatal(err)
	}
	c.apply("dns", strings.NewReplacer("$IMAGE", registry+"/dns:test", "$POLICY", policy,
		"$ADDRESS", networksOf(c.families[0]).dns.String()).Replace(string(text)))
	c.kubectl("rollout", "status", "--namespace=kube-system", "deployment/dns", "--timeout="+patience.String())
}
