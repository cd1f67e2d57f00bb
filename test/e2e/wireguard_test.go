// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// TestVMWireGuardEveryPodReachesEveryPod checks with the WireGuard of the kernel that every pod
// reaches every other, and that the MTU is right.
func TestVMWireGuardEveryPodReachesEveryPod(t *testing.T) {
	testEveryPodReachesEveryPod(t, "wireguard", dual)
}

// TestVMWireGuardOfOneFamily is TestVMWireGuardEveryPodReachesEveryPod with a single address
// family.
//
//stages:long TestVMWireGuardEveryPodReachesEveryPod does the same with both families
func TestVMWireGuardOfOneFamily(t *testing.T) { testFamilies(t, "wireguard", v4, v6) }

// TestVMWireGuardRestartsUnderTraffic checks that restarts lose no packet with the
// WireGuard of the kernel.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMWireGuardRestartsUnderTraffic(t *testing.T) { testRestartsUnderTraffic(t, "wireguard") }

// TestVMWireGuardHealing damages the device and the routes of the backend, one after the other, and
// checks that the daemon repairs them.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMWireGuardHealing(t *testing.T) { newDamagedHost(t, "wireguard", dual).testAllRepairs(t) }

// TestUserspaceWireGuardEveryPodReachesEveryPod checks with WireGuard in user space that every pod
// reaches every other, and that the MTU is right.
func TestUserspaceWireGuardEveryPodReachesEveryPod(t *testing.T) {
	t.Parallel()
	testFamilies(t, userspace, v4, v6, dual)
}

// TestUserspaceWireGuardHealing damages the device and the routes of the backend, one after the
// other, and checks that the daemon repairs them. After the device was deleted, the log must say that
// packets are lost meanwhile, and why.
//
//stages:rest it repairs one damage after the other; TestHealing does so with other backends
func TestUserspaceWireGuardHealing(t *testing.T) {
	t.Parallel()
	p := newDamagedHost(t, userspace, dual)
	p.testAllRepairs(t)
	expectLog(t, p.host.Daemon(), `"WireGuard in user space has ended, starting it again: packets are lost meanwhile" err="the TUN device was deleted"`)
}

// TestAloneUserspaceWireGuardRestarts kills a daemon, starts it again, and then does the same with a
// stop. No flow may have a gap of more than two seconds. Without a daemon no packet is carried,
// because the daemon itself encrypts. The test needs the whole machine, because on a busy one the
// start alone may take that long.
//
//stages:rest it restarts a daemon again and again
func TestAloneUserspaceWireGuardRestarts(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig(userspace))
	startAll(t, l, lab.FlanneldOptions{})
	flows := startFlows(t, l, 100)
	for _, kill := range []bool{true, false} {
		if kill {
			l.Host(1).Daemon().Kill()
		} else {
			expectStop(t, l.Host(1).Daemon())
		}
		startOne(t, l.Host(1), lab.FlanneldOptions{})
		pause(t, 500*time.Millisecond)
	}
	expectMatrix(t, l)
	for _, f := range flows {
		s := f.Stop()
		t.Logf("%s: %d of %d lost, longest gap %v", f.name, len(s.Lost), s.Sent, s.Gap)
		if s.Gap > 2*time.Second { // about 50ms on an idle machine
			t.Errorf("%s: a gap of %v, want at most 2s", f.name, s.Gap)
		}
	}
}

// TestVMWireGuardMixed checks that hosts with WireGuard in the kernel and a host with WireGuard in
// user space reach each other, with each value of Backend.Mode, or with -short with two of them.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMWireGuardMixed(t *testing.T) {
	modes := []string{"separate", "auto", "ipv4", "ipv6"}
	if testing.Short() {
		modes = modes[:2]
	}
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			l := newLab(t, lab.Config{Hosts: 3, Families: dual}, "")
			for i, implementation := range []string{"kernel", "auto", "userspace"} {
				putNetwork(t, l, dual, fmt.Sprintf(`{"Type":"wireguard","Mode":%q,"Implementation":%q,"PSK":%q}`, mode, implementation, oldPSK))
				log := `implementation="kernel"`
				if implementation == "userspace" {
					log = `implementation="userspace"`
				}
				expectLog(t, startOne(t, l.Host(i+1), lab.FlanneldOptions{}), log)
			}
			if err := l.AddPods(testContext(t)); err != nil {
				t.Fatal(err)
			}
			expectConverged(t, l)
		})
	}
}

