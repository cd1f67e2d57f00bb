// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// cluster is a lab whose store is a Kubernetes API server. The API server runs on the router. It
// stores its data in the lab's etcd, or in the other etcd that newClusterOn starts.
type cluster struct {
	*lab.Lab
	t       *testing.T
	dir     string
	api     *lab.APIServer
	client  *http.Client
	backend string
	server  string // the key cluster of the kubeconfigs as JSON; empty for the API server itself
}

const (
	adminToken   = "admin-token"
	flannelToken = "flannel-token"
	flannelUser  = "system:serviceaccount:kube-flannel:flannel"
	nodesPath    = "/api/v1/nodes"
	auditLog     = "audit.log" // file of the requests that the daemons send
)

// newCluster builds a cluster with a Node for every host. It does not start daemons.
func newCluster(t *testing.T, cfg lab.Config, backend string) *cluster {
	t.Helper()
	return newClusterOn(t, cfg, backend, "")
}

// newClusterOn builds a cluster whose API server stores its data in another etcd. The argument etcd is
// the path of its program. If it is empty, the API server uses the lab's own etcd.
func newClusterOn(t *testing.T, cfg lab.Config, backend, etcd string) *cluster {
	t.Helper()
	c := &cluster{Lab: newLab(t, cfg, ""), t: t, dir: t.TempDir(), backend: backend}
	network, err := lab.NetworkConfig(c.Families(), json.RawMessage(backend))
	if err != nil {
		t.Fatal(err)
	}
	c.write("net-conf.json", network)
	store := ""
	if etcd != "" {
		store = c.startEtcd(etcd)
	}
	c.startAPI(store)
	c.addFlannelRole()
	for i := range c.Hosts() {
		c.addNode(i+1, nil)
	}
	return c
}

func (c *cluster) write(name string, text []byte) string {
	c.t.Helper()
	path := filepath.Join(c.dir, name)
	if err := writeProgram(path, text, 0o600); err != nil {
		c.t.Fatal(err)
	}
	return path
}

// startEtcd runs another etcd on the router until the test ends, in addition to the lab's own, and
// returns its URL. program is the path of its program.
func (c *cluster) startEtcd(program string) string {
	c.t.Helper()
	const client, peer = "http://127.0.0.1:12379", "http://127.0.0.1:12380"
	log, err := os.Create(filepath.Join(c.dir, "etcd.log"))
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(
		program, "--data-dir=/var/lib/other-etcd", "--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer,
	)
	cmd.Stdout, cmd.Stderr = log, log
	if err := c.Underlay().Start(cmd); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if text, _ := os.ReadFile(log.Name()); c.t.Failed() {
			c.t.Logf("etcd:\n%s", text)
		}
	})
	return client
}

// startAPI starts the API server with an audit log of the daemons' requests. etcd is the URL of its
// store, or empty for the lab's etcd.
func (c *cluster) startAPI(etcd string) {
	c.t.Helper()
	binary, err := filepath.Abs("../../bin/tools/kube-apiserver")
	if err != nil {
		c.t.Fatal(err)
	}
	audit := c.write("audit.yaml", fmt.Appendf(nil, `{"apiVersion":"audit.k8s.io/v1","kind":"Policy","omitStages":["RequestReceived"],
"rules":[{"level":"Metadata","users":[%q]},{"level":"None"}]}`, flannelUser))
	tokens := []string{adminToken + ",admin,admin,system:masters", flannelToken + "," + flannelUser + ",flannel-uid"}
	for i := range c.Hosts() { // of the kubelets
		tokens = append(tokens, nodeName(i+1)+",system:node:"+nodeName(i+1)+","+nodeName(i+1)+",system:nodes")
	}
	c.starting(func(ctx context.Context) error {
		c.api, err = c.StartAPIServer(ctx, lab.APIServerOptions{
			Path: binary, Tokens: tokens,
			Args: []string{"--audit-policy-file=" + audit, "--audit-log-path=" + filepath.Join(c.dir, auditLog), "--audit-log-mode=blocking"},
			Etcd: etcd,
		})
		return err
	})
	transport := c.api.Transport(c.Underlay())
	transport.DisableKeepAlives = true
	c.client = &http.Client{Timeout: 20 * time.Second, Transport: transport}
}

