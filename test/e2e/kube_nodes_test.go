// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/test/lab"
)

// configure replaces the network configuration file of the daemons.
func (c *cluster) configure(config string) { c.write("net-conf.json", []byte(config)) }

// TestKubeAnnotations checks that the daemon understands annotations in all forms that
// flannel writes: on Nodes with podCIDRs in both orders, and under the default prefix and
// another one. It also checks the annotations that the daemon writes on its own Node.
func TestKubeAnnotations(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1, Families: dual}, `{"Type":"vxlan"}`)
	h := c.Host(1)
	const usual, other = "flannel.alpha.coreos.com/", "example.com/net-"
	notes := func(prefix, backend, data, data6 string, n int) map[string]string {
		return map[string]string{
			prefix + "kube-subnet-manager": "true", prefix + "backend-type": backend, prefix + "backend-data": data, prefix + "backend-v6-data": data6,
			prefix + "public-ip": c.peerIP(n), prefix + "public-ipv6": fmt.Sprintf("fd00:77::%x", n),
		}
	}
	vtep := func(n int) string { return fmt.Sprintf(`{"VNI":1,"VtepMAC":%q}`, peerMAC(n)) }
	c.addNode(100, notes(other, "vxlan", vtep(100), vtep(0x80+100), 100)) // podCIDRs: IPv6 comes first here, and second in the next Node
	c.addNode(101, notes(other, "vxlan", fmt.Sprintf(`{"VtepMAC":%q}`, peerMAC(101)), vtep(0x80+101), 101))
	c.addNode(102, notes(usual, "vxlan", vtep(102), vtep(0x80+102), 102))
	c.addNode(103, notes(usual, "host-gw", "null", "null", 103))
	c.addNode(104, notes(usual, "host-gw", "null", "null", 104))
	only6 := notes(usual, "vxlan", "null", vtep(0x80+105), 105)
	only6[usual+"public-ip"] = "0.0.0.0"
	c.addNode(105, only6)

	vxlan6 := func(n int) []string {
		base := fmt.Sprintf("fd00:5:0:%x::", n)
		return []string{
			base + "/64 via " + base + " dev flannel-v6.1", base + " dev flannel-v6.1 lladdr " + peerMAC(0x80+n) + " PERMANENT",
			fmt.Sprintf("%s dev flannel-v6.1 dst fd00:77::%x self permanent", peerMAC(0x80+n), n),
		}
	}
	hostGW := func(n int) []string {
		return []string{
			fmt.Sprintf("10.5.%d.0/24 via %s dev eth0", n, c.peerIP(n)), fmt.Sprintf("fd00:5:0:%x::/64 via fd00:77::%x dev eth0", n, n),
		}
	}
	routes := func(peers ...int) (all []string) { // parts of the routes that the host must not have
		for _, n := range peers {
			all = append(all, fmt.Sprintf("10.5.%d.0/24 via", n), fmt.Sprintf("fd00:5:0:%x::/64 via", n))
		}
		return all
	}
	const both = `"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48"`
	for _, tt := range []struct {
		config string
		args   []string
		have   []string
		lack   []string
		own    map[string]string
	}{
		{
			config: `{` + both + `,"Backend":{"Type":"vxlan"}}`, args: []string{"--kube-annotation-prefix=example.com/net"},
			have: slices.Concat(c.peerEntries(100), c.peerEntries(101), vxlan6(100), vxlan6(101)), lack: routes(102, 103, 104, 105),
			own: map[string]string{other + "backend-type": "vxlan", usual + "backend-type": ""},
		},
		{
			config: `{` + both + `,"Backend":{"Type":"host-gw"}}`, have: slices.Concat(hostGW(103), hostGW(104)), lack: routes(100, 101, 102, 105),
			own: map[string]string{usual + "backend-type": "host-gw", usual + "backend-data": "null", usual + "backend-v6-data": "null"},
		},
		{
			config: `{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:5::/48","Backend":{"Type":"vxlan"}}`,
			have:   slices.Concat(vxlan6(102), vxlan6(105)), lack: routes(100, 101, 103, 104),
			own: map[string]string{usual + "backend-type": "vxlan"},
		},
	} {
		c.configure(tt.config)
		d := start(t, h, c.options(1, tt.args...))
		expectReady(t, d)
		expectKernel(t, h, tt.have, tt.lack)
		node := c.node(1)
		for key, want := range tt.own {
			if got := node.Metadata.Annotations[key]; got != want {
				t.Errorf("%s: annotation %s is %q, want %q", tt.config, key, got, want)
			}
		}
		env, err := os.ReadFile(h.Path(lab.SubnetFile))
		if err != nil || !strings.Contains(string(env), "FLANNEL_IPV6_SUBNET=fd00:5:0:1::1/64") {
			t.Errorf("%s: subnet file is %q, %v, want FLANNEL_IPV6_SUBNET=fd00:5:0:1::1/64", tt.config, env, err)
		}
		expectStop(t, d)
	}
}

