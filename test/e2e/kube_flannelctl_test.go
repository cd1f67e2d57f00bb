// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// TestKubeFlannelctl checks that flannelctl leases lists the leases of a cluster,
// including a Node without podCIDR, and omits Nodes that flannel does not use.
//
//stages:rest TestFlannelctlStatus and others run the same commands with etcd
func TestKubeFlannelctl(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1, Families: dual}, `{"Type":"vxlan"}`)
	c.startDaemons()
	h, config := c.Host(1), filepath.Join(c.dir, "kubeconfig1")
	c.addNodeWith(101, map[string]string{annotation("kube-subnet-manager"): "true"})
	c.addNode(102, nil)
	out := expectFlannelctl(t, h, []string{"leases", "--kubeconfig-file=" + config})
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 3 || !strings.HasPrefix(lines[0], "NODE ") {
		t.Fatalf("flannelctl leases prints\n%s\nwant a heading and two leases", out)
	}
	for i, want := range []string{
		fmt.Sprintf("%s %s %s,%s vxlan", nodeName(1), strings.Join(c.podCIDRs(1), ","), h.Addr(4), h.Addr(6)),
		nodeName(101) + " - - - no podCIDR assigned yet",
	} {
		if got := strings.Join(strings.Fields(lines[i+1]), " "); got != want {
			t.Errorf("line %d is %q, want %q", i+1, got, want)
		}
	}
	if out := expectFlannelctl(t, h, []string{"leases", "-o", "name", "--kubeconfig-file=" + config}); out != nodeName(1)+"\n"+nodeName(101)+"\n" {
		t.Errorf("flannelctl leases -o name prints\n%s", out)
	}
	expectFlannelctlFails(t, h, []string{"leases", "--kubeconfig-file=/nowhere"}, `--kubeconfig-file "/nowhere" cannot be read`)
}

// TestKubeFlannelctlWatch checks that flannelctl leases --watch reports added, changed
// and deleted leases, also after a restart of the API server.
//
//stages:rest it starts an API server
func TestKubeFlannelctlWatch(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	c.startDaemons()
	h := c.Host(1)
	expectLine := watchFlannelctl(t, h, "leases", "--watch", "--kubeconfig-file="+filepath.Join(c.dir, "kubeconfig1"))
	expectLine("+", nodeName(1), h.Addr(prefix.IPv4).String(), "vxlan")
	c.addNode(101, nil) // without annotations, so it is no lease
	c.addNodeWith(102, c.peerAnnotations(102), "10.5.102.0/24")
	expectLine("+", nodeName(102), c.peerIP(102), "vxlan")
	c.annotate(102, map[string]any{"public-ip": "192.168.77.77"})
	expectLine("~", nodeName(102), "192.168.77.77", "vxlan")
	c.kill()
	c.start()
	c.addNodeWith(103, c.peerAnnotations(103), "10.5.103.0/24")
	expectLine("+", nodeName(103), c.peerIP(103), "vxlan")
	c.deleteNode(102)
	expectLine("-", nodeName(102), "192.168.77.77", "vxlan")
}

