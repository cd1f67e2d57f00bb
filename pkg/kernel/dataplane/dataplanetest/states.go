// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"net/netip"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

const dev4, dev6 = "flannel.1", "flannel-v6.1"

// Scope returns the scope of a dual-stack vxlan network.
func Scope() dataplane.Scope {
	return dataplane.Scope{
		Devices:  []string{dev4, dev6},
		Networks: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00:10::/32")},
	}
}

// Base returns the two devices of a dual-stack vxlan network, with the addresses of subnet
// 1, which is this host's.
func Base() dataplane.State {
	s := dataplane.NewState()
	for _, d := range []struct {
		name, local string
		mac         byte
		mtu         int
	}{{dev4, "192.168.77.1", 4, 1450}, {dev6, "fd00:77::1", 6, 1430}} {
		s.Add(dataplane.Link{
			Name: d.name, Kind: "vxlan", MAC: dataplane.MAC{2, 0, 0, 0xff, 0, d.mac}, MTU: d.mtu, Up: true,
			VXLAN: dataplane.VXLAN{VNI: 1, Port: 8472, Local: netip.MustParseAddr(d.local), Underlay: "eth0"},
		})
	}

	s.Add(
		dataplane.Addr{Dev: dev4, Prefix: prefix.Host(subnet4(1).Addr())},
		dataplane.Addr{Dev: dev6, Prefix: prefix.Host(subnet6(1).Addr())})
	return s
}

// subnet4 and subnet6 are the subnets of host i.
func subnet4(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(5 + i>>8), byte(i), 0}), 24)
}

func subnet6(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x10, 0, 5, byte(i >> 8), byte(i)}), 64)
}

// Peer returns the objects for host i in both families, the IPv4 ones first: a neighbour,
// an FDB entry and a route each. Peers with the same index and different variants have the
// same subnets, and different MACs and host addresses.
func Peer(i, variant int) []dataplane.Object {
	var objects []dataplane.Object
	for _, p := range []netip.Prefix{subnet4(i), subnet6(i)} {
		dev := dev4
		dst := netip.AddrFrom4([4]byte{198, byte(18 + variant), byte(i >> 8), byte(i)})
		if p.Addr().Is6() {
			dev, dst = dev6, netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, byte(variant), 0, byte(i >> 8), byte(i)})
		}
		mac := dataplane.MAC{2, byte(variant), dev[len(dev)-3], 0, byte(i >> 8), byte(i)}
		objects = append(objects,
			dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: dev, IP: p.Addr()}, MAC: mac},
			dataplane.FDB{FDBKey: dataplane.FDBKey{Dev: dev, MAC: mac}, Dst: dst},
			dataplane.NewRoute(p, p.Addr(), dev, true))
	}
	return objects
}

// Peers returns Base with peers 2 to n+1.
func Peers(n int) dataplane.State {
	s := Base()
	for i := range n {
		s.Add(Peer(i+2, 0)...)
	}
	return s
}

// NewReconciler returns a Reconciler for Scope. It is closed at the end of the test.
func NewReconciler(t testing.TB, k dataplane.Kernel, resync time.Duration) *dataplane.Reconciler {
	t.Helper()
	r, err := dataplane.NewReconciler(dataplane.Config{Kernel: k, Scope: Scope(), Resync: resync})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}
