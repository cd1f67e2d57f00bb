// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// TestKernelWays asks for the routes between a pod and the subnet of a peer, of which another route takes a part.
func TestKernelWays(t *testing.T) {
	enterNamespace(t)
	shell(t, `ip link add flannel.1 type veth peer name other && ip link set flannel.1 up && ip link set other up
		ip link add cni0 type bridge && ip link add pod type veth peer name inside && ip link set pod master cni0
		ip link set cni0 up && ip link set pod up && ip link set inside up
		for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done; echo 1 > /proc/sys/net/ipv4/ip_forward
		ip addr add 10.5.1.0/32 dev flannel.1 && ip addr add 10.5.1.1/24 dev cni0
		ip route add 10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink && ip route add blackhole 10.5.2.128/25
		ip route add blackhole 10.5.0.0/16 && ip route add blackhole 10.6.2.128/25`)
	own, there := netip.MustParsePrefix("10.5.1.0/24"), netip.MustParsePrefix("10.5.2.0/24")
	r := status.Report{
		Lease: status.Lease{Subnets: []netip.Prefix{own}}, Network: status.Network{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16")}},
		Peers: []status.Peer{{
			Lease: status.Lease{Subnets: []netip.Prefix{there}}, State: status.InPlace,
			Objects: []status.Object{{Text: "route 10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink"}},
		}},
	}

	parts, err := partsOf(r)
	blackhole := netip.MustParsePrefix("10.5.2.128/25")
	if want := []part{{blackhole, true}}; err != nil || !slices.Equal(parts, want) {
		t.Fatalf("the parts are %v, %v, want %v", parts, err, want)
	}
	f := pods(r, parts)
	if f.Unread != nil {
		t.Fatal(f.Unread)
	}
	pod, remote := netip.MustParseAddr("10.5.1.2"), netip.MustParseAddr("10.5.2.2")
	refused := doctor.Route{Err: unix.EINVAL}
	want := []doctor.Way{
		{Subnet: there, In: "cni0", Bridge: "cni0", From: pod, To: remote, Route: doctor.Route{Dev: "flannel.1", Via: there.Addr(), Table: unix.RT_TABLE_MAIN}},
		{Subnet: there, In: "cni0", Bridge: "cni0", From: pod, To: blackhole.Addr().Next(), Part: blackhole, Route: refused, Sent: refused},
		{Subnet: there, Back: true, In: "flannel.1", Bridge: "cni0", From: remote, To: pod, Route: doctor.Route{Dev: "cni0", Table: unix.RT_TABLE_MAIN}},
	}
	if !slices.Equal(f.Ways, want) {
		t.Errorf("the ways are\n%+v, want\n%+v", f.Ways, want)
	}

	f.Bridges[0].Name = "gone"
	if ways, err := ways(r, f.Bridges, parts); err == nil || ways != nil {
		t.Errorf("without the bridge: %v, %v, want an error", ways, err)
	}
}

// TestPodAt checks which address of a subnet a pod may have, if its gateway has another one.
func TestPodAt(t *testing.T) {
	for gateway, want := range map[string]string{
		"10.5.1.1/24": "10.5.1.2", "10.5.1.254/24": "10.5.1.253", "10.5.1.253/24": "10.5.1.254", "fd00:10:5:1::1/64": "fd00:10:5:1::2", "10.5.1.2/30": "10.5.1.1",
	} {
		if got := podAt(netip.MustParsePrefix(gateway)); got != netip.MustParseAddr(want) {
			t.Errorf("a pod at %s has %s, want %s", gateway, got, want)
		}
	}
}
