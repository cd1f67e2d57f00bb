// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// The address families of a cluster.
var (
	v4   = []prefix.Family{prefix.IPv4}
	v6   = []prefix.Family{prefix.IPv6}
	dual = []prefix.Family{prefix.IPv4, prefix.IPv6}
)

// networks are the address ranges of one family in a cluster.
type networks struct {
	pods, services netip.Prefix
	first, dns     netip.Addr // addresses of two Services: the API server, and the DNS
}

func networksOf(f prefix.Family) networks {
	if f == prefix.IPv4 {
		return networks{
			netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.96.0.0/16"),
			netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.96.0.10"),
		}
	}
	return networks{
		netip.MustParsePrefix("fd00:244::/56"), netip.MustParsePrefix("fd00:96::/112"),
		netip.MustParseAddr("fd00:96::1"), netip.MustParseAddr("fd00:96::a"),
	}
}

type config struct {
	nodes    int
	families []prefix.Family
	backend  string // Type of the backend
	nftables bool   // whether the rules of the daemon and of kube-proxy are those of nftables
}

// join calls its parameter, the function of, for each family of the cluster. It returns the
// results with commas between them.
func (c config) join(of func(prefix.Family) string) string {
	var all []string
	for _, f := range c.families {
		all = append(all, of(f))
	}
	return strings.Join(all, ",")
}

func (c config) podNetworks() string {
	return c.join(func(f prefix.Family) string { return networksOf(f).pods.String() })
}

func (c config) serviceNetworks() string {
	return c.join(func(f prefix.Family) string { return networksOf(f).services.String() })
}

// cluster is a control plane on the lab's router, and nodes.
type cluster struct {
	config
	t     *testing.T
	lab   *lab.Lab
	api   *lab.APIServer
	dir   string
	nodes []*node

	installed     install // the last way in which flanneld was installed
	auditedBefore int     // length of the audit log before that installation
}

// clusters contains the open clusters of this run, so that an interrupted run can close them.
var clusters registered

type registered struct {
	mu  sync.Mutex
	all []*cluster
}

func (r *registered) add(c *cluster) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, c)
}

func (r *registered) remove(c *cluster) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = slices.DeleteFunc(r.all, func(d *cluster) bool { return d == c })
}

// closeAll closes all clusters at the end of the run. It keeps the lock: so a test of an
// interrupted run blocks in add, and starts no further cluster.
func (r *registered) closeAll() error {
	r.mu.Lock()
	var errs []error
	for _, c := range r.all {
		errs = append(errs, c.close())
		c.lab.Close()
	}
	return errors.Join(errs...)
}

const (
	admin    = "admin" // token and name of the administrator
	auditLog = "audit.json"
	outside  = 8080 // port of a server on the router, which is outside of the cluster
)

