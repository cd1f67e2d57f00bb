// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/test/lab"
)

// tunIndex returns the number of the device flannel0, or 0 if there is none.
func tunIndex(t *testing.T, h *lab.Host) (n int) {
	t.Helper()
	out, err := h.Exec(testContext(t), "sh", "-c", "ip -o link show flannel0 2>/dev/null || true")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = fmt.Sscanf(string(out), "%d:", &n)
	return n
}

// TestUDPWithoutABackend checks that pods reach each other with a configuration without
// Backend, which means udp. The leases must contain neither backend type nor data, like
// those of flannel.
func TestUDPWithoutABackend(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Network: []byte(`{"Network":"10.5.0.0/16"}`)}, "")
	startAll(t, l, lab.FlanneldOptions{})
	expectMatrix(t, l)
	for _, lease := range leases(t, l) {
		if strings.Contains(lease.Value, "Backend") {
			t.Errorf("lease %s: %s, want neither backend type nor data", lease.Key, lease.Value)
		}
	}
}

// TestUDPHealing damages the device and the routes of the user-space path, one after the
// other, and checks that the daemon repairs them.
//
//stages:rest it repairs one damage after the other; TestHealing does so with other backends
func TestUDPHealing(t *testing.T) {
	t.Parallel()
	newDamagedHost(t, "udp", dual).testAllRepairs(t)
}

// TestUDPStop checks that a stopped or killed daemon leaves neither device nor routes except for the unreachable one of
// the network, and that the next start creates both again.
func TestUDPStop(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig("udp"))
	startAll(t, l, lab.FlanneldOptions{})
	h := l.Host(1)
	for _, end := range []func(){func() { expectStop(t, h.Daemon()) }, func() { h.Daemon().Kill() }, func() { expectStop(t, h.Daemon()) }} {
		expectMatrix(t, l)
		end()
		eventually(t, "nothing is left", func() error {
			out, err := h.Exec(testContext(t), "sh", "-c", "{ ip route show proto 98; ip -6 route show proto 98; } | sed /^unreachable/d")
			if n := tunIndex(t, h); err == nil && (n != 0 || len(out) != 0) {
				err = fmt.Errorf("device %d, routes %q", n, out)
			}
			return err
		})
		startOne(t, h, lab.FlanneldOptions{})
	}
	expectMatrix(t, l)
}

// TestUDPNetworkConflict checks that the packets of IPv4 are carried although another
// device takes those of IPv6, even when the daemon must create its own device again.
//
//stages:rest TestUserspaceWireGuardNetworkConflict has such a device with another backend
func TestUDPNetworkConflict(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig("udp"))
	startAll(t, l, lab.FlanneldOptions{})
	expectMatrix(t, l)
	h := l.Host(1)
	network := lab.PodNetwork(prefix.IPv6)
	at := netip.PrefixFrom(network.Addr().Next(), network.Bits()).String() + " dev br0"
	shell(t, h.Namespace, "ip link add br0 up type bridge; ip addr add "+at+" nodad")
	eventually(t, "/readyz", func() error {
		if _, body, err := h.Daemon().Get(testContext(t), "/readyz"); err == nil || !strings.Contains(body, "directly connected to br0") {
			return fmt.Errorf("the answer is %q, %w", body, err)
		}
		return nil
	})
	shell(t, h.Namespace, "ip link del flannel0")
	pods := l.Pods()
	eventually(t, "IPv4", func() error {
		_, err := pods[0].Ping(testContext(t), pods[1].Addrs()[0], lab.Echo{})
		return err
	})
	shell(t, h.Namespace, "ip addr del "+at)
	expectReady(t, h.Daemon())
	expectMatrix(t, l)
}

// TestUDPPersist checks that the device stays while a daemon with --udp-persist is
// stopped or killed. Pods then wait for an answer instead of getting an error. A daemon
// without the flag must remove the device when it stops.
func TestUDPPersist(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig("udp"))
	options := lab.FlanneldOptions{Args: []string{"--udp-persist"}}
	startAll(t, l, options)
	h := l.Host(1)
	number := tunIndex(t, h)
	expectMatrix(t, l)
	for _, end := range []func(){func() { expectStop(t, h.Daemon()) }, func() { h.Daemon().Kill() }} {
		end()
		_, err := l.Pods()[0].Ping(testContext(t), l.Pods()[1].Addrs()[0], lab.Echo{Timeout: 300 * time.Millisecond})
		if _, unreachable := errors.AsType[ping.UnreachableError](err); err == nil || unreachable {
			t.Errorf("a ping without a daemon: %v, want a timeout", err)
		}
		startOne(t, h, options)
		if n := tunIndex(t, h); n != number {
			t.Errorf("device number %d, want %d as before", n, number)
		}
		expectMatrix(t, l)
	}
	expectStop(t, h.Daemon())
	startOne(t, h, lab.FlanneldOptions{})
	expectStop(t, h.Daemon())
	if n := tunIndex(t, h); n != 0 {
		t.Errorf("device number %d still exists, want none without --udp-persist", n)
	}
}