// TestVMWireGuardImplementations changes between WireGuard in the kernel and in user space, after
// stops and kills of the daemon. The daemon must replace the device of the former implementation.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMWireGuardImplementations(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig(userspace))
	startAll(t, l, lab.FlanneldOptions{})
	h := l.Host(1)
	for i, backend := range []string{"wireguard", userspace, "wireguard", userspace} {
		if i < 2 {
			expectStop(t, h.Daemon())
		} else {
			h.Daemon().Kill()
		}
		putNetwork(t, l, dual, backendConfig(backend))
		startOne(t, h, lab.FlanneldOptions{})
		expectImplementation(t, h, backend)
		expectMatrix(t, l)
	}
}

// TestUserspaceWireGuardIdleClient checks that the daemon follows a new address of its host, and
// stops, although a program has opened a connection to the socket of the device and sends nothing.
func TestUserspaceWireGuardIdleClient(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig(userspace))
	startAll(t, l, lab.FlanneldOptions{})
	expectMatrix(t, l)
	h := l.Host(1)
	idle := func() {
		t.Helper()
		c, err := net.Dial("unix", h.Path("/run/wireguard/flannel-wg.sock"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
	}
	idle()
	shell(t, h.Namespace, "ip addr flush dev eth0 scope global; ip addr add 192.168.77.77/24 dev eth0; ip route add default via 192.168.77.254")
	expectLog(t, h.Daemon(), "this host's lease is up to date")
	expectMatrix(t, l)
	idle()
	expectStop(t, h.Daemon())
}

// TestUserspaceWireGuardForeignDevice checks that the daemon exits if a device of another
// type has the name of its device.
func TestUserspaceWireGuardForeignDevice(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, backendConfig(userspace))
	h := l.Host(1)
	if out, err := h.Exec(testContext(t), "ip", "link", "add", "flannel-wg", "type", "bridge"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	expectFailure(t, start(t, h, lab.FlanneldOptions{}), "device flannel-wg is of type bridge, want tun: remove it (ip link delete flannel-wg)")
}

// TestUserspaceWireGuardClonedDisk starts a daemon with a copy of the state of another host, or of its key
// alone. The two hosts must have different keys and reach each other. If an operator gives both the same key,
// they must refuse each other's lease and log why.
//
//stages:rest TestClonedDisk has the state of another host
func TestUserspaceWireGuardClonedDisk(t *testing.T) {
	t.Parallel()
	const disk = "/var/lib/flannel"
	for name, tc := range map[string]struct {
		keep    string // files that are copied
		env     []string
		refused bool
	}{
		"state and key":       {keep: "*"},
		"key":                 {keep: "wgkey"},
		"key of the operator": {keep: "wgkey", env: []string{"WIREGUARD_KEY_FILE=" + disk + "/wgkey"}, refused: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2}, backendConfig(userspace))
			one, two := l.Host(1), l.Host(2)
			startOne(t, one, lab.FlanneldOptions{})
			expectStop(t, one.Daemon()) // it has written its state
			if err := os.CopyFS(two.Path(disk), os.DirFS(one.Path(disk))); err != nil {
				t.Fatal(err)
			}
			if out, err := two.Exec(testContext(t), "find", disk, "-type", "f", "!", "-name", tc.keep, "-delete"); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			startOne(t, one, lab.FlanneldOptions{})
			startOne(t, two, lab.FlanneldOptions{Env: tc.env})
			if !tc.refused {
				if err := l.AddPods(testContext(t)); err != nil {
					t.Fatal(err)
				}
				expectMatrix(t, l)
				return
			}
			shared := wg(t, one, "show", "flannel-wg", "public-key")
			for _, h := range l.Hosts() {
				expectLog(t, h.Daemon(), fmt.Sprintf(`reason="its public key %s is that of this node"`, shared))
			}
		})
	}
}

