// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"
	"testing"
)

// TestKernelHasPods checks that only bridges have pods, and only in the subnets of this host.
func TestKernelHasPods(t *testing.T) {
	enterNamespace(t)
	shell(t, `ip link add flannel.1 type veth peer name other && ip link set flannel.1 up && ip link add cni0 type bridge && ip link set cni0 up
		ip addr add 10.5.1.0/32 dev flannel.1 && ip addr add 10.5.2.1/24 dev cni0 && ip addr add fd00:5:0:2::1/64 dev cni0`)
	for subnet, want := range map[string]bool{"10.5.1.0/24": false, "10.5.2.0/24": true, "10.5.3.0/24": false, "fd00:5:0:2::/64": true} {
		if have := new(Addresses).HasPods(t.Context(), []netip.Prefix{netip.MustParsePrefix(subnet)}); have != want {
			t.Errorf("%s: %t, want %t", subnet, have, want)
		}
	}
}
