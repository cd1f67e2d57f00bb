// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

// TestAddressChangesWhileStopped changes the addresses of a host while its daemon is stopped. The host
// must continue its lease, with its identity, so that all pods reach each other, and its pods keep
// their addresses.
func TestAddressChangesWhileStopped(t *testing.T) {
	t.Parallel()
	const reboot = "; rm -r /run/flannel; for d in flannel.1 flannel-v6.1 flannel0 flannel-wg; do ip link del $d 2>/dev/null || true; done"
	for _, tc := range []struct {
		backend  string
		families []prefix.Family
		also     string // script that changes more
		does     string // name of that change
		anew     bool   // nothing proves that the lease is this host's, so it must take another one
	}{
		{backend: "vxlan", families: v4},
		{backend: "vxlan", families: v6},
		{backend: "vxlan", families: dual, also: reboot, does: ", reboot"},
		{backend: "vxlan", families: v4, also: "; rm -r /var/lib/flannel", does: ", state lost"},
		{backend: "host-gw", families: dual},
		{backend: "udp", families: v4},
		{backend: userspace, families: dual},
		{backend: userspace, families: v6, also: reboot, does: ", reboot"},
		{backend: userspace, families: v4, also: reboot + "; find /var/lib/flannel -type f ! -name wgkey -delete", does: ", reboot, state lost but the key", anew: true},
	} {
		t.Run(fmt.Sprintf("%s, %s%s", tc.backend, familiesName(tc.families), tc.does), func(t *testing.T) {
			t.Parallel()
			p := newDamagedHost(t, tc.backend, tc.families)
			keys := func() (all []string) {
				for _, l := range leases(t, p.lab) {
					all = append(all, l.Key)
				}
				return all
			}
			had := keys()
			expectStop(t, p.host.Daemon())
			var script []string
			for _, f := range tc.families {
				script = append(script, fmt.Sprintf("ip addr del %s/%d dev eth0", p.host.Addr(f), map[prefix.Family]int{prefix.IPv4: 24, prefix.IPv6: 64}[f]))
			}
			p.run(t, strings.Join(script, "; ")+"; "+strings.Replace(p.restoreScript(func(f prefix.Family) netip.Addr {
				if f == prefix.IPv6 {
					return netip.MustParseAddr("fd00:77::101")
				}
				return netip.MustParseAddr("192.168.77.101")
			}), "sleep 2; ", "", 1)+tc.also)

			startOne(t, p.host, lab.FlanneldOptions{})
			if tc.anew { // a reboot ends all pods
				if err := p.host.RemovePods(testContext(t)); err != nil {
					t.Fatal(err)
				}
				if err := p.host.AddPods(testContext(t)); err != nil {
					t.Fatal(err)
				}
			}
			expectMatrix(t, p.lab)
			if now := keys(); slices.Equal(now, had) == tc.anew {
				t.Errorf("the leases are %q, they were %q", now, had)
			}
			for _, h := range p.lab.Hosts() {
				for _, peer := range statusOf(t, h).Peers {
					if peer.Error != "" {
						t.Errorf("%s refuses %s: %s", h.Name(), peer.Key, peer.Error)
					}
				}
			}
		})
	}
}
