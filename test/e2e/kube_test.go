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
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// TestKubePods checks that every pod reaches every other with leases from Kubernetes, and
// that the daemons set the condition NetworkUnavailable of their Nodes to False. The second backend
// gets new Nodes of the same API server, because the start of another one takes seconds of CPU time.
func TestKubePods(t *testing.T) {
	t.Parallel()
	for _, families := range [][]prefix.Family{v4, v6, dual} {
		t.Run(familiesName(families), func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, lab.Config{Families: families}, `{"Type":"vxlan"}`)
			c.startDaemons()
			c.expectPods("vxlan")

			network, err := lab.NetworkConfig(families, json.RawMessage(`{"Type":"host-gw"}`))
			if err != nil {
				t.Fatal(err)
			}
			c.write("net-conf.json", network)
			for n, h := range c.Hosts() {
				expectStop(t, h.Daemon())
				c.deleteNode(n + 1)
				c.addNode(n+1, nil)
			}
			for n, h := range c.Hosts() {
				start(t, h, c.options(n+1))
			}
			for _, h := range c.Hosts() {
				expectReady(t, h.Daemon())
			}
			c.expectPods("host-gw")
		})
	}
}

// expectPods expects that every pod reaches every other, that the Nodes name the backend, and that their
// network is available.
func (c *cluster) expectPods(backend string) {
	c.t.Helper()
	expectMatrix(c.t, c.Lab)
	for n := range c.Hosts() {
		c.expectNodeCondition(n+1, "False")
		if got := c.node(n + 1).annotation("backend-type"); got != backend {
			c.t.Errorf("the annotation backend-type of %s is %q, want %s", nodeName(n+1), got, backend)
		}
	}
}

func (c *cluster) expectNodeCondition(n int, want string) {
	c.t.Helper()
	eventually(c.t, "condition", func() error {
		if status := c.node(n).networkUnavailable(); status != want {
			return fmt.Errorf("%s has NetworkUnavailable %q, want %q", nodeName(n), status, want)
		}
		return nil
	})
}

// peerIP returns the public address of Node n. Nodes that are no host of the lab have
// numbers from 100.
func (c *cluster) peerIP(n int) string { return fmt.Sprintf("192.168.77.%d", n) }

func peerMAC(n int) string { return fmt.Sprintf("3a:99:44:2f:e5:%02x", n) }

// peerAnnotations returns the annotations of Node n as flannel writes them.
func (c *cluster) peerAnnotations(n int) map[string]string {
	return map[string]string{
		annotation("backend-data"):                         fmt.Sprintf(`{"VNI":1,"VtepMAC":%q}`, peerMAC(n)),
		annotation("backend-type"):                         "vxlan",
		annotation("kube-subnet-manager"):                  "true",
		annotation("public-ip"):                            c.peerIP(n),
		"kubectl.kubernetes.io/last-applied-configuration": "{}\n",
	}
}

func (c *cluster) peerEntries(n int) []string {
	return datapathLines(fmt.Sprintf("10.5.%d.0/24", n), c.peerIP(n), peerMAC(n))
}

// TestKubePeersAreAddedChangedAndRemoved checks that the kernel follows Nodes that are
// added, changed, deleted and recreated. If a Node loses its annotations, the daemon must
// still serve it with the last valid ones.
func TestKubePeersAreAddedChangedAndRemoved(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	c.addNode(100, c.peerAnnotations(100))
	c.addNode(99, nil) // without annotations
	c.startDaemons()
	h := c.Host(1)
	expectKernel(t, h, c.peerEntries(100), nil)

	c.addNode(101, c.peerAnnotations(101))
	expectKernel(t, h, slices.Concat(c.peerEntries(100), c.peerEntries(101)), nil)

	c.annotate(101, map[string]any{"public-ip": "192.168.77.222", "backend-data": fmt.Sprintf(`{"VtepMAC":%q}`, peerMAC(0xaa))})
	expectKernel(t, h, datapathLines("10.5.101.0/24", "192.168.77.222", peerMAC(0xaa)), c.peerEntries(101)[1:])

	c.deleteNode(101)
	expectKernel(t, h, c.peerEntries(100), []string{"10.5.101.0", peerMAC(0xaa)})

	c.addNodeWith(101, c.peerAnnotations(101), "10.5.150.0/24")
	expectKernel(t, h, datapathLines("10.5.150.0/24", c.peerIP(101), peerMAC(101)), []string{"10.5.101.0"})

	c.annotate(100, map[string]any{"kube-subnet-manager": nil, "public-ip": nil})
	expectLog(t, h.Daemon(), "keeps its last good state")
	expectKernel(t, h, c.peerEntries(100), nil)
}