// each calls f with the numbers from 0 to n-1, in eight goroutines, and waits for them. After
// an error a goroutine ends, and the test fails when all have ended.
func each(t *testing.T, n int, f func(int) error) {
	t.Helper()
	const workers = 8
	done := make(chan error)
	for w := range workers {
		go func() {
			var err error
			for i := w; i < n && err == nil; i += workers {
				err = f(i)
			}
			done <- err
		}()
	}
	var errs []error
	for range workers {
		errs = append(errs, <-done)
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// wantedEntries returns sorted descriptions of the entries on flannel.1 that the Nodes
// require: a route, a neighbour and an FDB entry for each Node except the one with the name
// own.
func (c *cluster) wantedEntries(own string) []string {
	c.t.Helper()
	var list struct {
		Items []struct {
			kubeNode
			Spec struct{ PodCIDR netip.Prefix }
		}
	}
	if err := json.Unmarshal(c.do(http.MethodGet, nodesPath, nil, ""), &list); err != nil {
		c.t.Fatal(err)
	}
	var lines []string
	for _, n := range list.Items {
		var data struct{ VtepMAC string }
		if n.Metadata.Name == own {
			continue
		}
		if err := json.Unmarshal([]byte(n.annotation("backend-data")), &data); err != nil {
			c.t.Fatal(err)
		}
		vtep := n.Spec.PodCIDR.Addr()
		lines = append(lines, fmt.Sprintf("route %s via %s", n.Spec.PodCIDR, vtep), fmt.Sprintf("neighbour %s is %s", vtep, data.VtepMAC),
			fmt.Sprintf("fdb %s at %s", data.VtepMAC, n.annotation("public-ip")))
	}
	slices.Sort(lines)
	return lines
}

// kernelEntries returns the entries on flannel.1 in the kernel of the host, sorted and in the
// form of wantedEntries.
func (c *cluster) kernelEntries(h *lab.Host) ([]string, error) {
	out, err := h.Exec(testContext(c.t), "sh", "-ec", `
		ip route show | sed -nE 's/^(\S+)( nhid \S+)? via (\S+) dev flannel\.1 .*/route \1 via \3/p'
		ip neigh show dev flannel.1 | sed -nE 's/^(\S+) lladdr (\S+) .*/neighbour \1 is \2/p'
		bridge fdb show dev flannel.1 | sed -nE 's/^(\S+) dst (\S+) .*/fdb \1 at \2/p'`)
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	slices.Sort(lines)
	return lines, err
}

// TestKubeThousandNodes replaces a thousand Nodes by a thousand others as fast as it can.
// Afterwards the kernel must have exactly the entries of the new Nodes.
//
//stages:rest it creates a thousand nodes
func TestKubeThousandNodes(t *testing.T) {
	t.Parallel()
	const nodes = 1000
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	c.configure(`{"Network":"10.0.0.0/8","Backend":{"Type":"vxlan"}}`)
	c.client = &http.Client{Timeout: patience, Transport: c.api.Transport(c.Underlay())} // keeps its connection
	t.Cleanup(c.client.CloseIdleConnections)
	add := func(round, n int) error {
		high, low := n/256, n%256
		cidr := fmt.Sprintf("10.%d.%d.0/24", 100+10*round+high, low)
		status, answer, err := c.try(http.MethodPost, nodesPath, map[string]any{
			"apiVersion": "v1", "kind": "Node", "spec": map[string]any{"podCIDR": cidr, "podCIDRs": []string{cidr}},
			"metadata": map[string]any{"name": fmt.Sprintf("many%d-%d", round, n), "annotations": map[string]string{
				annotation("kube-subnet-manager"): "true", annotation("backend-type"): "vxlan",
				annotation("public-ip"):    fmt.Sprintf("172.%d.%d.%d", 20+round, high, low),
				annotation("backend-data"): fmt.Sprintf(`{"VNI":1,"VtepMAC":"3a:99:44:%02x:%02x:%02x"}`, round, high, low),
			}},
		}, "")
		if err != nil || status >= 300 {
			return fmt.Errorf("add node %d: %d, %w: %s", n, status, err, answer)
		}
		return nil
	}
	remove := func(round, n int) error {
		status, answer, err := c.try(http.MethodDelete, fmt.Sprintf("%s/many%d-%d", nodesPath, round, n), nil, "")
		if err != nil || status >= 300 {
			return fmt.Errorf("delete node %d: %d, %w: %s", n, status, err, answer)
		}
		return nil
	}
	expectEqual := func(what string) {
		t.Helper()
		want := c.wantedEntries(nodeName(1))
		if len(want) != 3*nodes {
			t.Fatalf("%s: the Nodes require %d entries, want %d", what, len(want), 3*nodes)
		}
		eventually(t, what, func() error {
			have, err := c.kernelEntries(c.Host(1))
			if diff := cmp.Diff(want, have); err == nil && diff != "" {
				err = fmt.Errorf("the kernel differs from the Nodes (-want +got):\n%s", diff)
			}
			return err
		})
	}
	each(t, nodes, func(n int) error { return add(1, n) })
	d := start(t, c.Host(1), c.options(1))
	expectReady(t, d)
	expectEqual("a thousand Nodes")

	began := time.Now()
	each(t, nodes, func(n int) error { return errors.Join(remove(1, n), add(2, n)) })
	written := time.Since(began)
	expectEqual("a thousand other Nodes")
	t.Logf("Nodes replaced in %s, kernel up to date %s later", written, time.Since(began)-written)
	if err := d.Ended(); err != nil {
		t.Error(err)
	}
}

// TestKubeNodesWithOneAddress checks that a new Node is served although an old Node has the
// same public address, and is still served after the old Node is deleted. This happens when a
// host is installed anew with the address of a Node that is not deleted yet.
//
//stages:rest it starts an API server
func TestKubeNodesWithOneAddress(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	c.addNode(100, c.peerAnnotations(100))
	c.startDaemons()
	h := c.Host(1)
	expectKernel(t, h, c.peerEntries(100), nil)
	notes := c.peerAnnotations(101)
	notes[annotation("public-ip")] = c.peerIP(100)
	c.addNode(101, notes)
	next := datapathLines("10.5.101.0/24", c.peerIP(100), peerMAC(101))
	expectKernel(t, h, slices.Concat(c.peerEntries(100), next), nil)
	expectLog(t, h.Daemon(), fmt.Sprintf(`"leases share a public address" publicIP=%q leases=["node100","node101"] count=2`, c.peerIP(100)))
	c.deleteNode(100)
	expectKernel(t, h, next, []string{"10.5.100.0", peerMAC(100)})
	expectLog(t, h.Daemon(), "leases no longer share a public address")
	expectOnce(t, h.Daemon(), "leases share a public address")
}
