// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"errors"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/test/blame"
)

// nodeFault is a fault of one node, and what flannelctl in the pod of flanneld there must say about it.
type nodeFault struct {
	name        string
	node        int
	cause, cure string // commands of a shell on the node
	// The words of doctor and check, or none if pods are not cut off, or if flanneld mends the fault itself.
	words blame.Words
}

// nodeFaults returns faults that people and other programs cause on nodes. Node 0 has iptables-nft, and node 1
// iptables-legacy.
func (c *cluster) nodeFaults() []nodeFault {
	pods := c.podNetworks()
	return []nodeFault{
		{
			name: "rule drops what pods send", node: 1,
			cause: "iptables-legacy -I FORWARD -s " + pods + " -j DROP",
			cure:  "iptables-legacy -D FORWARD -s " + pods + " -j DROP",
			words: blame.Words{Doctor: "iptables-legacy drops forwarded packets of pods", Check: "firewall"},
		},
		{
			name: "VPN takes packets of pods",
			cause: `ip link add vpn0 type veth peer name vpn1
				ip link set vpn0 up
				ip route add ` + pods + ` dev vpn0 table 52
				ip rule add lookup 52 pref 5270`,
			cure: `ip rule del pref 5270
				ip link del vpn0`,
			words: blame.Words{Doctor: "5270", Check: "rule"},
		},
		{
			name:  "firewall drops the tunnel",
			cause: "iptables-nft -I INPUT -p udp --dport 8472 -j DROP",
			cure:  "iptables-nft -D INPUT -p udp --dport 8472 -j DROP",
			words: blame.Words{Doctor: "iptables-nft drops packets of other hosts to UDP port 8472", Check: "firewall"},
		},
		{
			name: "node does not forward", node: 1,
			cause: "sysctl -w net.ipv4.conf.all.forwarding=0",
			cure:  "sysctl -w net.ipv4.conf.all.forwarding=1",
			words: blame.Words{Doctor: "IPv4 is not forwarded", Check: "forwarding"},
		},
		{
			name: "rule redirects packets of pods", node: 1,
			cause: "iptables-legacy -t nat -I PREROUTING -i cni0 -d " + pods + " -j DNAT --to-destination 192.0.2.1",
			cure:  "iptables-legacy -t nat -D PREROUTING -i cni0 -d " + pods + " -j DNAT --to-destination 192.0.2.1",
			words: blame.Words{Doctor: "iptables-legacy redirects forwarded packets of pods", Check: "firewall"},
		},
		{
			name: "bridge has the address of a former subnet",
			cause: `ip -o -4 addr show cni0 | awk '{ print $4 }' >/run/cni0
				ip addr add 10.244.250.1/24 dev cni0
				ip addr del $(cat /run/cni0) dev cni0`,
			cure: `ip addr add $(cat /run/cni0) dev cni0
				ip addr del 10.244.250.1/24 dev cni0`,
			words: blame.Words{Doctor: "cni0 has the address 10.244.250.1/24", Check: "bridge"},
		},
		{
			name: "rule drops all that the node forwards", node: 1,
			cause: "iptables-legacy -I FORWARD -j DROP",
			cure:  "iptables-legacy -D FORWARD -j DROP",
		},
		{name: "tunnel is down", cause: "ip link set flannel.1 down"},
		{name: "tunnel has another MTU", node: 1, cause: "ip link set flannel.1 mtu 1000"},
		{
			name:  "VPN takes packets to other networks",
			cause: "ip route add blackhole 10.9.0.0/16 table 52 && ip rule add lookup 52 pref 5270",
			cure:  "ip rule del pref 5270 && ip route flush table 52",
		},
		{
			name: "policy drops what no rule permits", node: 1,
			cause: "iptables-legacy -P FORWARD DROP",
			cure:  "iptables-legacy -P FORWARD ACCEPT",
		},
	}
}

// expectFaults causes one fault after the other on a node of a cluster with vxlan and IPv4. It measures that pods do not
// reach each other, and asks flannelctl on all nodes, as the page about troubleshooting says. On the node with the fault,
// doctor and check must fail, and blame the fault and nothing else. On the others, doctor must find nothing, and check
// nothing but the network. After the cure, or without words, pods must reach each other, and all commands succeed.
func (c *cluster) expectFaults() {
	c.t.Helper()
	pods := c.testPods()
	var daemons []string // by number of the node
	for _, n := range c.nodes {
		daemons = append(daemons, c.daemonPod(n))
	}
	faults := c.nodeFaults()
	words := map[string]blame.Words{}
	for _, f := range faults {
		words[f.name] = f.words
	}

	for _, f := range faults {
		c.t.Run(f.name, func(t *testing.T) {
			n := c.nodes[f.node]
			n.run("sh", "-ec", f.cause)
			cure := sync.OnceFunc(func() { n.run("sh", "-ec", f.cure) })
			defer cure()
			if f.words.Doctor != "" {
				if c.connect(pods) == nil {
					t.Error("pods reach each other in spite of the fault")
				}
				c.expectBlamed(t, f, daemons, words)
				cure()
			}

			waittest.Eventually(t, 20*time.Second, "pods reach each other, and all commands succeed", func() error {
				if err := c.connect(pods); err != nil {
					return err
				}
				var asked errgroup.Group
				for _, pod := range daemons {
					for _, command := range []string{"doctor", "check"} {
						asked.Go(func() error {
							_, err := c.flannelctl(pod, command)
							return err
						})
					}
				}
				return asked.Wait()
			})
		})
	}
}

// expectBlamed asks flannelctl in the pods of flanneld about a fault. all has the words of all faults.
func (c *cluster) expectBlamed(t *testing.T, f nodeFault, daemons []string, all map[string]blame.Words) {
	t.Helper()
	var asked sync.WaitGroup
	for i, pod := range daemons {
		broken := i == f.node
		words := blame.Words{Check: "network"}
		if broken {
			words = f.words
		}
		for _, command := range []string{"doctor", "check"} {
			asked.Go(func() {
				out, err := c.flannelctl(pod, command)
				failure := (*exec.ExitError)(nil)
				failed := errors.As(err, &failure) && failure.ExitCode() == 1
				if text := words.Text(command); broken && (!failed || !strings.Contains(out, text)) {
					t.Errorf("%v, want exit code 1 and %q in\n%s", err, text, out)
				}
				if !broken && command == "doctor" && err != nil {
					t.Errorf("on another node: %v", err)
				}
				for _, err := range words.Wrong(command, out, all) {
					t.Errorf("%s: %v", c.nodes[i].Name(), err)
				}
			})
		}
	}
	asked.Wait()
}

// flannelctl runs a command of flannelctl in a pod of flanneld, and returns what it prints to the standard output.
// kubectl mixes the two outputs.
func (c *cluster) flannelctl(pod, command string) (string, error) {
	return c.try(background(c.t), "exec", "--namespace=kube-flannel", pod, "--container=kube-flannel", "--",
		"sh", "-c", "flannelctl "+command+" 2>/dev/null")
}

// connect returns an error unless each pod gets an answer of the next one, and the last pod one of the first.
func (c *cluster) connect(pods []pod) error {
	var asked errgroup.Group
	for i, from := range pods {
		asked.Go(func() error {
			server := netip.AddrPortFrom(netip.MustParseAddr(pods[(i+1)%len(pods)].addrs[0]), 8080)
			_, err := c.try(background(c.t), "exec", from.name, "--",
				"curl", "--silent", "--show-error", "--max-time", "2", "http://"+server.String())
			return err
		})
	}
	return asked.Wait()
}
