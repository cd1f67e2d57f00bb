// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// TestDefaultRoutesOfOthers adds default routes with a better metric than that of the external interface,
// as DHCP clients and VPNs do: through the bridge of the pods, through flanneld's own device, and through a
// VPN. Each time the host must keep its lease and its address, also over a restart, and no packet may be
// lost.
func TestDefaultRoutesOfOthers(t *testing.T) {
	t.Parallel()
	for backend, device := range map[string]string{"vxlan": "flannel.1", "host-gw": "", "udp": "flannel0", userspace: "flannel-wg"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2}, backendConfig(backend))
			startAll(t, l, lab.FlanneldOptions{})
			p := &damagedHost{lab: l, backend: backend, host: l.Host(1)}
			flows := startFlows(t, l, 100)
			had := leaseOf(t, l, p.host)
			kept := func(when string) {
				t.Helper()
				if now := leaseOf(t, l, p.host); now != had {
					t.Errorf("%s: the lease is %v, want %v", when, now, had)
				}
			}
			p.run(t, fmt.Sprintf("ip route add default via %s dev eth0 metric 100; ip route del default metric 0", routerOf(prefix.IPv4)))
			ways := map[string]string{
				"the bridge of the pods": "dev cni0 metric 50",
				"a VPN":                  "via 10.8.0.1 dev tun0 metric 50",
			}
			if device != "" {
				ways["the own device"] = "dev " + device + " metric 50"
			}
			p.run(t, "ip link add tun0 type veth peer name far; ip link set far up; ip link set tun0 up; ip addr add 10.8.0.6/24 dev tun0")
			for name, way := range ways {
				p.run(t, "ip route add default "+way)
				pause(t, 1500*time.Millisecond) // three times as long as a change of the choice takes
				kept(name)
				p.run(t, "ip route del default "+way)
			}
			p.run(t, "ip route del default metric 100; ip route add default dev cni0")
			pause(t, 1500*time.Millisecond)
			kept("only the bridge of the pods")
			expectNothingLost(t, flows)

			for name, way := range ways {
				if name == "the own device" {
					continue // some backends remove it when they stop
				}
				expectStop(t, p.host.Daemon())
				p.run(t, "ip route replace default "+way)
				startOne(t, p.host, lab.FlanneldOptions{})
				kept("restart with " + name)
				expectMatrix(t, l)
			}
		})
	}
}

// TestPodsWithoutUplink starts a daemon on a host whose external interface is not usable, as at a boot
// without a link. The subnet file must be written from the last known state. When the interface is back, the
// hosts must have the same leases, even if the interface has another address then, and all pods must reach
// each other.
func TestPodsWithoutUplink(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ backend, away, back string }{
		"without address":       {"vxlan", "ip addr flush dev eth0", "ip addr add %[1]s/24 dev eth0; ip route add default via %[2]s"},
		"down":                  {"host-gw", "ip link set eth0 down", "ip link set eth0 up; ip route add default via %[2]s"},
		"without default route": {"vxlan", "ip route del default", "ip route add default via %[2]s"},
		"another address later": {"vxlan", "ip addr flush dev eth0; ip link del flannel.1", "ip addr add 192.168.77.101/24 dev eth0; ip route add default via %[2]s"},
		"without anything":      {"udp", "ip link set eth0 name away; ip addr flush dev away; ip link set away down", "ip link set away name eth0; ip addr add %[1]s/24 dev eth0; ip link set eth0 up; ip route add default via %[2]s"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2}, backendConfig(tc.backend))
			startAll(t, l, lab.FlanneldOptions{})
			expectConverged(t, l)
			p := &damagedHost{lab: l, host: l.Host(1)}
			keys := func() (all []string) {
				for _, one := range leases(t, l) {
					all = append(all, one.Key)
				}
				return all
			}
			had := keys()
			expectStop(t, p.host.Daemon())
			file := p.host.Path(lab.SubnetFile)
			before, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			p.run(t, tc.away)
			d := start(t, p.host, lab.FlanneldOptions{})
			eventually(t, "the subnet file is there", func() error {
				now, err := os.ReadFile(file)
				if err == nil && string(now) != string(before) {
					err = fmt.Errorf("it is %s, want %s", now, before)
				}
				return err
			})
			p.run(t, fmt.Sprintf(tc.back, p.host.Addr(prefix.IPv4), routerOf(prefix.IPv4)))
			expectReady(t, d)
			if now := keys(); !slices.Equal(now, had) {
				t.Errorf("the leases are %q, want %q", now, had)
			}
			expectMatrix(t, l)
		})
	}
}