// start starts the API server again after kill.
func (c *cluster) start() {
	c.t.Helper()
	c.starting(c.api.Start)
}

// apiServerStarts lets two API servers start at the same time. A start takes six seconds of CPU time.
// If many started at once, they would take longer than a test waits.
var apiServerStarts = make(chan struct{}, 2)

// starting waits until apiServerStarts has room and calls start, which starts an API server. The test
// fails if start returns an error.
func (c *cluster) starting(start func(context.Context) error) {
	c.t.Helper()
	apiServerStarts <- struct{}{}
	defer func() { <-apiServerStarts }()
	if err := start(testContext(c.t)); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) kill() { c.api.Kill() }

func (c *cluster) try(method, path string, body any, contentType string) (int, []byte, error) {
	return c.tryAs(adminToken, method, path, body, contentType)
}

func (c *cluster) tryAs(token, method, path string, body any, contentType string) (int, []byte, error) {
	raw, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	req, err := http.NewRequestWithContext(c.t.Context(), method, "https://"+c.api.Addr(nil).String()+path, bytes.NewReader(raw))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	if contentType == "" {
		contentType = "application/json"
	}
	req.Header.Set("Content-Type", contentType)
	resp, err := c.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}

func (c *cluster) do(method, path string, body any, contentType string) []byte {
	c.t.Helper()
	status, answer, err := c.try(method, path, body, contentType)
	if err != nil || status >= 300 {
		c.t.Fatalf("%s %s: %d, %v: %s", method, path, status, err, answer)
	}
	return answer
}

// addFlannelRole gives the user of the daemons the ClusterRole of flannel's first manifests, and the
// permission to create Events.
func (c *cluster) addFlannelRole() {
	rule := func(resource string, verbs ...string) map[string]any {
		return map[string]any{"apiGroups": []string{""}, "resources": []string{resource}, "verbs": verbs}
	}
	const rbac = "/apis/rbac.authorization.k8s.io/v1/"
	c.do(http.MethodPost, rbac+"clusterroles", map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": map[string]any{"name": "flannel"},
		"rules": []any{
			rule("pods", "get"), rule("nodes", "list", "watch"), rule("nodes/status", "patch"), rule("events", "create"),
		},
	}, "")
	c.do(http.MethodPost, rbac+"clusterrolebindings", map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": map[string]any{"name": "flannel"},
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "flannel"},
		"subjects": []any{map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": flannelUser}},
	}, "")
}

// podCIDRs returns the podCIDRs of Node n in the families of the lab. If n is even, IPv6
// comes first, because Kubernetes allows both orders.
func (c *cluster) podCIDRs(n int) []string {
	var cidrs []string
	if slices.Contains(c.Families(), prefix.IPv4) {
		cidrs = append(cidrs, fmt.Sprintf("10.5.%d.0/24", n))
	}
	if slices.Contains(c.Families(), prefix.IPv6) {
		cidrs = append(cidrs, fmt.Sprintf("fd00:5:0:%x::/64", n)) // lab.PodNetwork
	}
	if n%2 == 0 {
		slices.Reverse(cidrs)
	}
	return cidrs
}

func nodeName(n int) string { return fmt.Sprintf("node%d", n) }

// addNode creates Node n with its podCIDRs.
func (c *cluster) addNode(n int, annotations map[string]string) {
	c.t.Helper()
	c.addNodeWith(n, annotations, c.podCIDRs(n)...)
}

func (c *cluster) addNodeWith(n int, annotations map[string]string, cidrs ...string) {
	c.t.Helper()
	spec := map[string]any{}
	if len(cidrs) > 0 {
		spec = map[string]any{"podCIDR": cidrs[0], "podCIDRs": cidrs}
	}
	c.do(http.MethodPost, nodesPath, map[string]any{
		"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": nodeName(n), "annotations": annotations}, "spec": spec,
	}, "")
}

