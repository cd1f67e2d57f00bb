// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/test/lab"
)

// distribution contains what a distribution of Kubernetes writes for flannel, from a file of
// testdata/distributions. Its source is in the file.
type distribution struct {
	name         string
	Init         [][]string        // commands of the init containers that run in flannel's image
	Command      []string          // of flannel's container
	Env          map[string]string // except the name of the pod
	Capabilities []string          // of an unprivileged container; empty if it is privileged
	Rules        []any             // of the ClusterRole; empty if the container uses no role of its own
	CNI          string            // the list of CNI plugins
	Networks     map[string]string // network configurations by what is special about them
}

func distributions(t *testing.T) []distribution {
	t.Helper()
	paths, err := filepath.Glob("testdata/distributions/*.yaml")
	if err != nil || len(paths) == 0 {
		t.Fatalf("no distributions: %v", err)
	}
	var all []distribution
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		d := distribution{name: strings.TrimSuffix(filepath.Base(path), ".yaml")}
		if err := yaml.UnmarshalStrict(text, &d); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		all = append(all, d)
	}
	return all
}

// system is the namespace of the daemons' pods.
const system = "kube-system"

// TestKubeDistributions runs daemons with the flags, the environment, the capabilities, the role and
// each network configuration of the distributions of Kubernetes, and attaches pods with their lists of
// CNI plugins. The daemons must warn of nothing, and all pods must reach each other.
//
//stages:rest it starts many API servers
func TestKubeDistributions(t *testing.T) {
	t.Parallel()
	for _, d := range distributions(t) {
		if d.name == "microk8s" {
			continue // TestMicroK8s, because its store is etcd
		}
		for name, network := range d.Networks {
			t.Run(d.name+"/"+name, func(t *testing.T) {
				t.Parallel()
				c := newCluster(t, lab.Config{Hosts: 2, Families: familiesOf(t, network)}, `{"Type":"vxlan"}`)
				expectValid(t, c.Host(1), c.write("net-conf.json", []byte(network)))
				if d.Rules != nil {
					c.do(http.MethodPatch, "/apis/rbac.authorization.k8s.io/v1/clusterroles/flannel", map[string]any{"rules": d.Rules}, "application/merge-patch+json")
				}
				tailscale := strings.Contains(network, "tailscale")
				if tailscale {
					c.addTailscale()
				}

				c.do(http.MethodPost, "/api/v1/namespaces/"+system+"/serviceaccounts", map[string]any{"metadata": map[string]any{"name": "default"}}, "")
				for n := range c.Hosts() {
					start(t, c.Host(n+1), c.optionsOf(d, n+1))
				}
				for _, h := range c.Hosts() {
					expectReady(t, h.Daemon())
					newCNIFrom(t, h, debianPlugins, d.CNI).add("a")
				}
				if tailscale {
					c.expectTailscale()
				} else {
					expectMatrix(t, c.Lab)
				}
				expectNoWarnings(t, c.Lab)
			})
		}
	}
}

// familiesOf returns the families of a network configuration, which must have the pod ranges of the lab.
func familiesOf(t *testing.T, network string) (families []prefix.Family) {
	t.Helper()
	cfg, err := subnet.ParseConfig([]byte(network))
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range cfg.Networks {
		f := prefix.FamilyOf(n.Prefix.Addr())
		if n.Prefix != lab.PodNetwork(f) {
			t.Fatalf("the network %s is not that of the lab, %s", n.Prefix, lab.PodNetwork(f))
		}
		families = append(families, f)
	}
	return families
}

// expectValid checks that flannelctl config validate accepts a file on a host and warns of nothing.
func expectValid(t *testing.T, h *lab.Host, file string) {
	t.Helper()
	out, err := h.Exec(testContext(t), built("flannelctl"), "config", "validate", file)
	if err != nil || strings.Contains(string(out), "warning") {
		t.Errorf("flannelctl config validate: %v: %s", err, out)
	}
}

