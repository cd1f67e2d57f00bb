// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"slices"
	"testing"

	"github.com/flanneld/flanneld/test/lab"
)

// TestAddressAndStateChangeWhileStopped changes the address of a host while its daemon is stopped and its state is
// lost. There must not be two leases with one identity that peers accept. TestSituations has hosts that keep their
// state.
func TestAddressAndStateChangeWhileStopped(t *testing.T) {
	t.Parallel()
	const lost = "rm -r /var/lib/flannel"
	for name, tc := range map[string]struct {
		backend, script string
		anew            bool // nothing proves that the lease is this host's, so it must take another one
		env             []string
	}{
		"vxlan":                   {backend: "vxlan", script: lost},
		"reboot, the key is left": {backend: userspace, script: reboot + "find /var/lib/flannel -type f ! -name wgkey -delete", anew: true},
		"reboot, the key of the operator is left": {
			backend: userspace, script: reboot + "mv /var/lib/flannel/wgkey /var/lib; " + lost, anew: true, env: []string{"WIREGUARD_KEY_FILE=/var/lib/wgkey"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newDamagedHost(t, tc.backend, v4)
			had := leaseOf(t, p.lab, p.host)
			expectStop(t, p.host.Daemon())
			p.changeAddress(t)
			p.run(t, tc.script)
			startOne(t, p.host, lab.FlanneldOptions{Env: tc.env})
			if tc.env != nil { // two running hosts with this key would look the same, so an operator has to decide
				expectLog(t, p.lab.Host(2).Daemon(), "its public key")
				expectFlannelctl(t, p.lab.Host(2), []string{"revoke", had.subnet()}, "is revoked")
			}
			if tc.anew { // a reboot ends all pods
				if err := p.host.RemovePods(testContext(t)); err != nil {
					t.Fatal(err)
				}
				if err := p.host.AddPods(testContext(t)); err != nil {
					t.Fatal(err)
				}
			}
			expectMatrix(t, p.lab)
			if slices.ContainsFunc(leases(t, p.lab), func(l lease) bool { return l.Key == had.Key && l.PublicIP != had.PublicIP }) == tc.anew {
				t.Errorf("the leases are %v, that of the host was %v", leases(t, p.lab), had)
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