func (c *cluster) deleteNode(n int) {
	c.t.Helper()
	c.do(http.MethodDelete, nodesPath+"/"+nodeName(n), nil, "")
}

// annotate changes annotations of Node n. The keys are names without flannel's prefix. A nil value
// removes an annotation.
func (c *cluster) annotate(n int, annotations map[string]any) {
	c.t.Helper()
	full := map[string]any{}
	for name, value := range annotations {
		full[annotation(name)] = value
	}
	c.do(http.MethodPatch, nodesPath+"/"+nodeName(n), map[string]any{"metadata": map[string]any{"annotations": full}}, "application/merge-patch+json")
}

func annotation(name string) string { return "flannel.alpha.coreos.com/" + name }

// kubeNode contains the fields of a Node that tests read.
type kubeNode struct {
	Metadata struct {
		Name        string
		UID         string
		Annotations map[string]string
	}
	Status struct {
		Conditions []struct{ Type, Status, Reason, Message string }
	}
}

func (n kubeNode) annotation(name string) string { return n.Metadata.Annotations[annotation(name)] }

func (n kubeNode) networkUnavailable() string {
	for _, one := range n.Status.Conditions {
		if one.Type == "NetworkUnavailable" {
			return one.Status
		}
	}
	return ""
}

func (c *cluster) node(n int) kubeNode {
	c.t.Helper()
	var node kubeNode
	if err := json.Unmarshal(c.do(http.MethodGet, nodesPath+"/"+nodeName(n), nil, ""), &node); err != nil {
		c.t.Fatal(err)
	}
	return node
}

// events returns the Events about Node n, each as its reason and its message.
func (c *cluster) events(n int) []string {
	c.t.Helper()
	var list struct {
		Items []struct {
			Reason, Message string
			InvolvedObject  struct{ Name string }
		}
	}
	if err := json.Unmarshal(c.do(http.MethodGet, "/api/v1/namespaces/default/events", nil, ""), &list); err != nil {
		c.t.Fatal(err)
	}
	var messages []string
	for _, e := range list.Items {
		if e.InvolvedObject.Name == nodeName(n) {
			messages = append(messages, e.Reason+": "+e.Message)
		}
	}
	return messages
}

// options returns the options of a daemon on host n, with args at the end of its flags. It also writes
// the kubeconfig of this daemon, and its token file if that does not exist yet.
func (c *cluster) options(n int, args ...string) lab.FlanneldOptions {
	c.t.Helper()
	token := filepath.Join(c.dir, fmt.Sprintf("token%d", n))
	if _, err := os.Stat(token); err != nil {
		c.write(filepath.Base(token), []byte(flannelToken))
	}
	return lab.FlanneldOptions{
		Args: append([]string{
			"--kube-subnet-mgr", "--kubeconfig-file=" + c.kubeconfig(n, token), "--net-config-path=" + filepath.Join(c.dir, "net-conf.json"),
		}, args...),
		Env: []string{"NODE_NAME=" + nodeName(n)},
	}
}

func (c *cluster) kubeconfig(n int, token string) string {
	server := c.server
	if server == "" {
		server = fmt.Sprintf(`{"server":"https://%s","certificate-authority":%q}`, c.api.Addr(c.Host(n)), c.api.CA())
	}
	return c.write(fmt.Sprintf("kubeconfig%d", n), fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Config","current-context":"c",
"clusters":[{"name":"c","cluster":%s}],
"users":[{"name":"u","user":{"tokenFile":%q}}],"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}]}`, server, token))
}

// startDaemons starts a daemon on every host and waits until all are ready. Then it adds a pod on
// every host.
func (c *cluster) startDaemons(args ...string) {
	c.t.Helper()
	for n := 1; n <= len(c.Hosts()); n++ {
		start(c.t, c.Host(n), c.options(n, args...))
	}
	for _, h := range c.Hosts() {
		expectReady(c.t, h.Daemon())
	}
	if err := c.AddPods(testContext(c.t)); err != nil {
		c.t.Fatal(err)
	}
}