// TestKubeFlannelctlConfig checks that flannelctl config reads the configuration that the
// daemons use: a file, or the ConfigMap that their pods mount as this file.
//
//stages:rest it needs kubectl, which takes minutes to build
func TestKubeFlannelctlConfig(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	h := c.Host(1)
	admin := "--kubeconfig-file=" + c.kubeconfig(1, c.write("token", []byte(adminToken)))
	configMap := func(namespace, name, key, text string) {
		t.Helper()
		c.do(http.MethodPost, "/api/v1/namespaces/"+namespace+"/configmaps", map[string]any{
			"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": name}, "data": map[string]string{key: text},
		}, "")
	}
	expectFlannelctlFails(t, h, []string{"config", "get", admin}, "read ConfigMap kube-flannel/kube-flannel-cfg", "not found")
	c.do(http.MethodPost, "/api/v1/namespaces", map[string]any{
		"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": "kube-flannel"},
	}, "")
	// This network is too small to allocate subnets from it. It is valid nevertheless,
	// because Kubernetes allocates the podCIDRs.
	configMap("kube-flannel", "kube-flannel-cfg", "net-conf.json", `{"Network":"10.5.1.0/30","Backend":{"Type":"vxlan"}}`)
	expectFlannelctl(t, h, []string{"config", "get", admin}, `{"Network":"10.5.1.0/30","Backend":{"Type":"vxlan"}}`+"\n")
	expectFlannelctl(t, h, []string{"config", "validate", admin})
	configMap("default", "bad", "net-conf.json", `{"Network":"10.5.0.0/99"}`)
	configMap("default", "empty", "cni-conf.json", `{}`)
	expectFlannelctlFails(t, h, []string{"config", "validate", admin, "--net-config-map=default/bad"}, "10.5.0.0/99")
	expectFlannelctlFails(t, h, []string{"config", "get", admin, "--net-config-map=default/empty"}, "ConfigMap default/empty has no net-conf.json")
	expectFlannelctlFails(t, h, []string{"config", "get", admin, "--net-config-map=empty"}, `--net-config-map "empty" is invalid: expected NAMESPACE/NAME`)

	file := filepath.Join(c.dir, "net-conf.json")
	expectFlannelctl(t, h, []string{"config", "get", "--net-config-path=" + file}, `"Network":"10.5.0.0/16"`)
	expectFlannelctl(t, h, []string{"config", "validate", "--net-config-path=" + file})
	expectFlannelctl(t, h, []string{"config", "validate", file, admin})
	expectFlannelctlFails(t, h, []string{"config", "get", "--net-config-path=/nowhere"}, `--net-config-path "/nowhere" cannot be read`)
	expectFlannelctlFails(t, h, []string{"config", "set", file, admin}, "kubectl --namespace=kube-flannel edit configmap kube-flannel-cfg")
	c.followEdit(h)

	// The role of the daemons does not allow them to read ConfigMaps: they read the
	// mounted file.
	daemon := "--kubeconfig-file=" + c.kubeconfig(1, c.write("token", []byte(flannelToken)))
	expectFlannelctlFails(t, h, []string{"config", "get", daemon}, "403", "configmaps")
}

// followEdit runs the commands that flannelctl.md recommends instead of config set. A
// script in place of an editor makes the change.
func (c *cluster) followEdit(h *lab.Host) {
	c.t.Helper()
	const after = `{"Network":"10.5.1.0/29","Backend":{"Type":"vxlan"}}`
	c.write("net-conf.json", []byte(after))
	editor := c.write("editor", []byte("#!/bin/sh\nsed -i 's|10.5.1.0/30|10.5.1.0/29|' \"$1\"\n"))
	if err := os.Chmod(editor, 0o700); err != nil { //nolint:gosec // a program
		c.t.Fatal(err)
	}
	config := c.kubeconfig(1, c.write("admin-token", []byte(adminToken)))
	var ran []string
	for _, command := range pageCommands(c.t, "flannelctl.md") {
		check := strings.HasPrefix(command, "flannelctl config validate --kubeconfig-file") && strings.HasSuffix(command, " net-conf.json")
		if !check && !strings.Contains(command, " edit configmap ") {
			continue
		}
		ran = append(ran, command)
		out, err := h.Exec(testContext(c.t), "env", "HOME="+c.dir, "KUBECONFIG="+config, "KUBE_EDITOR="+editor,
			"PATH="+repository(c.t, "bin")+":"+repository(c.t, "bin/tools")+":"+os.Getenv("PATH"),
			"sh", "-ec", "cd "+c.dir+"\n"+strings.Replace(command, "~/.kube/config", config, 1))
		if err != nil {
			c.t.Fatalf("%s: %v: %s", command, err, out)
		}
	}
	if len(ran) != 2 {
		c.t.Fatalf("the page has the commands %q, want two", ran)
	}
	expectFlannelctl(c.t, h, []string{"config", "get", "--kubeconfig-file=" + config}, after+"\n")
}
