// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	"github.com/flanneld/flanneld/test/lab"
)

// TestVMIPIPEveryPodReachesEveryPod checks with ipip that all pods reach each other, and that
// the MTU is right.
func TestVMIPIPEveryPodReachesEveryPod(t *testing.T) { testEveryPodReachesEveryPod(t, "ipip", dual) }

// TestVMIPIPOfOneFamily is TestVMIPIPEveryPodReachesEveryPod with a single address family.
//
//stages:long TestVMIPIPEveryPodReachesEveryPod does the same with both families
func TestVMIPIPOfOneFamily(t *testing.T) { testFamilies(t, "ipip", v4, v6) }

// TestVMIPIPDirectRouting checks DirectRouting with ipip, as TestDirectRouting does with vxlan.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMIPIPDirectRouting(t *testing.T) { testDirectRouting(t, "ipip") }

// TestVMIPIPRestartsUnderTraffic checks with ipip that restarts of the daemon lose no packets.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMIPIPRestartsUnderTraffic(t *testing.T) { testRestartsUnderTraffic(t, "ipip") }

// TestVMIPIPHealing checks with ipip that the daemon repairs all damages of a damagedHost.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMIPIPHealing(t *testing.T) { newDamagedHost(t, "ipip", dual).testAllRepairs(t) }

// TestVMIPIPForeignDevice checks starts on a host where a device occupies the name or the
// address of the tunnel. If that device belongs to another program, the daemon must exit and
// name it. A tunnel with flannel's name must become the same as one that the daemon creates:
// one to a single address, and one as another flannel daemon creates it.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMIPIPForeignDevice(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 1, Families: v4}, `{"Type":"ipip"}`)
	h := l.Host(1)
	run := func(args ...string) {
		t.Helper()
		if out, err := h.Exec(testContext(t), "ip", args...); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	run("link", "add", "flannel.ipip", "type", "bridge")
	expectFailure(t, start(t, h, lab.FlanneldOptions{}), "device flannel.ipip is of type bridge, want ipip: remove it (ip link delete flannel.ipip)")
	run("link", "del", "flannel.ipip")

	run("link", "add", "tunl7", "type", "ipip", "local", "192.168.77.1")
	expectFailure(t, start(t, h, lab.FlanneldOptions{}), "tunl7 is a tunnel from 192.168.77.1 to anywhere already: remove it (ip link delete tunl7)")
	run("link", "del", "tunl7")

	startOne(t, h, lab.FlanneldOptions{})
	created := kernelState(t, h)
	// First a tunnel to a single address has the name, and then one as another flannel daemon
	// creates it.
	for _, tunnel := range [][]string{{"remote", "192.168.77.2"}, {"ttl", "0", "nopmtudisc"}} {
		expectStop(t, h.Daemon())
		run("link", "del", "flannel.ipip")
		run(append([]string{"link", "add", "flannel.ipip", "type", "ipip", "local", "192.168.77.1"}, tunnel...)...)
		startOne(t, h, lab.FlanneldOptions{})
		expectKernelState(t, h, created)
	}
}