// TestKubeOlderEtcd deletes a Node while the daemon is down. After its next start the
// daemon must remove the entries of this Node and no others from the kernel, and must not have
// reported that the API is not usable. Older etcds report little progress to the API server. So
// writes to other resources can leave the API server's cache of Nodes behind the store. This test
// makes such writes, but a daemon need not request a revision that the cache has not reached:
// TestEveryEtcd of subnet/kube does.
//
//stages:long TestEveryEtcd of subnet/kube shows more, and TestKubeNodesDeletedWhileDown the kernel
func TestKubeOlderEtcd(t *testing.T) {
	t.Parallel()
	for name, program := range map[string]string{"3.4": "/usr/bin/etcd", "3.5": "../../bin/tools/etcd-3.5", "3.6": "../../bin/tools/etcd-3.6"} {
		t.Run(name, func(t *testing.T) {
			program, err := filepath.Abs(program)
			if err != nil {
				t.Fatal(err)
			}
			c := newClusterOn(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`, program)
			c.addNode(100, c.peerAnnotations(100))
			c.addNode(101, c.peerAnnotations(101))
			c.startDaemons()
			h := c.Host(1)
			expectKernel(t, h, slices.Concat(c.peerEntries(100), c.peerEntries(101)), nil)
			otherwise := func() {
				c.do(http.MethodPost, "/api/v1/namespaces/default/configmaps", map[string]any{"metadata": map[string]any{"generateName": "other-"}}, "")
			}
			for _, step := range []struct {
				gone int
				left []string
			}{{100, c.peerEntries(101)}, {101, nil}} {
				if _, err := h.Daemon().Stop(testContext(t)); err != nil {
					t.Fatal(err)
				}
				c.kill()
				c.start()
				c.deleteNode(step.gone)
				otherwise()
				d := start(t, h, c.options(1))
				expectReady(t, d)
				expectKernel(t, h, step.left, []string{fmt.Sprintf("10.5.%d.0", step.gone), peerMAC(step.gone)})
				if log := d.Log(); strings.Contains(log, "not usable") {
					t.Errorf("the API was reported as not usable after node %d was deleted:\n%s", step.gone, log)
				}
				// After this write the revision in the daemon's next state file is higher
				// than that of the API server's cache. The cache does not reach this
				// revision by itself.
				otherwise()
			}
		})
	}
}

// TestKubeNodesDeletedWhileDown checks that a daemon removes the entries of a Node that was
// deleted while the daemon was down, and no others, both with its state file and without it.
//
//stages:rest it starts API servers
func TestKubeNodesDeletedWhileDown(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	c.addNode(100, c.peerAnnotations(100))
	c.addNode(101, c.peerAnnotations(101))
	c.startDaemons()
	h := c.Host(1)
	expectKernel(t, h, slices.Concat(c.peerEntries(100), c.peerEntries(101)), nil)
	for _, withState := range []bool{true, false} {
		if _, err := h.Daemon().Stop(testContext(t)); err != nil {
			t.Fatal(err)
		}
		gone, left := 100, c.peerEntries(101)
		if !withState {
			gone, left = 101, nil
			if err := os.RemoveAll(h.Path("/var/lib/flannel")); err != nil {
				t.Fatal(err)
			}
		}
		c.deleteNode(gone)
		expectReady(t, start(t, h, c.options(1)))
		expectKernel(t, h, left, []string{fmt.Sprintf("10.5.%d.0", gone), peerMAC(gone)})
	}
}

// TestKubeHostilePeers checks that the daemon refuses Nodes with wrong or hostile data,
// logs the reason, and still serves the other Nodes. It must also report a refusal in an
// Event on its own Node.
//
//stages:rest it starts an API server
func TestKubeHostilePeers(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	c.addNode(100, c.peerAnnotations(100))
	c.startDaemons()
	h := c.Host(1)
	expectKernel(t, h, c.peerEntries(100), nil)
	with := func(n int, key, value string) map[string]string {
		notes := c.peerAnnotations(n)
		notes[annotation(key)] = value
		return notes
	}
	const mac = `{"VNI":1,"VtepMAC":%q}`
	for n, bad := range map[int]struct {
		notes  map[string]string
		cidr   string
		reason string
	}{
		110: {c.peerAnnotations(110), "10.5.1.0/24", "10.5.1.0/24"},                                                   // the subnet of host 1
		111: {c.peerAnnotations(111), "10.5.100.0/24", "node100"},                                                     // the subnet of another Node
		112: {c.peerAnnotations(112), "10.5.0.0/17", "10.5.0.0/17"},                                                   // has many subnets inside, those of other Nodes too
		113: {c.peerAnnotations(113), "10.99.0.0/24", "10.99.0.0/24"},                                                 // outside the network
		114: {with(114, "backend-data", fmt.Sprintf(mac, "01:00:5e:00:00:01")), "10.5.114.0/24", "01:00:5e:00:00:01"}, // multicast
		115: {with(115, "backend-data", fmt.Sprintf(mac, peerMAC(100))), "10.5.115.0/24", peerMAC(100)},               // the MAC of another Node
		116: {with(116, "public-ip", h.Addr(4).String()), "10.5.116.0/24", h.Addr(4).String()},                        // the address of host 1
		117: {with(117, "public-ip", "0.0.0.0"), "10.5.117.0/24", "has no public IPv4 address"},                       // no address
		118: {with(118, "public-ip", "not an address"), "10.5.118.0/24", "not an address"},                            // not an address
		119: {with(119, "backend-data", `{"VtepMAC":`), "10.5.119.0/24", "not JSON"},                                  // truncated
		120: {with(120, "backend-data", "null"), "10.5.120.0/24", "no backend data"},                                  // no data
		121: {with(121, "backend-data", strings.Repeat(" ", 100_000)+"{}"), "10.5.121.0/24", "at most"},               // too long
		122: {with(122, "backend-type", "host-gw"), "10.5.122.0/24", `backend type is "host-gw"`},                     // another backend
	} {
		c.addNodeWith(n, bad.notes, bad.cidr)
		eventually(t, "refusal of "+nodeName(n), func() error {
			for _, line := range linesWith(h.Daemon(), nodeName(n)) {
				if strings.Contains(line, bad.reason) || strings.Contains(strings.ReplaceAll(line, `\`, ""), bad.reason) {
					return nil
				}
			}
			return fmt.Errorf("no line with %q in %q", bad.reason, linesWith(h.Daemon(), nodeName(n)))
		})
	}
	c.addNode(101, c.peerAnnotations(101))
	var lack []string
	for n := 114; n <= 122; n++ {
		lack = append(lack, fmt.Sprintf("10.5.%d.0", n))
	}
	expectKernel(t, h, slices.Concat(c.peerEntries(100), c.peerEntries(101)), append(lack, "10.99.0.0", "10.5.0.0/17 via", "10.5.1.0/24 via", peerMAC(110), peerMAC(111), peerMAC(113)))
	eventually(t, "an Event on the Node of host 1", func() error {
		if got := c.events(1); !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, "FlannelPeerRefused") }) {
			return fmt.Errorf("events are %q", got)
		}
		return nil
	})
}

// TestKubeWithoutAPIServer checks that daemons wait for an API server that is not there at
// their first start. If the API server is down later, packets must still be forwarded, even
// while a daemon restarts.
func TestKubeWithoutAPIServer(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	c.kill()
	for n := 1; n <= 2; n++ { // the first start, without a last known state
		start(t, c.Host(n), c.options(n))
		expectLog(t, c.Host(n).Daemon(), "the Kubernetes API is not usable")
	}
	c.start()
	for _, h := range c.Hosts() {
		expectReady(t, h.Daemon())
		expectLog(t, h.Daemon(), "the Kubernetes API is usable again")
	}
	if err := c.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	flows := startFlows(t, c.Lab, 200)

	// While the API server is away again, forwarding continues, also during a restart of a
	// daemon.
	c.kill()
	h := c.Host(1)
	pause(t, 2*time.Second)
	if _, err := h.Daemon().Stop(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(h.Path(lab.SubnetFile)); err != nil {
		t.Fatal(err)
	}
	start(t, h, c.options(1))
	expectLog(t, h.Daemon(), "going on from the last known state")
	eventually(t, "subnet file", func() error {
		_, err := os.Stat(h.Path(lab.SubnetFile))
		return err
	})
	pause(t, 2*time.Second)
	if status, body, err := h.Daemon().Get(testContext(t), "/readyz"); err == nil {
		t.Errorf("ready without the API server: %d %s", status, body)
	}
	c.start()
	expectReady(t, h.Daemon())
	c.addNode(100, c.peerAnnotations(100))
	for _, h := range c.Hosts() {
		expectKernel(t, h, c.peerEntries(100), nil)
		if err := h.Daemon().Ended(); err != nil {
			t.Error(err)
		}
	}
	expectNothingLost(t, flows)
}

// TestKubeWipedServer checks that no packet is lost if the API server loses its data and
// the Nodes register again one by one, as kubelets do.
//
//stages:rest it starts an API server
func TestKubeWipedServer(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 3}, `{"Type":"vxlan"}`)
	c.startDaemons()
	flows := startFlows(t, c.Lab, 200)
	c.kill()
	if err := c.Etcd().Wipe(testContext(t)); err != nil {
		t.Fatal(err)
	}
	c.start()
	c.addFlannelRole()
	pause(t, 2*time.Second)
	c.addNode(1, nil)
	expectLog(t, c.Host(1).Daemon(), "is not the store it was")
	pause(t, time.Second)
	c.addNode(2, nil)
	c.addNode(3, nil)
	for n := 1; n <= 3; n++ {
		eventually(t, "own annotations", func() error {
			if got := c.node(n).annotation("public-ip"); got != c.Host(n).Addr(4).String() {
				return fmt.Errorf("public-ip of %s is %q", nodeName(n), got)
			}
			return nil
		})
		c.expectNodeCondition(n, "False")
	}
	expectMatrix(t, c.Lab)
	expectNothingLost(t, flows)
}

// TestKubeOwnNode checks that the daemon waits for the podCIDR of its Node, and restores
// the Node's annotations and its condition NetworkUnavailable. If the device and the state
// file are lost, the daemon must take its MAC from the annotation. It must end if the Node
// gets another podCIDR.
//
//stages:rest it starts an API server of its own; TestKubeAnnotations shows what a node says of itself
func TestKubeOwnNode(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	h := c.Host(1)
	c.deleteNode(1)
	c.addNodeWith(1, map[string]string{annotation("public-ip-overwrite"): "198.51.100.1"})
	d := start(t, h, c.options(1))
	expectLog(t, d, "waiting for the API to give this node its subnet")
	if status, _, err := d.Get(testContext(t), "/healthz"); err != nil || status != http.StatusOK {
		t.Errorf("/healthz while it waits: %d, %v", status, err)
	}
	c.do(http.MethodPatch, nodesPath+"/node1", map[string]any{"spec": map[string]any{"podCIDR": "10.5.1.0/24", "podCIDRs": []string{"10.5.1.0/24"}}}, "application/merge-patch+json")
	expectReady(t, d)
	c.expectNodeCondition(1, "False")
	c.do(http.MethodPatch, nodesPath+"/node1/status", map[string]any{"status": map[string]any{"conditions": []any{
		map[string]any{"type": "NetworkUnavailable", "status": "True", "reason": "SomebodySaysSo"},
	}}}, "application/strategic-merge-patch+json")
	expectLog(t, d, `type="NetworkUnavailable" status="False" was="True"`)
	c.expectNodeCondition(1, "False")
	before := c.node(1)
	if before.annotation("public-ip") != "198.51.100.1" || before.annotation("backend-type") != "vxlan" || before.annotation("kube-subnet-manager") != "true" {
		t.Errorf("annotations are %v", before.Metadata.Annotations)
	}
	c.annotate(1, map[string]any{"public-ip": "6.6.6.6", "backend-data": nil, "kube-subnet-manager": nil})
	eventually(t, "annotations written again", func() error {
		if now := c.node(1); fmt.Sprint(now.Metadata.Annotations) != fmt.Sprint(before.Metadata.Annotations) {
			return fmt.Errorf("annotations are %v, want %v", now.Metadata.Annotations, before.Metadata.Annotations)
		}
		return nil
	})
	// From here on only the annotation still contains the MAC.
	if _, err := d.Stop(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Exec(testContext(t), "ip", "link", "del", "flannel.1"); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(h.Path("/var/lib/flannel")); err != nil {
		t.Fatal(err)
	}
	expectReady(t, start(t, h, c.options(1)))
	if now := c.node(1); now.annotation("backend-data") != before.annotation("backend-data") {
		t.Errorf("backend-data is %s, was %s", now.annotation("backend-data"), before.annotation("backend-data"))
	}
	c.deleteNode(1)
	c.addNodeWith(1, nil, "10.5.7.0/24")
	expectFailure(t, h.Daemon(), "subnet lease lost", "10.5.7.0/24", "10.5.1.0/24")
	expectReady(t, start(t, h, c.options(1)))
	expectKernel(t, h, nil, []string{"10.5.1.0"})
	env, err := os.ReadFile(h.Path(lab.SubnetFile))
	if err != nil || !strings.Contains(string(env), "FLANNEL_SUBNET=10.5.7.1/24") {
		t.Errorf("subnet file is %q, %v", env, err)
	}
}

// TestKubeRefusesToRun checks that the daemon exits with a reason if its podCIDR is outside
// the network, if a flag is invalid, or if it does not know the name of its Node.
//
//stages:rest it starts an API server
func TestKubeRefusesToRun(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	c.deleteNode(1)
	c.addNodeWith(1, nil, "10.6.1.0/24")
	expectFailure(t, start(t, c.Host(1), c.options(1)), "10.6.1.0/24", "10.5.0.0/16")
	if notes := c.node(1).Metadata.Annotations; len(notes) > 0 {
		t.Errorf("the refused Node has annotations: %v", notes)
	}
	if got := c.events(1); len(got) == 0 || !strings.Contains(got[0], "10.6.1.0/24") {
		t.Errorf("events are %q, want the first to name 10.6.1.0/24", got)
	}
	expectFailure(t, start(t, c.Host(1), c.options(1, "--kube-annotation-prefix=nonsense")), "--kube-annotation-prefix", "nonsense")
	without := c.options(1)
	without.Env = nil
	expectFailure(t, start(t, c.Host(1), without), "NODE_NAME", "POD_NAME")
}

// TestKubeNodeWithoutIPv6 starts a daemon without a state on a Node that has no IPv6 podCIDR, in a network
// that has IPv6. The host must serve IPv4, and IPv6 when the Node was created again with both.
//
//stages:rest flanneld tries again after half a minute
func TestKubeNodeWithoutIPv6(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 2, Families: dual}, `{"Type":"vxlan"}`)
	c.deleteNode(1)
	c.addNodeWith(1, nil, "10.5.1.0/24")
	c.startDaemons()
	expectOnce(t, c.Host(1).Daemon(), "this node has no IPv6 podCIDR")
	expectMatrixOf(t, c.Lab, prefix.IPv4)
	if got := c.node(1).annotation("public-ipv6"); got != "" {
		t.Errorf("public-ipv6 is %s, want none", got)
	}

	c.deleteNode(1)
	c.addNode(1, nil)
	within(t, time.Minute, "IPv6 is served", func() error {
		if got := c.node(1).annotation("public-ipv6"); got == "" {
			return errors.New("no annotation public-ipv6")
		}
		return nil
	})
	expectPeersProgrammed(t, c.Lab)
}

// TestKubeConditionIsNotChanged checks that the daemon does not set the condition
// NetworkUnavailable with --set-node-network-unavailable=false.
//
//stages:rest it starts an API server
func TestKubeConditionIsNotChanged(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	c.startDaemons("--set-node-network-unavailable=false")
	pause(t, time.Second)
	c.expectNodeCondition(1, "")
}

// TestKubeNodePublicIP checks that the daemon publishes the public address that an
// administrator has set in an annotation, and that this address does not prevent a start
// from the last known state.
//
//stages:rest it starts an API server
func TestKubeNodePublicIP(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	c.annotate(1, map[string]any{"node-public-ip": "198.51.100.7"})
	c.startDaemons()
	if got := c.node(1).annotation("public-ip"); got != "198.51.100.7" {
		t.Errorf("public-ip is %s, want 198.51.100.7", got)
	}
	h := c.Host(1)
	if _, err := h.Daemon().Stop(testContext(t)); err != nil {
		t.Fatal(err)
	}
	c.kill()
	expectLog(t, start(t, h, c.options(1)), "going on from the last known state")
}

// TestKubeImageSwapKeepsThePublishedAddress starts a daemon on a host on which flannel has published a /32, and
// that has a private alias on the same interface. Only the annotation tells which of the two is right.
//
//stages:rest it starts an API server
func TestKubeImageSwapKeepsThePublishedAddress(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	p := &damagedHost{lab: c.Lab, host: c.Host(1)}
	p.run(t, fmt.Sprintf(`ip addr flush dev eth0; ip addr add 192.168.7.1/24 dev eth0; ip addr add %[1]s/32 dev eth0
		ip route add %[2]s dev eth0 src %[1]s; ip route add 192.168.77.0/24 via %[2]s; ip route add default via %[2]s`, p.host.Addr(prefix.IPv4), routerOf(prefix.IPv4)))
	c.deleteNode(1)
	c.addNode(1, c.peerAnnotations(1))
	c.startDaemons()
	if got := c.node(1).annotation("public-ip"); got != "192.168.77.1" {
		t.Errorf("public-ip is %s, want 192.168.77.1", got)
	}
	expectMatrix(t, c.Lab)
}

// TestKubeNodeIP starts a daemon that uses the InternalIP of its Node, which is not the address that it would
// choose, and changes the InternalIP. The daemon must follow, and must start without the API server.
//
//stages:rest it starts an API server
func TestKubeNodeIP(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	p := &damagedHost{lab: c.Lab, host: c.Host(1)}
	p.run(t, "ip addr add 192.168.77.101/24 dev eth0; ip addr add 192.168.77.102/24 dev eth0")
	internalIP := func(ip string) {
		c.do(http.MethodPatch, nodesPath+"/"+nodeName(1)+"/status", map[string]any{"status": map[string]any{"addresses": []any{
			map[string]string{"type": "Hostname", "address": "192.168.77.1"}, map[string]string{"type": "InternalIP", "address": ip},
		}}}, "application/strategic-merge-patch+json")
	}
	internalIP("192.168.77.101")
	c.startDaemons("--iface=node-ip")
	expectOnce(t, p.host.Daemon(), "--iface node-ip 192.168.77.101")

	internalIP("192.168.77.102")
	p.run(t, "ip addr del 192.168.77.101/24 dev eth0")
	eventually(t, "annotation", func() error {
		if got := c.node(1).annotation("public-ip"); got != "192.168.77.102" {
			return fmt.Errorf("public-ip is %s", got)
		}
		return nil
	})

	expectStop(t, p.host.Daemon())
	c.kill()
	d := start(t, p.host, c.options(1, "--iface=node-ip"))
	expectLog(t, d, "going on from the last known state")
}

// TestKubeAddressChanges checks that the daemon publishes a new address of its host and
// follows Nodes afterwards. For this it must open a new connection to the API server,
// because one from the old address gets no answers, and times out only much later.
//
//stages:rest it starts an API server
func TestKubeAddressChanges(t *testing.T) {
	t.Parallel()
	c := newCluster(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
	c.startDaemons()
	expectMatrix(t, c.Lab)
	h := c.Host(1)
	began := time.Now()
	out, err := h.Exec(testContext(t), "sh", "-c",
		"ip addr del 192.168.77.1/24 dev eth0; ip addr add 192.168.77.101/24 dev eth0; ip route replace default via 192.168.77.254")
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	eventually(t, "annotation", func() error {
		if got := c.node(1).annotation("public-ip"); got != "192.168.77.101" {
			return fmt.Errorf("public-ip is %s", got)
		}
		return nil
	})
	t.Logf("published after %s", time.Since(began))
	expectMatrix(t, c.Lab)
	c.addNode(100, c.peerAnnotations(100))
	expectKernel(t, h, c.peerEntries(100), nil)
	if err := h.Daemon().Ended(); err != nil {
		t.Error(err)
	}
}
