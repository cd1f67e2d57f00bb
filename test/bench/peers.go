// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/flanneld/flanneld/test/figures"
)

// podNetwork is the pod network of the benchmark: 32,768 subnets of /24 from firstSubnet on.
const (
	firstSubnet = "10.128.0.0"
	podNetwork  = firstSubnet + "/9"
)

// ownSubnets is the first address from which daemons choose their own subnets. The
// subnets of all peers are below it, also those of peers that are added later.
const ownSubnets = "10.240.0.0"

// peerNetwork contains the public addresses of the peers. No host of the lab has one of
// them.
const (
	firstPeer   = "172.16.0.0"
	peerNetwork = firstPeer + "/12"
)

// peer is host i of the benchmark, counted from 0. It exists only as a lease.
type peer struct {
	i      int
	subnet netip.Prefix
	ip     netip.Addr
	mac    [6]byte
}

// objects describes which kernel objects each peer needs.
type objects struct {
	vtep    bool // a neighbour and an FDB entry, and a route whose gateway is the VTEP
	onLink  bool
	nexthop bool // routes that use nexthop objects
}

func objectsOf(backend string) objects {
	return objects{vtep: backend == "vxlan", onLink: backend == "vxlan", nexthop: true}
}

func makePeer(i int) peer {
	p := peer{
		i:      i,
		subnet: netip.PrefixFrom(figures.Addr(firstSubnet, (i+1)<<8), 24),
		ip:     figures.Addr(firstPeer, i+1),
		mac:    [6]byte{0x02, 0xbe},
	}
	binary.BigEndian.PutUint32(p.mac[2:], uint32(i+1))
	return p
}

func (p peer) subnet6() netip.Prefix {
	base := netip.MustParsePrefix(podNetwork6).Addr().As16()
	binary.BigEndian.PutUint16(base[6:], uint16(p.i+1))
	return netip.PrefixFrom(netip.AddrFrom16(base), 64)
}

// ip6 returns the peer's public IPv6 address. No host of the lab has it.
func (p peer) ip6() netip.Addr {
	base := netip.MustParseAddr("2001:db8::").As16()
	binary.BigEndian.PutUint32(base[12:], uint32(p.i+1))
	return netip.AddrFrom16(base)
}

func makePeers(n int) []peer {
	peers := make([]peer, n)
	for i := range peers {
		peers[i] = makePeer(i)
	}
	return peers
}

func (p peer) gateway(kinds objects) netip.Addr {
	if kinds.vtep {
		return p.subnet.Addr()
	}
	return p.ip
}

func (p peer) nexthop() uint32 { return 1<<24 + uint32(p.i) }

func (p peer) key() string {
	return fmt.Sprintf("%s/subnets/%s-%d", etcdPrefix, p.subnet.Addr(), p.subnet.Bits())
}

func (p peer) vtep(vni int) map[string]any {
	return map[string]any{"VNI": vni, "VtepMAC": net.HardwareAddr(p.mac[:]).String()}
}

// value returns the value of the peer's lease with data for that backend. In a migration, next
// is the next backend. It must be host-gw, which has no data of its own, or empty if the network
// does not migrate.
func (p peer) value(backend, next string) string {
	lease := map[string]any{"PublicIP": p.ip, "PublicIPv6": nil}
	if backend != "udp" { // udp leases have no type
		lease["BackendType"] = backend
	}
	if backend == "vxlan" {
		lease["BackendData"] = p.vtep(1)
	}
	if next != "" {
		lease["NextBackendType"] = next
	}
	return marshal(lease)
}
