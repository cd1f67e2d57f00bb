// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"
	"testing"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// TestPackets checks which packets between hosts no firewall may drop.
func TestPackets(t *testing.T) {
	local, peer := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	local6, peer6 := netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
	for name, test := range map[string]struct {
		own, peer netip.Addr
		network   status.Network
		want      []firewall.Payload
	}{
		"vxlan":   {local, peer, status.Network{BackendType: "vxlan", Ports: []int{8472}}, []firewall.Payload{{Protocol: firewall.UDP, Port: 8472}}},
		"ipip":    {local, peer, status.Network{BackendType: "ipip"}, []firewall.Payload{{Protocol: 4}}},
		"IPv6":    {local6, peer6, status.Network{BackendType: "ipip"}, []firewall.Payload{{Protocol: 41}}},
		"host-gw": {local, peer, status.Network{BackendType: "host-gw"}, nil},
	} {
		all := packets(status.Report{
			Interface: status.Interface{Name: "eth0", Addresses: []status.Address{{Local: test.own}}},
			Network:   test.network, Peers: []status.Peer{{Lease: status.Lease{PublicIPs: []netip.Addr{test.peer}}}},
		}, nil)
		if len(all) != 2*len(test.want) {
			t.Errorf("%s: %+v, want %+v in both directions", name, all, test.want)
			continue
		}
		for i, p := range test.want {
			in := firewall.Packet{In: "eth0", Src: test.peer, Dst: test.own, Protocol: p.Protocol, Port: p.Port}
			out := firewall.Packet{Out: "eth0", Src: test.own, Dst: test.peer, Protocol: p.Protocol, Port: p.Port}
			if all[2*i] != in || all[2*i+1] != out {
				t.Errorf("%s: %+v, want %+v and %+v", name, all, in, out)
			}
		}
	}
}