// TestImageSwapKeepsThePublishedAddress starts a daemon without a state on a host that has published a
// /32, as flannel does, and that has a private alias on the same interface. The lease must stay.
func TestImageSwapKeepsThePublishedAddress(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig("vxlan"))
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	p := &damagedHost{lab: l, host: l.Host(1)}
	had := leaseOf(t, l, p.host)
	expectStop(t, p.host.Daemon())
	if out, err := flannelctl(t, p.host, "interface", "--no-daemon"); err != nil || !strings.Contains(out, "its address is in use") {
		t.Errorf("after a stop flannelctl does not name the address in use: %v\n%s", err, out)
	}
	state := p.host.Path("/var/lib/flannel")
	if _, err := os.Stat(state); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(state); err != nil {
		t.Fatal(err)
	}
	p.run(t, fmt.Sprintf(`ip addr flush dev eth0; ip addr add 192.168.7.1/24 dev eth0; ip addr add %[1]s/32 dev eth0
		ip route add %[2]s dev eth0 src %[1]s; ip route add default via %[2]s src %[1]s`, p.host.Addr(prefix.IPv4), routerOf(prefix.IPv4)))
	startOne(t, p.host, lab.FlanneldOptions{})
	if all := leases(t, l); len(all) != 2 || leaseOf(t, l, p.host).Key != had.Key {
		t.Errorf("the leases are %v, want two, and %s of this host", all, had.Key)
	}
	expectMatrix(t, l)
}

// TestIPv6OffByDefault starts daemons on hosts where new devices get no IPv6, which many guides on
// hardening recommend. In dual stack both families must work all the same.
func TestIPv6OffByDefault(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"vxlan", "udp", userspace} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig(backend))
			byDefault := func(value string) {
				for _, h := range l.Hosts() {
					if out, err := h.Exec(testContext(t), "sysctl", "-w", "net.ipv6.conf.default.disable_ipv6="+value); err != nil {
						t.Fatalf("%v\n%s", err, out)
					}
				}
			}
			byDefault("1")
			for _, h := range l.Hosts() {
				startOne(t, h, lab.FlanneldOptions{})
			}
			byDefault("0") // for the pods, whose devices other programs create
			if err := l.AddPods(testContext(t)); err != nil {
				t.Fatal(err)
			}
			expectMatrix(t, l)
		})
	}
}

// TestIPv6OffByDefaultAndReadOnly starts a daemon that may not change a sysctl, as in a container without
// privileges. The host must serve IPv4 and name the sysctl, and follow when an operator changes it.
//
//stages:rest flanneld tries again after half a minute
func TestIPv6OffByDefaultAndReadOnly(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig("vxlan"))
	p := &damagedHost{lab: l, host: l.Host(1)}
	const off = "net.ipv6.conf.default.disable_ipv6"
	p.run(t, "sysctl -w "+off+"=1; mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys")
	for _, h := range l.Hosts() {
		startOne(t, h, lab.FlanneldOptions{})
	}
	expectOnce(t, p.host.Daemon(), off+" is 1")

	p.run(t, "umount /proc/sys; sysctl -w "+off+"=0")
	if err := l.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	expectMatrixOf(t, l, prefix.IPv4)
	within(t, time.Minute, "IPv6 is served", func() error {
		if now := leaseOf(t, l, p.host); !strings.Contains(now.Key, "fd00") {
			return fmt.Errorf("the lease is %s", now.Key)
		}
		return nil
	})
}