// optionsOf returns the options of a daemon on host n as the distribution starts it. The lab adds
// only a kubeconfig and the paths of files, because the daemon does not run in a pod.
func (c *cluster) optionsOf(d distribution, n int) lab.FlanneldOptions {
	c.t.Helper()
	pod := "flannel-" + nodeName(n)
	c.do(http.MethodPost, "/api/v1/namespaces/"+system+"/pods", map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": pod},
		"spec": map[string]any{"nodeName": nodeName(n), "containers": []any{map[string]any{"name": "flanneld", "image": "flanneld"}}},
	}, "")

	ca, err := os.ReadFile(c.api.CA()) // the daemon has no access to the files of other processes
	if err != nil {
		c.t.Fatal(err)
	}
	c.server = fmt.Sprintf(`{"server":"https://%s","certificate-authority":%q}`, c.api.Addr(c.Host(n)), c.write("ca.crt", ca))

	o := c.options(n, d.Command[1:]...)
	o.Path = c.confined(d.Capabilities)
	o.Env = []string{"POD_NAME=" + pod, "POD_NAMESPACE=" + system, "PATH=" + c.dir + ":" + os.Getenv("PATH")}
	for key, value := range d.Env {
		o.Env = append(o.Env, key+"="+value)
	}
	return o
}

// confined returns the path of a program that runs flanneld with the capabilities of an unprivileged
// container to which these are added, or with all if there are none to add.
func (c *cluster) confined(added []string) string {
	c.t.Helper()
	if len(added) == 0 {
		return flanneld()
	}
	// The ones that container runtimes leave to root by default.
	set := []string{"-all", "+chown", "+dac_override", "+fowner", "+fsetid", "+kill", "+setgid", "+setuid", "+setpcap", "+net_bind_service", "+sys_chroot", "+mknod", "+audit_write", "+setfcap"}
	for _, one := range added {
		set = append(set, "+"+strings.ToLower(one))
	}
	path := filepath.Join(c.dir, "confined")
	script := fmt.Sprintf("#!/bin/sh\nexec setpriv --bounding-set=%s --inh-caps=-all %s \"$@\"\n", strings.Join(set, ","), flanneld())
	if err := writeProgram(path, []byte(script), 0o700); err != nil {
		c.t.Fatal(err)
	}
	return path
}

// addTailscale puts a program tailscale into the PATH of the daemons, which records its arguments. The
// real one needs a service on the internet.
func (c *cluster) addTailscale() {
	c.t.Helper()
	script := "#!/bin/sh\necho \"$@\" >>" + calls + "\n"
	if err := writeProgram(filepath.Join(c.dir, "tailscale"), []byte(script), 0o700); err != nil {
		c.t.Fatal(err)
	}
}

// expectTailscale checks that the daemon of host 1 has told tailscale its subnets, and tells it to stop.
func (c *cluster) expectTailscale() {
	c.t.Helper()
	h := c.Host(1)
	expectCalls(c.t, h, "set --accept-routes --advertise-routes="+strings.Join(c.podCIDRs(1), ","))
	expectStop(c.t, h.Daemon())
	expectCalls(c.t, h, "down")
}

// expectNoWarnings checks that no daemon has logged a warning or an error.
func expectNoWarnings(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, h := range l.Hosts() {
		for line := range strings.Lines(h.Daemon().Log()) {
			if strings.HasPrefix(line, "E") || strings.HasPrefix(line, "W") {
				t.Errorf("%s: %s", h.Name(), line)
			}
		}
	}
}

// TestMicroK8s runs daemons with the flags of MicroK8s, whose store is etcd with client certificates,
// and attaches pods with its list of CNI plugins, which has no version.
//
//stages:rest TestTLS and TestCNI check the same parts
func TestMicroK8s(t *testing.T) {
	t.Parallel()
	all := distributions(t)
	d := all[slices.IndexFunc(all, func(d distribution) bool { return d.name == "microk8s" })]
	l := newLab(t, lab.Config{Hosts: 2, Etcd: lab.EtcdOptions{TLS: true, ClientCerts: true}, Network: json.RawMessage(d.Networks["vxlan"])}, "")

	folders := map[string]string{"SNAP_DATA": t.TempDir(), "SNAP_COMMON": "/var/lib/microk8s"}
	files := l.Etcd().TLSFiles()
	for name, from := range map[string]string{"ca.crt": files.CA, "server.crt": files.ClientCert, "server.key": files.ClientKey} {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(folders["SNAP_DATA"], "certs", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	expand := func(text string) string { return os.Expand(text, func(key string) string { return folders[key] }) }

	for _, h := range l.Hosts() {
		var args []string
		for _, arg := range d.Command[1:] {
			args = append(args, expand(arg))
		}
		startOne(t, h, lab.FlanneldOptions{Args: append(args, "--etcd-endpoints="+h.EtcdEndpoint())}) // not on this host
		newCNIFrom(t, h, debianPlugins, expand(d.CNI)).add("a")
	}
	expectMatrix(t, l)
	expectNoWarnings(t, l)
}