// TestUserspaceWireGuardNetworkConflict checks a host on which another device takes the packets to
// all pods. They would leave through that device without encryption. So the daemon must exit at its
// start, and must not be ready if the device gets its address later.
func TestUserspaceWireGuardNetworkConflict(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, backendConfig(userspace))
	h := l.Host(1)
	const why = "put route 10.5.0.0/16 dev flannel-wg: 10.5.0.0/16 is directly connected to br0"
	shell(t, h.Namespace, "ip link add br0 up type bridge; ip addr add 10.5.255.254/16 dev br0")
	expectFailure(t, start(t, h, lab.FlanneldOptions{}), why)
	shell(t, h.Namespace, "ip addr del 10.5.255.254/16 dev br0")
	startOne(t, h, lab.FlanneldOptions{})
	d := h.Daemon()
	shell(t, h.Namespace, "ip addr add 10.5.255.254/16 dev br0")
	eventually(t, "/readyz", func() error {
		if _, body, err := d.Get(testContext(t), "/readyz"); err == nil || !strings.Contains(body, why) {
			return fmt.Errorf("the answer is %q, %w", body, err)
		}
		return nil
	})
	shell(t, h.Namespace, "ip addr del 10.5.255.254/16 dev br0")
	expectReady(t, d)
}

// wg runs wg(8) on a host and returns the output. The test fails if wg fails.
func wg(t *testing.T, h *lab.Host, args ...string) string {
	t.Helper()
	out, err := h.Exec(testContext(t), "wg", args...)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return strings.TrimSpace(string(out))
}

// TestVMWireGuardKeys is TestUserspaceWireGuardKeys with the WireGuard of the kernel.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMWireGuardKeys(t *testing.T) {
	testWireGuardKeys(t, "wireguard")
}

// TestUserspaceWireGuardKeys checks that a host keeps its private key through a boot, and that its
// peers learn its new public key if the file of the key is deleted. The daemon must undo what another
// program changes about the peers on the device.
func TestUserspaceWireGuardKeys(t *testing.T) {
	testWireGuardKeys(t, userspace)
}

