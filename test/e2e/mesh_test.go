// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/mesh"
	"github.com/flanneld/flanneld/test/lab"
)

// meshArgs are flags of daemons that send probes and that flannelctl mesh can ask from other hosts.
var meshArgs = []string{"--probe", "--statusz-address=0.0.0.0:8287"}

// meshOf runs flannelctl mesh and returns its JSON output. failure is not nil if flannelctl fails, which
// it also does if a path is broken, or if its output is not JSON.
func meshOf(t *testing.T, h *lab.Host, args ...string) (m mesh.Data, failure error) {
	t.Helper()
	out, err := flannelctl(t, h, append([]string{"mesh", "-o", "json"}, args...)...)
	if i := strings.LastIndex(out, "\n}"); i >= 0 { // flannelctl may print an error message after the JSON
		out = out[:i+2]
	}
	if e := json.Unmarshal([]byte(out), &m); e != nil {
		return m, fmt.Errorf("%w: %w: %s", e, err, out)
	}
	return m, err
}

// breakDirection breaks the path from one host to another, and leaves the path back as it is. The
// parameter from is the sending host, and the parameter to is the receiving host. The receiving host
// drops the pings and the TCP connections of the sending host. It does not drop the answers to its own.
func breakDirection(t *testing.T, from, to *lab.Host) {
	t.Helper()
	device := statusOf(t, from).Lease.Subnets[0].Addr()
	nft(t, to.Namespace, fmt.Sprintf("table netdev broken { chain in { type filter hook ingress device flannel.1 priority 0; "+
		"ip saddr %[1]s icmp type echo-request drop; ip saddr %[1]s tcp flags & (syn | ack) == syn drop; } ; }", device))
}

// TestMesh breaks one direction between two of four hosts. The last host sends no probes. flannelctl mesh
// must name exactly this direction, in every form of its output. It must also report a problem for a
// lease whose host does not answer, and for a lease at whose address the host of another lease answers.
func TestMesh(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 4}, `{"Type":"vxlan"}`)
	for i, h := range l.Hosts() {
		args := meshArgs
		if i == 3 {
			args = []string{"--statusz-address=0.0.0.0:8287"}
		}
		startOne(t, h, lab.FlanneldOptions{Args: args})
	}
	a, b := l.Host(1), l.Host(2)
	name := func(h *lab.Host) string { return statusOf(t, h).Lease.Subnets[0].String() }
	expect := func(when string, ok, broken int) mesh.Data {
		t.Helper()
		var m mesh.Data
		eventually(t, when, func() (err error) {
			if m, err = meshOf(t, a); (err != nil) != (broken > 0) || m.Paths.OK != ok || m.Paths.Broken != broken {
				return fmt.Errorf("%+v, %w; want %d ok, %d broken", m.Paths, err, ok, broken)
			}
			return nil
		})
		return m
	}
	m := expect("every path works", 9, 0)
	if i := slices.IndexFunc(m.Hosts, func(h mesh.HostData) bool { return h.Name == name(l.Host(4)) }); i < 0 || !strings.Contains(m.Hosts[i].Problem, "start it with --probe") || m.Hosts[i].From.Unknown != 3 {
		t.Errorf("the hosts are %+v, want that of host 4 without probes", m.Hosts)
	}
	expectFlannelctl(t, a, []string{"mesh", "-o", "wide"}, "  TO "+name(b), " ms")
	expectLine := watchFlannelctl(t, a, "mesh", "--watch", "--interval=1s")
	expectLine("=", "9 ok, 0 broken, 3 unknown")

	breakDirection(t, a, b)
	m = expect("one direction is broken", 8, 1)
	if c := m.Broken[0]; c.From != name(a) || c.To != name(b) || c.Result != "network" || !strings.Contains(c.Advice, "(vxlan: UDP 8472)") {
		t.Errorf("the broken path is %+v, want %s -> %s", c, name(a), name(b))
	}
	direction := name(a) + " -> " + name(b)
	expectLine("!", direction, "network: "+m.Broken[0].Advice)
	expectFlannelctlFails(t, a, []string{"mesh"}, "paths: 8 ok, 1 broken, 3 unknown", direction+": network: ", "nothing is known from "+name(l.Host(4)), "flannelctl: 1 of 9 paths are broken")
	out, _ := flannelctl(t, a, "mesh", "-o", "svg")
	picture, _, _ := strings.Cut(out, "flannelctl: ")
	d := xml.NewDecoder(strings.NewReader(picture))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("the picture is not XML: %v\n%s", err, out)
		}
	}
	if want := "<title>" + name(a) + " -&gt; " + name(b) + ": network: "; !strings.Contains(picture, want) {
		t.Errorf("the picture has no %q:\n%s", want, picture)
	}

	// A lease without a host, and one with the address of another host.
	c := etcdClient(t, l)
	putKey(t, c, subnets+"10.5.210.0-24", vxlanLease("192.168.77.210", "02:00:00:00:00:77"))
	putKey(t, c, subnets+"10.5.211.0-24", vxlanLease(b.Addr(prefix.IPv4).String(), "02:00:00:00:00:78"))
	m, _ = meshOf(t, a, "--timeout=1s")
	problems := map[string]string{}
	for _, h := range m.Hosts {
		problems[h.Name] = h.Problem
	}
	if p := problems["10.5.210.0/24"]; p == "" {
		t.Errorf("the problems are %q, want one of the lease without a host", problems)
	}
	if p := problems["10.5.211.0/24"]; !strings.Contains(p, fmt.Sprintf("the host that answers there has the lease %q", statusOf(t, b).Lease.Key)) {
		t.Errorf("the problems are %q, want one of the lease with the address of another host", problems)
	}
	removeKey(t, c, subnets+"10.5.210.0-24")
	removeKey(t, c, subnets+"10.5.211.0-24")

	nft(t, b.Namespace, "delete table netdev broken")
	expectLine("+", direction, "ok")
	expect("the path works again", 9, 0)
}

