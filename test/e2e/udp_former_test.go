// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/test/lab"
)

// startKernelPath creates what an earlier version of udp needed to let the kernel of a host carry
// the packets of its pods.
func startKernelPath(t *testing.T, h *lab.Host) {
	t.Helper()
	shell(t, h.Namespace, fmt.Sprintf(`
		ip fou add port 8285 ipproto 4 local %[1]s
		ip link add flannel0 mtu 1472 type ipip local %[1]s encap fou encap-sport 8285 encap-dport 8285
		ip link set flannel0 up
		nft 'add table ip flannel-udp; add chain ip flannel-udp input { type filter hook input priority 0; }'`, h.Addr(prefix.IPv4)))
}

// udpObjects returns the kernel objects of the backend udp on a host, of this version and of earlier
// ones, in one line.
func udpObjects(t *testing.T, h *lab.Host) string {
	t.Helper()
	return strings.Join(strings.Fields(shell(t, h.Namespace, `
		ip -o -d link show flannel0 2>/dev/null | grep -o 'encap fou\|tun type tun' || true
		ip fou show 2>/dev/null
		nft list tables | grep flannel-udp || true
		ip route show proto 98`)), " ")
}

// TestVMUDPFormerKernelPath starts a daemon on a host on which an earlier version let the kernel carry
// the packets. The daemon must remove all objects of that version, and exchange packets with a host that
// still has the earlier version. flannelctl cleanup must remove these objects, too.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMUDPFormerKernelPath(t *testing.T) {
	l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"udp","Mode":"kernel"}`)
	h, earlier := l.Host(1), l.Host(2)
	shell(t, h.Namespace, "modprobe fou") // the kernel does not load it by itself
	startKernelPath(t, h)
	startKernelPath(t, earlier)
	if now := udpObjects(t, h); !strings.HasPrefix(now, "encap fou port 8285 ipproto 4 local 192.168.77.1 table ip flannel-udp") {
		t.Fatalf("objects of the earlier version: %q", now)
	}
	putKey(t, etcdClient(t, l), lab.Prefix+"/subnets/10.5.202.0-24", `{"PublicIP":"192.168.77.2"}`)

	expectOnce(t, startOne(t, h, lab.FlanneldOptions{}), `Backend.Mode is \"kernel\"`)
	if now := udpObjects(t, h); now != "tun type tun 10.5.0.0/16 dev flannel0 unreachable 10.5.0.0/16 metric 1073741824" {
		t.Errorf("objects %q, want only those of this version", now)
	}
	if err := h.AddPods(testContext(t)); err != nil {
		t.Fatal(err)
	}
	pod := h.Pods()[0]
	shell(t, earlier.Namespace, fmt.Sprintf(`
		ip addr add 10.5.202.1/32 dev lo
		ip route add %s via 192.168.77.1 dev flannel0 onlink src 10.5.202.1`, podSubnet(t, h, prefix.IPv4)))
	eventually(t, "both versions reach each other", func() error {
		_, err := pod.Ping(testContext(t), netip.MustParseAddr("10.5.202.1"), ping.Options{})
		return err
	})
	expectMTUTo(t, pod, netip.MustParseAddr("10.5.202.1"), 1472)

	expectStop(t, h.Daemon())
	startKernelPath(t, h)
	expectFlannelctl(t, h, []string{"cleanup", "--yes"}, "remove link flannel0 type ipip", "remove kernel path of udp: device flannel0, FOU port 8285, nftables table flannel-udp")
	if now := udpObjects(t, h); now != "" {
		t.Errorf("cleanup has left %q", now)
	}
}
