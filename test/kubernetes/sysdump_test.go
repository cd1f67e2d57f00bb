// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"os"
	"path/filepath"
	"strings"
)

// expectSysdump runs flannelctl sysdump cluster while the kubelet of one node does not answer. The archive must have all of
// the other nodes and of the API server, without tokens, and one line must name the node. archive is the path of flanneld's
// image, beside which are its programs.
func (c *cluster) expectSysdump(archive string) {
	c.t.Helper()
	dead := c.last()
	alive := c.nodes[0]
	dead.run("nft", "add table inet fault; add chain inet fault c { type filter hook input priority 0; }; add rule inet fault c tcp dport 10250 drop")
	defer dead.run("nft", "delete table inet fault")
	program := filepath.Join(filepath.Dir(archive), "bin", "flannelctl")
	file := filepath.Join(c.t.TempDir(), "cluster.tar.gz")
	run := func(name string, args ...string) string {
		c.t.Helper()
		out, err := c.lab.Underlay().Exec(background(c.t), name, args...)
		if err != nil {
			c.t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	out := run("env", c.access(), program, "sysdump", "cluster", "--timeout=1m", "--file="+file)
	c.t.Logf("%s", out)
	if want := file + "\nincomplete: " + dead.Name() + ": "; !strings.HasPrefix(out, want) || strings.Count(out, "\n") != 2 || !strings.Contains(out, ":10250: i/o timeout") {
		c.t.Errorf("sysdump cluster prints %q, want %q and the time-out of the API server", out, want)
	}

	folder := c.t.TempDir()
	run("tar", "-xzf", file, "--strip-components=1", "--directory="+folder)
	pod := c.daemonPod(alive)
	host := "hosts/" + alive.Name() + "/"
	for name, want := range map[string]string{
		"cluster/daemonsets.json": `"kube-flannel-ds"`, "cluster/configmaps.json": "net-conf.json", "cluster/nodes.json": "flannel.alpha.coreos.com/backend-type",
		"cluster/pods.json": `"containerStatuses"`, "cluster/events.json": "kube-flannel-ds-", host + "flannelctl/status.txt": "ready, version",
		host + "flannelctl/config.txt": `"Backend"`, host + "flannelctl/leases.txt": dead.Name(), host + "daemon/goroutines.txt": "main.main()", host + "kernel/links.txt": "cni0",
		host + pod + "/kube-flannel.log": `"flannel is ready"`, host + pod + "/install-cni.log": "", host + pod + "/sysdump.txt": " files",
		"hosts/" + dead.Name() + "/flannelctl/status.txt": "-",
	} {
		text, err := os.ReadFile(filepath.Join(folder, name))
		if missing := want == "-"; (err != nil) != missing || !missing && !strings.Contains(string(text), want) {
			c.t.Errorf("%s: %v, no %q in\n%.2000s", name, err, want, text)
		}
	}

	// A token of a service account is a JWT, whose first two parts are JSON objects in base64.
	if found := run("sh", "-c", `grep -rlE 'eyJ[A-Za-z0-9_-]{16,}[.]eyJ' `+folder+" || true"); found != "" {
		c.t.Errorf("a token is in %s", found)
	}
}