// addDaemonPod creates the Pod of the daemon on host n, with the status that a kubelet would report.
func (c *cluster) addDaemonPod(n int) {
	c.t.Helper()
	const pods = "/api/v1/namespaces/kube-flannel/pods"
	name, address := fmt.Sprintf("kube-flannel-ds-%d", n), c.Host(n).Addr(prefix.IPv4).String()
	c.do(http.MethodPost, pods, map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": name, "labels": map[string]string{"app": "flannel"}},
		"spec": map[string]any{
			"nodeName": nodeName(n), "hostNetwork": true, "automountServiceAccountToken": false,
			"containers": []any{map[string]any{"name": "kube-flannel", "image": "flanneld"}},
		},
	}, "")
	c.do(http.MethodPatch, pods+"/"+name+"/status", map[string]any{"status": map[string]any{
		"phase": "Running", "podIP": address, "hostIP": address, "podIPs": []any{map[string]string{"ip": address}},
	}}, "application/merge-patch+json")
}

// TestKubeMesh checks that flannelctl mesh asks the daemons of a cluster through the proxy of the API
// server. Without the permissions that the documentation names, it must report which one is missing.
//
//stages:rest a real API server, and TestMesh shows the command
func TestKubeMesh(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 3}, `{"Type":"vxlan"}`)
	c.startDaemons(meshArgs...)
	a, b := c.Host(1), c.Host(2)
	config := "--kubeconfig-file=" + filepath.Join(c.dir, "kubeconfig1") // this user is that of the daemons, which may list Nodes
	expectFlannelctlFails(t, a, []string{"mesh", config}, "list pods with the label app=flannel in namespace kube-flannel", "403", "forbidden")

	c.do(http.MethodPost, "/api/v1/namespaces", map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": "kube-flannel"}}, "")
	c.do(http.MethodPost, "/api/v1/namespaces/kube-flannel/serviceaccounts", map[string]any{"metadata": map[string]any{"name": "default"}}, "")
	const rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-flannel/"
	c.do(http.MethodPost, rbac+"roles", map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": map[string]any{"name": "mesh"},
		"rules": []any{
			map[string]any{"apiGroups": []string{""}, "resources": []string{"pods"}, "verbs": []string{"list"}},
			map[string]any{"apiGroups": []string{""}, "resources": []string{"pods/proxy"}, "verbs": []string{"get"}},
		},
	}, "")
	c.do(http.MethodPost, rbac+"rolebindings", map[string]any{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": map[string]any{"name": "mesh"},
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "mesh"},
		"subjects": []any{map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": flannelUser}},
	}, "")
	eventually(t, "the rights are in force, and no host has a pod", func() error {
		out, err := flannelctl(t, a, "mesh", config)
		if want := "there is no running pod of flanneld on it in namespace kube-flannel"; err == nil || !strings.Contains(out, want) {
			return fmt.Errorf("%w: %s, want %q", err, out, want)
		}
		return nil
	})
	for n := range c.Hosts() {
		c.addDaemonPod(n + 1)
	}
	expect := func(when string, ok, broken int) mesh.Data {
		t.Helper()
		var m mesh.Data
		eventually(t, when, func() (err error) {
			if m, err = meshOf(t, a, config); (err != nil) != (broken > 0) || m.Paths != (mesh.Counts{OK: ok, Broken: broken}) {
				return fmt.Errorf("%+v, %w; want %d ok, %d broken", m, err, ok, broken)
			}
			return nil
		})
		return m
	}
	expect("every path works", 6, 0)

	// The page on security shows how to grant access to a single port of a single pod.
	grant := func(rule map[string]any) {
		rule["apiGroups"], rule["verbs"] = []string{""}, []string{"get"}
		rule["resources"] = []string{"pods/proxy"}
		pods := map[string]any{"apiGroups": []string{""}, "resources": []string{"pods"}, "verbs": []string{"list"}}
		c.do(http.MethodPatch, rbac+"roles/mesh", map[string]any{"rules": []any{pods, rule}}, "application/merge-patch+json")
	}
	grant(map[string]any{"resourceNames": []string{"kube-flannel-ds-1:8287"}})
	eventually(t, "one pod may be asked", func() error {
		m, _ := meshOf(t, a, config)
		for _, h := range m.Hosts {
			if allowed := h.Name == nodeName(1); allowed != (h.Problem == "") || !allowed && !strings.Contains(h.Problem, "403") {
				return fmt.Errorf("%s: %q", h.Name, h.Problem)
			}
		}
		return nil
	})
	grant(map[string]any{})
	expect("every path works again", 6, 0)

	breakDirection(t, a, b)
	m := expect("one direction is broken", 5, 1)
	if p := m.Broken[0]; p.From != nodeName(1) || p.To != nodeName(2) {
		t.Errorf("the broken path is %+v, want that from host 1 to host 2", p)
	}
	b.Daemon().Kill()
	m, _ = meshOf(t, a, config)
	if i := slices.IndexFunc(m.Hosts, func(h mesh.HostData) bool { return h.Name == nodeName(2) }); i < 0 || !strings.Contains(m.Hosts[i].Problem, "connection refused") {
		t.Errorf("the hosts are %+v, want node2 without an answer", m.Hosts)
	}
}
