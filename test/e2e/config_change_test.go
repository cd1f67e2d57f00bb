// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// network returns a dual-stack network configuration with these networks. backend is a JSON
// object.
func network(v4, v6, backend string) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"Network":%q,"EnableIPv6":true,"IPv6Network":%q,"Backend":%s}`, v4, v6, backend))
}

// kernelObjects returns the output of ip(8) and bridge(8) about the devices, addresses, routes,
// permanent neighbours, FDB entries and nexthop objects of a host.
func kernelObjects(t *testing.T, h *lab.Host) string {
	t.Helper()
	out, err := h.Exec(testContext(t), "sh", "-c", `ip -d link; ip addr; ip route show table all; ip -6 route show table all
		ip neigh show nud permanent; bridge fdb; ip nexthop 2>/dev/null || true`)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// TestConfigurationChange checks that daemons that start again with another configuration remove
// all objects of the former one, and that all pods reach each other.
func TestConfigurationChange(t *testing.T) {
	t.Parallel()
	byCommands := extensionConfig(t, map[string]any{
		"SubnetAddCommand":    "ip route add $SUBNET via $PUBLIC_IP && ip -6 route add $IPV6SUBNET via $PUBLIC_IPV6",
		"SubnetRemoveCommand": "ip route del $SUBNET via $PUBLIC_IP; ip -6 route del $IPV6SUBNET via $PUBLIC_IPV6",
	})
	const ours4, ours6, others4, others6 = "10.5.0.0/16", "fd00:5::/48", "10.6.0.0/16", "fd00:6::/48"
	for _, tc := range []struct {
		name  string
		steps []json.RawMessage
		left  []string // texts that kernelObjects must not contain for any host after the last step
	}{
		{"VNI", []json.RawMessage{network(ours4, ours6, `{"Type":"vxlan"}`), network(ours4, ours6, `{"Type":"vxlan","VNI":7}`)},
			[]string{"flannel.1:", "flannel-v6.1:", "flannel.1 ", "flannel-v6.1 "}},
		{"port", []json.RawMessage{network(ours4, ours6, `{"Type":"vxlan"}`), network(ours4, ours6, `{"Type":"vxlan","Port":8473}`)},
			[]string{"dstport 8472"}},
		{"vxlan to host-gw", []json.RawMessage{network(ours4, ours6, `{"Type":"vxlan"}`), network(ours4, ours6, `{"Type":"host-gw"}`)},
			[]string{"flannel"}},
		{"vxlan to host-gw and back", []json.RawMessage{
			network(ours4, ours6, `{"Type":"vxlan"}`), network(ours4, ours6, `{"Type":"host-gw"}`), network(ours4, ours6, `{"Type":"vxlan"}`),
		}, []string{".0/24 via 192.168.77", "::/64 via fd00:77"}},
		{"Network", []json.RawMessage{network(ours4, ours6, `{"Type":"vxlan"}`), network(others4, others6, `{"Type":"vxlan"}`)},
			[]string{"10.5.", "fd00:5:"}},
		{"Network without devices", []json.RawMessage{network(ours4, ours6, `{"Type":"host-gw"}`), network(others4, others6, `{"Type":"host-gw"}`)},
			[]string{"10.5.", "fd00:5:"}},
		{"all at once", []json.RawMessage{network(ours4, ours6, `{"Type":"vxlan","VNI":7}`), network(others4, others6, `{"Type":"host-gw"}`)},
			[]string{"10.5.", "fd00:5:", "flannel"}},
		{"extension to vxlan and back", []json.RawMessage{
			network(ours4, ours6, byCommands), network(ours4, ours6, `{"Type":"vxlan"}`), network(ours4, ours6, byCommands),
		}, []string{"flannel"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 3, Families: dual, Network: tc.steps[0]}, "")
			for i, step := range tc.steps {
				restartWith(t, l, step, i%2 == 1)
			}
			if err := l.AddPods(testContext(t)); err != nil {
				t.Fatal(err)
			}
			expectMatrix(t, l)
			for _, h := range l.Hosts() {
				eventually(t, h.Name()+" has no objects of the former configuration", func() error {
					all := kernelObjects(t, h)
					for _, text := range tc.left {
						if strings.Contains(all, text) {
							return fmt.Errorf("%q is still there:\n%s", text, all)
						}
					}
					return nil
				})
				expectNoFormer(t, h)
			}
		})
	}
}

// expectNoFormer waits until the state file of a host lists no objects to remove. Otherwise the
// next start would remove listed objects again, even if they belong to another program by then.
func expectNoFormer(t *testing.T, h *lab.Host) {
	t.Helper()
	eventually(t, "state file of "+h.Name(), func() error {
		text, err := readState(h)
		if err == nil && (strings.Contains(text, `"former":`) || strings.Contains(text, `"rules":`)) {
			err = fmt.Errorf("it still lists objects to remove: %s", text)
		}
		return err
	})
}

// readState returns the content of the state file of a host with one network.
func readState(h *lab.Host) (string, error) {
	names, err := filepath.Glob(h.Path("/var/lib/flannel/flanneld-????????????.json")) // not the files of backends
	if err != nil {
		return "", err
	}
	if len(names) != 1 {
		return "", fmt.Errorf("state files %q, want one", names)
	}
	text, err := os.ReadFile(names[0])
	return string(text), err
}

// restartWith stops or kills all daemons that run, writes the configuration and starts a daemon
// on each host. It waits until all daemons are ready, and each host has at least two routes for
// each other host, because there are two families.
func restartWith(t *testing.T, l *lab.Lab, config json.RawMessage, kill bool) {
	t.Helper()
	for _, h := range l.Hosts() {
		switch d := h.Daemon(); {
		case d == nil:
		case kill:
			d.Kill()
		default:
			expectStop(t, d)
		}
	}
	if err := l.PutNetwork(testContext(t), config); err != nil {
		t.Fatal(err)
	}
	var g errgroup.Group
	ctx := testContext(t)
	for _, h := range l.Hosts() {
		g.Go(func() error {
			d, err := h.StartFlanneld(ctx, lab.FlanneldOptions{})
			if err != nil {
				return err
			}
			return d.Ready(ctx)
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "each host has a route to each other", func() error {
		for _, h := range l.Hosts() {
			routes, err := h.Routes(ctx)
			if err != nil {
				return err
			}
			n := 0
			for _, r := range routes {
				if r.Protocol == ownProtocol && !r.Refuses || r.Protocol == bootProtocol && r.Via.IsValid() && r.Dst.Bits() > 0 {
					n++
				}
			}
			if want := 2 * (len(l.Hosts()) - 1); n < want {
				return fmt.Errorf("%s has %d routes, want %d: %v", h.Name(), n, want, routes)
			}
		}
		return nil
	})
}

// ownProtocol is the protocol of flanneld's routes, bootProtocol that of routes that ip(8) adds.
const (
	ownProtocol  = 98
	bootProtocol = 3
)

// TestConfigurationChangeAndLostSubnet changes the VNI while a host is down and its subnet goes
// to a peer. The device of the former VNI has an address that is now the peer's gateway. The
// daemon must remove this device and add the route to the peer.
//
//stages:rest TestConfigurationChange keeps the subnet
func TestConfigurationChangeAndLostSubnet(t *testing.T) {
	t.Parallel()
	for _, families := range [][]prefix.Family{v4, v6} {
		t.Run(familiesName(families), func(t *testing.T) {
			t.Parallel()
			const old, next = `{"Type":"vxlan"}`, `{"Type":"vxlan","VNI":7}`
			l := newLab(t, lab.Config{Hosts: 1, Families: families}, old)
			h, f, c := l.Host(1), families[0], etcdClient(t, l)
			expectStop(t, startOne(t, h, lab.FlanneldOptions{}))
			own := nodes(t, l)[0]
			removeKey(t, c, subnets+own.key)
			other := newNode(t, families, "vxlan", 210, func(f prefix.Family) netip.Addr { return netip.MustParseAddr(routerOf(f)) })
			other.key = own.key
			other.publish(t, c)
			const config = lab.Prefix + "/config"
			got, err := c.Get(testContext(t), config)
			if err != nil {
				t.Fatal(err)
			}
			putKey(t, c, config, strings.Replace(string(got.Kvs[0].Value), old, next, 1))
			startOne(t, h, lab.FlanneldOptions{})
			eventually(t, "the former device is removed and the peer has a route", func() error {
				all := kernelObjects(t, h)
				route := fmt.Sprintf("%s via %s dev %s7", own.subnets[f], own.subnets[f].Addr(), strings.TrimSuffix(device(f), "1"))
				if strings.Contains(all, device(f)+":") || !strings.Contains(all, route) {
					return fmt.Errorf("want no %s, and %q in:\n%s", device(f), route, all)
				}
				return nil
			})
		})
	}
}

// TestFormerDeviceIsForgotten checks that the daemon removes the device of a former VNI only
// once. Afterwards an operator may use its name, even if the external interface changes.
//
//stages:rest TestConfigurationChange looks at the devices of the new configuration
func TestFormerDeviceIsForgotten(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	h := l.Host(1)
	expectStop(t, startOne(t, h, lab.FlanneldOptions{}))
	putNetwork(t, l, v4, `{"Type":"vxlan","VNI":7}`)
	d := startOne(t, h, lab.FlanneldOptions{})
	expectLog(t, d, "removed what a former configuration had left")
	for _, mtu := range []string{"1400", "1450"} {
		out, err := h.Exec(testContext(t), "sh", "-ec",
			"ip link show flannel.1 || ip link add flannel.1 type vxlan id 99 dstport 4789; ip link set eth0 mtu "+mtu)
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		expectLog(t, d, " mtu="+mtu+" ") // shows that the daemon has noticed the change of the interface
		pause(t, time.Second)
	}
	if all := kernelObjects(t, h); !strings.Contains(all, "flannel.1:") {
		t.Errorf("the daemon removed the operator's device:\n%s", all)
	}
	expectOnce(t, d, "removed what a former configuration had left")
}

// TestConfigurationChangeInterrupted checks that the daemon remembers a former configuration
// until all of its objects are removed. The daemon starts with a new VNI again and again, and is
// killed 5 to 150 ms after each start. The last daemon is not killed, and must remove the
// devices of all former VNIs.
//
//stages:rest TestConfigurationChange removes what the former configuration has left
func TestConfigurationChangeInterrupted(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: network("10.5.0.0/16", "fd00:5::/48", `{"Type":"vxlan","VNI":1}`)}, "")
	h := l.Host(1)
	startOne(t, h, lab.FlanneldOptions{})
	for vni, ms := range []int{5, 15, 25, 35, 45, 55, 65, 80, 100, 150, 0} {
		h.Daemon().Kill()
		config := network("10.5.0.0/16", "fd00:5::/48", fmt.Sprintf(`{"Type":"vxlan","VNI":%d}`, vni+2))
		if err := l.PutNetwork(testContext(t), config); err != nil {
			t.Fatal(err)
		}
		if ms == 0 {
			startOne(t, h, lab.FlanneldOptions{})
			break
		}
		d := start(t, h, lab.FlanneldOptions{})
		pause(t, milliseconds(ms))
		d.Kill()
	}
	eventually(t, "only the two devices of the last VNI are left", func() error {
		if n := strings.Count(kernelObjects(t, h), "vxlan id "); n != 2 {
			return fmt.Errorf("there are %d vxlan devices, want 2:\n%s", n, kernelObjects(t, h))
		}
		return nil
	})
}
