// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// TestVMTunnels checks that the devices of the ipip backend are created and changed in place as wanted. A
// second tunnel with the same local address must be refused.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMTunnels(t *testing.T) {
	for _, tt := range []struct {
		kind, local, moved, dst, gateway string
		mtu                              int
	}{
		{dataplane.KindIPIP, "192.168.77.1", "192.168.77.2", "10.5.2.0/24", "192.168.77.9", 1480},
		{dataplane.KindIP6Tnl, "fd00:77::1", "fd00:77::2", "fd00:10:5:2::/64", "fd00:77::9", 1460},
	} {
		t.Run(tt.kind, func(t *testing.T) {
			w := newWorld(t)
			route := dataplane.NewRoute(netip.MustParsePrefix(tt.dst), netip.MustParseAddr(tt.gateway), "tun", true)
			link := dataplane.Link{
				Name: "tun", Kind: tt.kind, MTU: tt.mtu, Up: true,
				Tunnel: dataplane.Tunnel{Local: netip.MustParseAddr(tt.local)},
			}
			scope := dataplane.Scope{Devices: []string{"tun"}, Networks: []netip.Prefix{route.Dst}}
			expect := func(l dataplane.Link) {
				t.Helper()
				for _, op := range []dataplane.Op{{Object: l}, {Object: route}, {Object: l}} {
					if failed := w.Apply(silentContext(t), []dataplane.Op{op}); len(failed) > 0 {
						t.Fatal(failed[0])
					}
				}
				want := dataplane.NewState()
				want.Add(l, route)
				have, err := w.Read(silentContext(t), scope)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(want, have, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
					t.Errorf("kernel state (-want +have):\n%s", diff)
				}
			}
			expect(link)
			index, err := w.index("tun")
			if err != nil {
				t.Fatal(err)
			}
			other := link
			other.Name = "tun2"
			failed := w.Apply(silentContext(t), []dataplane.Op{{Object: other}})
			if len(failed) != 1 || !strings.Contains(failed[0].Error(), "tun is a tunnel from "+tt.local+" to anywhere already") {
				t.Errorf("a second tunnel: %v, want an error that names the first", failed)
			}
			link.MTU, link.Tunnel.Local = 1300, netip.MustParseAddr(tt.moved)
			expect(link)
			if now, err := w.index("tun"); err != nil || now != index {
				t.Errorf("device has index %d (%v), want %d, because it should be changed in place", now, err, index)
			}
		})
	}
}