// TestUDPPeers checks that leases with the type or the data of another backend are
// refused, and that packets of unknown senders are dropped and counted.
func TestUDPPeers(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig("udp"))
	startAll(t, l, lab.FlanneldOptions{})
	c := etcdClient(t, l)
	putKey(t, c, lab.Prefix+"/subnets/10.5.201.0-24", `{"PublicIP":"192.168.77.201","BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}}`)
	putKey(t, c, lab.Prefix+"/subnets/10.5.202.0-24", `{"PublicIP":"192.168.77.202","BackendData":{"VNI":1}}`)
	putKey(t, c, lab.Prefix+"/subnets/10.5.203.0-24", `{"PublicIP":"192.168.77.203","BackendData":null}`)
	d := l.Host(1).Daemon()
	expectLog(t, d, `"lease refused" lease="10.5.201.0-24"`)
	expectLog(t, d, `"lease refused" lease="10.5.202.0-24"`)
	conn, err := l.Underlay().Dial(testContext(t), "udp", netip.AddrPortFrom(l.Host(1).Addr(v4[0]), 8285).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(make([]byte, 40)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the drop in the metrics", func() error {
		_, text, err := d.Get(testContext(t), "/metrics")
		for _, line := range []string{`flannel_udp_dropped_packets_total{reason="unknown_peer"} 1`, `flannel_backend_info{mode="userspace",type="udp"} 1`, `flannel_peers{state="served"} 2`} {
			if err == nil && !strings.Contains(text, line+"\n") {
				err = fmt.Errorf("no line %s", line)
			}
		}
		return err
	})
	expectMatrix(t, l)
}

// TestUDPRefuses checks that the daemon exits with one line that names the reason if its
// settings are invalid or its device name is taken.
func TestUDPRefuses(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, `{"Type":"udp","Mode":"warp"}`)
	expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{}), `Backend.Mode is \"warp\": want userspace`)
	network, err := lab.NetworkConfig(v4, []byte(`{"Type":"udp"}`))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.PutNetwork(testContext(t), network); err != nil {
		t.Fatal(err)
	}
	if out, err := l.Host(1).Exec(testContext(t), "ip", "link", "add", "flannel0", "type", "bridge"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{}), "there is a device of that name which is no TUN device")
	if out, err := l.Host(1).Exec(testContext(t), "ip", "link", "del", "flannel0"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{Args: []string{"--udp-source-check=maybe"}}), "expected strict or network or off")
	hideTUN(t, l.Host(1))
	expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{}), "open /dev/net/tun: no such file or directory (load the module tun")
}

// TestUDPFamilies uses udp, then another backend, and then udp with other address families: with live
// changes, in migrations and after a restart. Each time the hosts have other lease keys, and the
// same IPv4 subnets, on which the pods must reach each other.
func TestUDPFamilies(t *testing.T) {
	t.Parallel()
	const ipv4 = `{"Network":"10.5.0.0/16","Backend":%s}`
	config := func(families int, backend string) json.RawMessage {
		if families == 1 {
			return json.RawMessage(fmt.Sprintf(ipv4, backend))
		}
		return json.RawMessage(dualConfig("", backend))
	}
	const udp, former = `{"Type":"udp"}`, `{"Type":"vxlan"}`
	for _, first := range []int{1, 2} {
		second := 3 - first
		t.Run(fmt.Sprintf("%d to %d", first, second), func(t *testing.T) {
			t.Parallel()
			for _, tt := range []struct {
				name  string
				steps []json.RawMessage
				check func(*testing.T, *lab.Lab) // after the last step
			}{
				{"live", []json.RawMessage{config(first, udp), config(first, former), config(second, udp)}, nil},
				{"in place", []json.RawMessage{config(first, udp), config(second, udp)}, nil},
				{
					"migration",
					[]json.RawMessage{
						config(first, former+`,"NextBackend":`+udp), config(first, former), config(second, former+`,"NextBackend":`+udp),
					},
					func(t *testing.T, l *lab.Lab) { eventuallyMigrated(t, l, "udp") },
				},
			} {
				t.Run(tt.name, func(t *testing.T) {
					t.Parallel()
					l := newLab(t, lab.Config{Hosts: 2, Families: dual, Network: tt.steps[0]}, "")
					startAll(t, l, lab.FlanneldOptions{})
					expectMatrixOf(t, l, prefix.IPv4)
					e := newEdits(t, l)
					for _, step := range tt.steps[1:] {
						e.put(string(step))
					}
					if tt.check != nil {
						tt.check(t, l)
					}
					expectMatrixOf(t, l, prefix.IPv4)

					expectStop(t, l.Host(1).Daemon())
					startOne(t, l.Host(1), lab.FlanneldOptions{})
					expectPeersProgrammed(t, l)
					if tt.check != nil {
						tt.check(t, l)
					}
					expectMatrixOf(t, l, prefix.IPv4)
				})
			}
		})
	}
}