func testWireGuardKeys(t *testing.T, backend string) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig(backend))
	o := lab.FlanneldOptions{Args: []string{"--resync=1s", "-v=9"}}
	startAll(t, l, o)
	expectMatrix(t, l)
	one, two := l.Host(1), l.Host(2)
	expectImplementation(t, one, backend)
	file := one.Path("/var/lib/flannel/wgkey")
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("private key file: %v, mode %v, want 0600", err, info.Mode())
	}
	had := wg(t, one, "show", "flannel-wg", "public-key")
	if peers := wg(t, two, "show", "flannel-wg", "peers"); peers != had {
		t.Errorf("peers of %s are %q, want %q", two.Name(), peers, had)
	}

	wg(t, two, "set", "flannel-wg", "peer", had, "remove")
	wg(t, two, "set", "flannel-wg", "peer", "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=", "allowed-ips", "10.5.0.0/16")
	eventually(t, "peers put right", func() error {
		if peers := wg(t, two, "show", "flannel-wg", "peers"); peers != had {
			return fmt.Errorf("peers are %q, want %q", peers, had)
		}
		return nil
	})
	expectMatrix(t, l)

	// A boot removes the device, but not the file of the key. If both are missing, the daemon creates
	// a new key.
	boot := func() {
		t.Helper()
		expectStop(t, one.Daemon())
		if out, err := one.Exec(testContext(t), "ip", "link", "del", "flannel-wg"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	boot()
	startOne(t, one, o)
	if now := wg(t, one, "show", "flannel-wg", "public-key"); now != had {
		t.Errorf("public key is %s, want %s as before the boot", now, had)
	}
	expectMatrix(t, l)
	boot()
	private, err := os.ReadFile(file)
	if err != nil || strings.Contains(one.Daemon().Log(), strings.TrimSpace(string(private))) {
		t.Errorf("the private key cannot be read, or the log contains it: %v", err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	startOne(t, one, o)
	eventually(t, "new key", func() error {
		now := wg(t, one, "show", "flannel-wg", "public-key")
		if peers := wg(t, two, "show", "flannel-wg", "peers"); peers != now || now == had {
			return fmt.Errorf("peers are %q, want %q, which is not %q", peers, now, had)
		}
		return nil
	})
	expectMatrix(t, l)
}

// expectImplementation checks that the log, the status and the metrics report the implementation of
// WireGuard. backend is the argument of backendConfig.
func expectImplementation(t *testing.T, h *lab.Host, backend string) {
	t.Helper()
	want := "kernel"
	if backend == userspace {
		want = "userspace"
	}
	expectLog(t, h.Daemon(), fmt.Sprintf(`"WireGuard is in use" implementation=%q`, want))
	if n := statusOf(t, h).Network; n.Mode != want {
		t.Errorf("mode in the status is %q, want %q", n.Mode, want)
	}
	if v := metric(t, h, fmt.Sprintf(`flannel_backend_info{mode=%q,type="wireguard"}`, want)); v != 1 {
		t.Errorf("flannel_backend_info of this mode is %v, want 1", v)
	}
}

// TestUserspaceWireGuardBehindNAT checks that a host keeps sending to the port of a NAT that it has
// learned from packets. At the port in its lease, the host behind the NAT cannot be reached.
//
//stages:long TestUserspaceWireGuardBetweenNATs has two hosts behind NATs
func TestUserspaceWireGuardBehindNAT(t *testing.T) { testWireGuardBehindNAT(t, userspace) }

// TestVMWireGuardBehindNAT is TestUserspaceWireGuardBehindNAT with the WireGuard of the
// kernel.
//
//stages:long TestVMWireGuardClockStep has such a NAT
func TestVMWireGuardBehindNAT(t *testing.T) { testWireGuardBehindNAT(t, "wireguard") }

func testWireGuardBehindNAT(t *testing.T, backend string) {
	t.Parallel()
	config := strings.TrimSuffix(backendConfig(backend), "}") + `,"PersistentKeepaliveInterval":1}`
	l := newLab(t, lab.Config{Hosts: 2}, config)
	open, hidden := l.Host(1), l.Host(2)
	addNAT(t, hidden)
	startAll(t, l, lab.FlanneldOptions{Args: []string{"--resync=1s"}})
	flows := startFlows(t, l, 50)
	learnt := expectLearnedEndpoint(t, open)
	// Meanwhile another lease is added and deleted, so that the daemon checks all peers again.
	c := etcdClient(t, l)
	for range 3 {
		putKey(t, c, subnets+"10.5.200.0-24", `{"PublicIP":"192.168.77.200","BackendType":"wireguard","BackendData":{"PublicKey":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=","Port":51820}}`)
		pause(t, time.Second)
		removeKey(t, c, subnets+"10.5.200.0-24")
		pause(t, time.Second)
	}
	if now := wg(t, open, "show", "flannel-wg", "endpoints"); now != learnt {
		t.Errorf("%s sends to %q, want %q, which it has learnt", open.Name(), now, learnt)
	}
	expectNothingLost(t, flows)
}

// TestVMWireGuardClockStep steps the clock forward, with WireGuard in the kernel and in user space.
// Afterwards a host must still send to the port of a NAT that it has learned.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMWireGuardClockStep(t *testing.T) {
	if !emulated() {
		t.Fatal("this test steps the machine's clock: run it in the guest")
	}
	for _, backend := range []string{"wireguard", userspace} {
		t.Run(backend, func(t *testing.T) {
			l := newLab(t, lab.Config{Hosts: 2}, backendConfig(backend))
			open, hidden := l.Host(1), l.Host(2)
			addNAT(t, hidden)
			startAll(t, l, lab.FlanneldOptions{Args: []string{"--resync=1s"}})
			if err := l.AddPods(testContext(t)); err != nil {
				t.Fatal(err)
			}
			pods := firstPods(l)
			eventually(t, "the host behind the NAT reaches the other, which learns its port", func() error {
				_, err := pods[1].Ping(testContext(t), pods[0].Addr(prefix.IPv4), lab.Echo{})
				if err == nil && !behindNAT(learnedEndpoint(t, open)) {
					err = errors.New("the daemon has written the endpoint of the lease meanwhile: the next packet corrects it")
				}
				return err
			})
			learnt := learnedEndpoint(t, open)
			pause(t, 3*time.Second) // in this time the daemon reads from the device to which port it sends
			stepMachineClock(t, time.Hour)
			defer stepMachineClock(t, -time.Hour)
			pause(t, 3*time.Second)
			if now := wg(t, open, "show", "flannel-wg", "endpoints"); now != learnt {
				t.Errorf("%s sends to %q, want %q, which it has learnt", open.Name(), now, learnt)
			}
			if _, err := pods[0].Ping(testContext(t), pods[1].Addr(prefix.IPv4), lab.Echo{}); err != nil {
				t.Errorf("the host behind the NAT cannot be reached: %v", err)
			}
		})
	}
}

// stepMachineClock steps the clock of the whole machine by d.
func stepMachineClock(t *testing.T, d time.Duration) {
	t.Helper()
	at := unix.NsecToTimespec(time.Now().Add(d).UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &at); err != nil {
		t.Fatal(err)
	}
}

// addNAT makes a host behave as if it were behind a NAT. Its firewall drops packets to WireGuard from
// hosts to which WireGuard has not sent, and changes the port from which WireGuard sends.
func addNAT(t *testing.T, h *lab.Host) {
	t.Helper()
	nft(t, h.Namespace, `
		table ip nat {
			chain out { type nat hook postrouting priority srcnat; oifname eth0 udp sport 51820 masquerade to :40000-40999; }
		}
		table ip filter {
			chain in { type filter hook input priority filter; iifname eth0 udp dport 51820 ct state new drop; }
		}`)
}

// expectLearnedEndpoint waits until h sends to a port of addNAT, and returns this endpoint as
// learnedEndpoint does. The host behind the NAT must be sending packets.
func expectLearnedEndpoint(t *testing.T, h *lab.Host) (learnt string) {
	t.Helper()
	eventually(t, h.Name()+" sends to a port of the NAT", func() error {
		if learnt = learnedEndpoint(t, h); !behindNAT(learnt) {
			return fmt.Errorf("it sends to %q", learnt)
		}
		return nil
	})
	return learnt
}

// learnedEndpoint returns the public key of the only peer of h and the endpoint to which h sends, as
// wg(8) prints them.
func learnedEndpoint(t *testing.T, h *lab.Host) string {
	t.Helper()
	return wg(t, h, "show", "flannel-wg", "endpoints")
}

// behindNAT reports whether a result of learnedEndpoint has a port of addNAT.
func behindNAT(endpoint string) bool { return strings.Contains(endpoint, ":40") }

// TestUserspaceWireGuardDeviceReplaced changes the mode between two that have devices of other names, on other ports. Two
// hosts that change at nearly the same time may each start a session with the former device of the other one. They must
// have another session at once, and not only when they notice after 15 s that there is no answer.
//
//stages:rest pods that were cut off would have packets again after 15 s
func TestUserspaceWireGuardDeviceReplaced(t *testing.T) {
	t.Parallel()
	config := func(mode string) json.RawMessage {
		return json.RawMessage(fmt.Sprintf(`{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:5::/48","Backend":{"Type":"wireguard","Implementation":"userspace","Mode":%q}}`, mode))
	}
	l := newLab(t, lab.Config{Hosts: 3, Families: v6, Network: config("ipv6")}, "")
	startAll(t, l, lab.FlanneldOptions{})
	e := newEdits(t, l)
	for _, mode := range []string{"separate", "ipv6", "separate", "ipv6"} {
		flows := startFlows(t, l, 100)
		e.put(string(config(mode)))
		pause(t, 6*time.Second)
		for i, s := range stopFlows(flows) {
			if s.Gap > 3*time.Second {
				t.Errorf("to mode %s: no packet from %s arrived for %s", mode, flows[i].name, s.Gap)
			}
		}
	}
}

// TestUserspaceWireGuardPortInUse checks that the daemon exits with the reason if another
// program listens on its UDP port.
func TestUserspaceWireGuardPortInUse(t *testing.T) { testPortInUse(t, userspace) }

// TestVMWireGuardPortInUse is TestUserspaceWireGuardPortInUse with the WireGuard of the
// kernel.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMWireGuardPortInUse(t *testing.T) { testPortInUse(t, "wireguard") }

func testPortInUse(t *testing.T, backend string) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 1}, backendConfig(backend))
	err := l.Host(1).Do(testContext(t), func() error {
		c, err := new(net.ListenConfig).ListenPacket(t.Context(), "udp4", "0.0.0.0:51820")
		if err == nil {
			t.Cleanup(func() { c.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{}), "another program listens on UDP port 51820")
}