// newCluster starts a cluster without flanneld, and imports the images in archives on all
// nodes. The end of the test closes the cluster.
func newCluster(t *testing.T, cfg config, archives ...string) *cluster {
	t.Helper()
	if _, err := os.Stat("/proc/sys/net/bridge/bridge-nf-call-iptables"); err != nil {
		t.Fatalf("Services need bridged packets in the rules (modprobe br_netfilter): %v", err)
	}
	l, err := lab.New(background(t), lab.Config{Hosts: cfg.nodes, Families: cfg.families})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	c := &cluster{config: cfg, t: t, lab: l, dir: t.TempDir()}
	clusters.add(c)
	t.Cleanup(func() { clusters.remove(c) })
	c.startAPI()
	kubeconfig := c.kubeconfig(admin)
	c.start("agnhost", "netexec", fmt.Sprintf("--http-port=%d", outside)) // a server outside, for pods
	c.start("kube-controller-manager", "--kubeconfig="+kubeconfig, "--leader-elect=false", "--bind-address=127.0.0.1",
		"--service-account-private-key-file="+c.api.SigningKey(), "--root-ca-file="+c.api.CA(),
		"--allocate-node-cidrs", "--cluster-cidr="+c.podNetworks(), "--service-cluster-ip-range="+c.serviceNetworks())
	c.start("kube-scheduler", "--kubeconfig="+kubeconfig, "--leader-elect=false", "--bind-address=127.0.0.1")
	t.Cleanup(func() {
		if err := c.close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(c.explain)
	for i, h := range l.Hosts() {
		n := c.newNode(h, variant(i))
		c.nodes = append(c.nodes, n)
		n.boot()
	}
	for _, n := range c.nodes {
		for _, file := range archives {
			n.ctr("images", "import", file)
		}
	}
	c.routePods()
	return c
}

// close kills the nodes and removes the cgroups of this run.
func (c *cluster) close() error {
	var errs []error
	for _, n := range c.nodes {
		errs = append(errs, n.kill())
	}
	return errors.Join(append(errs, removeRun())...)
}

func (c *cluster) startAPI() {
	c.t.Helper()
	tokens := []string{admin + ",admin,admin,system:masters", "kube-proxy,system:kube-proxy,kube-proxy"}
	for _, h := range c.lab.Hosts() {
		tokens = append(tokens, fmt.Sprintf("%s,system:node:%[1]s,%[1]s,system:nodes", h.Name()))
	}
	var services []netip.Addr
	for _, f := range c.families {
		services = append(services, networksOf(f).first)
	}
	audit := c.write("audit.yaml", `{"apiVersion":"audit.k8s.io/v1","kind":"Policy","omitStages":["RequestReceived"],
"rules":[{"level":"Metadata","users":["system:serviceaccount:kube-flannel:flannel"]},{"level":"None"}]}`)
	var err error
	c.api, err = c.lab.StartAPIServer(background(c.t), lab.APIServerOptions{
		Path: tool(c.t, "kube-apiserver"), Tokens: tokens, ServiceAddrs: services,
		Args: []string{
			"--kubelet-preferred-address-types=InternalIP", "--endpoint-reconciler-type=lease",
			"--service-cluster-ip-range=" + c.serviceNetworks(),
			"--audit-policy-file=" + audit, "--audit-log-path=" + filepath.Join(c.dir, auditLog), "--audit-log-mode=blocking",
		},
	})
	if err != nil {
		c.t.Fatal(err)
	}
}

// kubeconfig writes a kubeconfig with the token, and returns its path.
func (c *cluster) kubeconfig(token string) string {
	c.t.Helper()
	text, err := c.api.Kubeconfig(token)
	if err != nil {
		c.t.Fatal(err)
	}
	return c.write(token+".kubeconfig", string(text))
}

// access returns the environment variable, as NAME=value, with which programs find the
// administrator's kubeconfig.
func (c *cluster) access() string { return "KUBECONFIG=" + filepath.Join(c.dir, admin+".kubeconfig") }

// write writes a file to the cluster's folder and returns its path.
func (c *cluster) write(name, text string) string {
	c.t.Helper()
	file := filepath.Join(c.dir, name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return file
}

// start starts a program on the router, and kills it at the end of the test. The test fails if
// the program ends before that.
func (c *cluster) start(name string, args ...string) {
	c.t.Helper()
	log, err := os.Create(filepath.Join(c.dir, name+".log"))
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.Command(tool(c.t, "kubernetes/"+name), args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := c.lab.Underlay().Start(cmd); err != nil {
		c.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	c.t.Cleanup(func() {
		select {
		case err := <-ended:
			c.t.Errorf("%s ended: %v", name, err)
		default:
			_ = cmd.Process.Kill()
			<-ended
		}
		log.Close()
	})
}

// try runs kubectl as administrator, and returns its output without surrounding spaces. The
// method kubectl, unlike try, ends the test after an error.
func (c *cluster) try(ctx context.Context, args ...string) (string, error) {
	args = append([]string{c.access(), "HOME=" + c.dir, tool(c.t, "kubectl")}, args...)
	out, err := c.lab.Underlay().Exec(ctx, "env", args...)
	if err != nil {
		err = fmt.Errorf("kubectl %s: %w: %s", strings.Join(args[3:], " "), err, out)
	}
	return strings.TrimSpace(string(out)), err
}

func (c *cluster) kubectl(args ...string) string {
	c.t.Helper()
	out, err := c.try(background(c.t), args...)
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

// apply writes manifests to a file with that name, and applies them.
func (c *cluster) apply(name, manifests string) {
	c.t.Helper()
	c.kubectl("apply", "-f", c.write(name+".yaml", manifests))
}

// routePods adds routes from the router to the pods, because the API server, which runs there,
// connects to pods. Forwarded packets must not use these routes: otherwise the router would
// carry packets between nodes that the network under test does not carry.
func (c *cluster) routePods() {
	c.t.Helper()
	const table = "100"
	for _, f := range c.families {
		c.onRouter("ip", fmt.Sprintf("-%d", f), "rule", "add", "iif", "lo", "table", table)
	}
	for _, n := range c.nodes {
		var subnets []string
		eventually(c.t, "subnets of "+n.Name(), func(ctx context.Context) error {
			out, err := c.try(ctx, "get", "node", n.Name(), "--output=jsonpath={.spec.podCIDRs[*]}")
			if subnets = strings.Fields(out); err == nil && len(subnets) != len(c.families) {
				err = fmt.Errorf("it has %q", subnets)
			}
			return err
		})
		for _, text := range subnets {
			subnet, err := netip.ParsePrefix(text)
			if err != nil {
				c.t.Fatal(err)
			}
			c.onRouter("ip", "route", "add", text, "via", n.Addr(prefix.FamilyOf(subnet.Addr())).String(), "table", table)
		}
	}
}

func (c *cluster) onRouter(name string, args ...string) {
	c.t.Helper()
	if out, err := c.lab.Underlay().Exec(background(c.t), name, args...); err != nil {
		c.t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
}

// explain logs the state of the cluster and the last lines of every program's log, but only if
// the test has failed.
func (c *cluster) explain() {
	if !c.t.Failed() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, args := range [][]string{
		{"get", "nodes,pods", "--all-namespaces", "--output=wide"},
		{"get", "events", "--all-namespaces", "--field-selector=type=Warning", "--sort-by=.lastTimestamp"},
		{"logs", "--namespace=kube-flannel", "--selector=app=flannel", "--tail=40", "--prefix"},
	} {
		out, err := c.try(ctx, args...)
		c.t.Logf("kubectl %s: %v\n%s", strings.Join(args, " "), err, lastLines(out, 80))
	}
	logs, err := filepath.Glob(filepath.Join(c.dir, "*.log"))
	for _, n := range c.nodes {
		more, globErr := filepath.Glob(n.Path("/var/lib/node/disk/var/log/*.log"))
		logs, err = append(logs, more...), errors.Join(err, globErr)
	}
	if err != nil {
		c.t.Error(err)
	}
	for _, file := range logs {
		text, err := os.ReadFile(file)
		c.t.Logf("%s: %v\n%s", file, err, lastLines(string(bytes.TrimSpace(text)), 25))
	}
}

func lastLines(text string, n int) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
