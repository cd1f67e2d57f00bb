// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// TestIPv6OffByDefaultAndReadOnly starts a daemon that may not change a sysctl, as in a container without
// privileges. The host must serve IPv4 and name the sysctl, and follow when an operator changes it. A device of
// a former daemon has IPv6, but it is not the one that carries IPv6.
//
//stages:rest flanneld tries again after half a minute
func TestIPv6OffByDefaultAndReadOnly(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig("vxlan"))
	p := &damagedHost{lab: l, host: l.Host(1)}
	const off = "net.ipv6.conf.default.disable_ipv6"
	startOne(t, p.host, lab.FlanneldOptions{})
	expectStop(t, p.host.Daemon())
	p.run(t, "ip link del flannel-v6.1; sysctl -w "+off+"=1; mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys")
	for _, h := range l.Hosts() {
		startOne(t, h, lab.FlanneldOptions{})
	}
	expectOnce(t, p.host.Daemon(), "disable_ipv6 is 1 and flanneld may not change it")

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

// TestMovesEnd starts a daemon that prefers an address which comes and goes. After three moves in a minute it must
// stay with the other address, as long as that works, and say so.
func TestMovesEnd(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2}, backendConfig("vxlan"))
	p := &damagedHost{lab: l, host: l.Host(1)}
	startAll(t, l, lab.FlanneldOptions{Args: []string{"--iface=192.168.77.101", "--iface=192.168.77.1", "--iface=eth0"}})
	publishes := func(addr string) {
		t.Helper()
		eventually(t, "the lease has "+addr, func() error {
			if now := leases(t, l); !slices.ContainsFunc(now, func(l lease) bool { return l.PublicIP == addr }) {
				return fmt.Errorf("the leases are %v", now)
			}
			return nil
		})
	}
	const comes = "ip addr add 192.168.77.101/24 dev eth0"
	for range 2 {
		p.run(t, comes)
		publishes("192.168.77.101")
		p.run(t, "ip addr del 192.168.77.101/24 dev eth0")
		publishes("192.168.77.1") // the second time too, although it is the fourth move: nothing else works
	}
	p.run(t, comes)
	expectOnce(t, p.host.Daemon(), "the external interface has changed too often and is kept")
	publishes("192.168.77.1")
	expectMatrix(t, l)
}

// TestVMUplinks uses a bond, a VLAN, and a VLAN in a VRF as the external interface of all hosts. The kernel of
// this machine may lack them.
//
//stages:rest the kernel of the guest is emulated
func TestVMUplinks(t *testing.T) {
	const vlan = "ip link add link eth0 name up0 type vlan id 5; ip link set up0 up; ip addr add 10.50.0.%[1]d/24 dev up0"
	const bond = `ip link add up0 type bond mode active-backup miimon 100; ip addr flush dev eth0; ip link set eth0 down
		ip link set eth0 master up0; ip link set up0 up; ip addr add 192.168.77.%[1]d/24 dev up0; ip route add default via %[2]s`
	const vrf = "ip link add vrf0 type vrf table 10; ip link set vrf0 up; " + vlan + "; ip link set up0 master vrf0"
	for name, tc := range map[string]struct {
		backend, script string
		args            []string
		refused         string
	}{
		"vxlan, bond":     {backend: "vxlan", script: bond},
		"wireguard, bond": {backend: "wireguard", script: bond},
		"host-gw, VLAN":   {backend: "host-gw", script: vlan, args: []string{"--iface=up0"}},
		"vxlan, VRF":      {backend: "vxlan", script: vrf, args: []string{"--iface=up0"}},
		"host-gw, VRF":    {backend: "host-gw", script: vrf, args: []string{"--iface=up0"}, refused: "vrf0"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t, lab.Config{Hosts: 2}, backendConfig(tc.backend))
			for i, h := range l.Hosts() {
				p := &damagedHost{lab: l, host: h}
				p.run(t, fmt.Sprintf(tc.script+"; true %[1]d %[2]s", i+1, routerOf(prefix.IPv4)))
			}
			if tc.refused != "" {
				expectFailure(t, start(t, l.Host(1), lab.FlanneldOptions{Args: tc.args}), tc.refused)
				return
			}
			startAll(t, l, lab.FlanneldOptions{Args: tc.args})
			for _, h := range l.Hosts() {
				expectOnce(t, h.Daemon(), `"using interface" name="up0"`)
			}
			expectMatrix(t, l)
		})
	}
}
