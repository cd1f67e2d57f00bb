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

	"flanneld/pkg/lab"
	"flanneld/pkg/prefix"
)

// network is a dual-stack network configuration.
func network(v4, v6, backend string) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"Network":%q,"EnableIPv6":true,"IPv6Network":%q,"Backend":%s}`, v4, v6, backend))
}

// everything is all that a host's kernel holds.
func everything(t *testing.T, h *lab.Host) string {
	t.Helper()
	out, err := h.Exec(background(t), "sh", "-c", `ip -d link; ip addr; ip route show table all; ip -6 route show table all
		ip neigh show nud permanent; bridge fdb; ip nexthop 2>/dev/null || true`)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// TestConfigurationChange starts daemons again after the configuration has
// changed: nothing is left of the old one, and the new mesh works.
func TestConfigurationChange(t *testing.T) {
	t.Parallel()
	byCommands := extension(t, map[string]any{
		"SubnetAddCommand":    "ip route add $SUBNET via $PUBLIC_IP && ip -6 route add $IPV6SUBNET via $PUBLIC_IPV6",
		"SubnetRemoveCommand": "ip route del $SUBNET via $PUBLIC_IP; ip -6 route del $IPV6SUBNET via $PUBLIC_IPV6",
	})
	const ours4, ours6, others4, others6 = "10.5.0.0/16", "fd00:5::/48", "10.6.0.0/16", "fd00:6::/48"
	for _, tc := range []struct {
		name  string
		steps []json.RawMessage
		left  []string // what must not be seen after the last step
	}{
		{"VNI", []json.RawMessage{network(ours4, ours6, `{"Type":"vxlan"}`), network(ours4, ours6, `{"Type":"vxlan","VNI":7}`)},
			[]string{"flannel.1:", "flannel-v6.1:", "flannel.1 ", "flannel-v6.1 "}},
		{"port", []json.RawMessage{network(ours4, ours6, `{"Type":"vxlan"}`), network(ours4, ours6, `{"Type":"vxlan","Port":8473}`)},
			[]string{"dstport 8472"}},
		{"vxlan to host-gw", []json.RawMessage{network(ours4, ours6, `{"Type":"vxlan"}`), network(ours4, ours6, `{"Type":"host-gw"}`)},
			[]string{"flannel"}},
		{"and back", []json.RawMessage{
			network(ours4, ours6, `{"Type":"vxlan"}`), network(ours4, ours6, `{"Type":"host-gw"}`), network(ours4, ours6, `{"Type":"vxlan"}`),
		}, []string{".0/24 via 192.168.77", "::/64 via fd00:77"}},
		{"Network", []json.RawMessage{network(ours4, ours6, `{"Type":"vxlan"}`), network(others4, others6, `{"Type":"vxlan"}`)},
			[]string{"10.5.", "fd00:5:"}},
		{"Network without devices", []json.RawMessage{network(ours4, ours6, `{"Type":"host-gw"}`), network(others4, others6, `{"Type":"host-gw"}`)},
			[]string{"10.5.", "fd00:5:"}},
		{"all at once", []json.RawMessage{network(ours4, ours6, `{"Type":"vxlan","VNI":7}`), network(others4, others6, `{"Type":"host-gw"}`)},
			[]string{"10.5.", "fd00:5:", "flannel"}},
		{"commands and back", []json.RawMessage{
			network(ours4, ours6, byCommands), network(ours4, ours6, `{"Type":"vxlan"}`), network(ours4, ours6, byCommands),
		}, []string{"flannel"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 3, Families: dual, Network: tc.steps[0]}, "")
			for i, step := range tc.steps {
				restartWith(t, l, step, i%2 == 1)
			}
			if err := l.AddPods(background(t)); err != nil {
				t.Fatal(err)
			}
			expectMatrix(t, l)
			for _, h := range l.Hosts() {
				eventually(t, h.Name(), func() error {
					all := everything(t, h)
					for _, text := range tc.left {
						if strings.Contains(all, text) {
							return fmt.Errorf("%q is still to be seen:\n%s", text, all)
						}
					}
					return nil
				})
				expectNothingFormer(t, h)
			}
		})
	}
}

// expectNothingFormer waits until the state file of a host names nothing more that is
// to be removed: the next start would do it again, whoever has that by then.
func expectNothingFormer(t *testing.T, h *lab.Host) {
	t.Helper()
	eventually(t, "state file of "+h.Name(), func() error {
		names, err := filepath.Glob(h.Path("/var/lib/flannel/flanneld-????????????.json")) // not what backends keep
		if err != nil || len(names) != 1 {
			return fmt.Errorf("state files %q, %w", names, err)
		}
		text, err := os.ReadFile(names[0])
		if err == nil && (strings.Contains(string(text), `"former":`) || strings.Contains(string(text), `"rules":`)) {
			err = fmt.Errorf("it has what was to be removed: %s", text)
		}
		return err
	})
}

// restartWith stops all daemons, or kills them, and starts them with another
// configuration.
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
	if err := l.PutNetwork(background(t), config); err != nil {
		t.Fatal(err)
	}
	var g errgroup.Group
	ctx := background(t)
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
				if r.Protocol == ownProtocol || r.Protocol == bootProtocol && r.Via.IsValid() && r.Dst.Bits() > 0 {
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

// ownProtocol marks flanneld's routes, bootProtocol those that ip(8) makes.
const (
	ownProtocol  = 98
	bootProtocol = 3
)

// TestConfigurationChangeAndLostSubnet: the device of the old VNI holds the address of
// the gateway to a peer, which has our subnet by now. It goes, and the peer is reached.
func TestConfigurationChangeAndLostSubnet(t *testing.T) {
	t.Parallel()
	for _, families := range [][]prefix.Family{v4, v6} {
		t.Run(name(families), func(t *testing.T) {
			t.Parallel()
			const old, next = `{"Type":"vxlan"}`, `{"Type":"vxlan","VNI":7}`
			l := newLab(t, lab.Config{Hosts: 1, Families: families}, old)
			h, f, c := l.Host(1), families[0], store(t, l)
			expectStop(t, startOne(t, h, lab.FlanneldOptions{}))
			own := nodes(t, l)[0]
			remove(t, c, subnets+own.key)
			other := newNode(t, families, "vxlan", 210, func(f prefix.Family) netip.Addr { return netip.MustParseAddr(routerOf(f)) })
			other.key = own.key
			other.publish(t, c)
			const config = lab.Prefix + "/config"
			got, err := c.Get(background(t), config)
			if err != nil {
				t.Fatal(err)
			}
			put(t, c, config, strings.Replace(string(got.Kvs[0].Value), old, next, 1))
			startOne(t, h, lab.FlanneldOptions{})
			eventually(t, "the former device goes and the peer is reached", func() error {
				all := everything(t, h)
				route := fmt.Sprintf("%s via %s dev %s7", own.subnets[f], own.subnets[f].Addr(), strings.TrimSuffix(device(f), "1"))
				if strings.Contains(all, device(f)+":") || !strings.Contains(all, route) {
					return fmt.Errorf("want no %s, and %q in:\n%s", device(f), route, all)
				}
				return nil
			})
		})
	}
}

// TestFormerDeviceIsForgotten: once the device of the former VNI is removed its name is
// the operator's, also when the external interface changes.
func TestFormerDeviceIsForgotten(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"vxlan"}`)
	h := l.Host(1)
	expectStop(t, startOne(t, h, lab.FlanneldOptions{}))
	putNetwork(t, l, v4, `{"Type":"vxlan","VNI":7}`)
	d := startOne(t, h, lab.FlanneldOptions{})
	expectLog(t, d, "removed what a former configuration had left")
	for _, mtu := range []string{"1400", "1450"} {
		out, err := h.Exec(background(t), "sh", "-ec",
			"ip link show flannel.1 || ip link add flannel.1 type vxlan id 99 dstport 4789; ip link set eth0 mtu "+mtu)
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		expectLog(t, d, " mtu="+mtu+" ") // of the external interface, which has changed
		pause(t, time.Second)
	}
	if all := everything(t, h); !strings.Contains(all, "flannel.1:") {
		t.Errorf("the operator's device is gone:\n%s", all)
	}
	expectOnce(t, d, "removed what a former configuration had left")
}

// TestConfigurationChangeInterrupted kills the daemon at various moments after
// the change: the old configuration is not forgotten before it is cleared away.
func TestConfigurationChangeInterrupted(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1, Families: dual, Network: network("10.5.0.0/16", "fd00:5::/48", `{"Type":"vxlan","VNI":1}`)}, "")
	h := l.Host(1)
	startOne(t, h, lab.FlanneldOptions{})
	for vni, ms := range []int{5, 15, 25, 35, 45, 55, 65, 80, 100, 150, 0} {
		h.Daemon().Kill()
		config := network("10.5.0.0/16", "fd00:5::/48", fmt.Sprintf(`{"Type":"vxlan","VNI":%d}`, vni+2))
		if err := l.PutNetwork(background(t), config); err != nil {
			t.Fatal(err)
		}
		if ms == 0 {
			startOne(t, h, lab.FlanneldOptions{})
			break
		}
		d := start(t, h, lab.FlanneldOptions{})
		pause(t, millis(ms))
		d.Kill()
	}
	eventually(t, "two devices", func() error {
		if n := strings.Count(everything(t, h), "vxlan id "); n != 2 {
			return fmt.Errorf("%d vxlan devices:\n%s", n, everything(t, h))
		}
		return nil
	})
}
