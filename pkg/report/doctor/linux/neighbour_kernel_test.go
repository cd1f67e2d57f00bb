// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"net/netip"
	"strings"
	"testing"
)

// TestKernelNeighbour checks that an absent host and a fixed MAC address give different words, and others none.
func TestKernelNeighbour(t *testing.T) {
	enterNamespace(t)
	shell(t, `ip link add one type veth peer name two && ip link set one up && ip link set two up && ip addr add 192.0.2.1/24 dev one
		ip neigh add 192.0.2.2 dev one nud failed; ip neigh add 192.0.2.3 lladdr 02:00:00:00:00:03 dev one nud permanent
		ip neigh add 192.0.2.4 lladdr 02:00:00:00:00:04 dev one nud reachable; ip neigh add 2001:db8::2 dev one nud failed`)
	for addr, want := range map[string]string{
		"192.0.2.2": "no host on one says that it has the address 192.0.2.2", "2001:db8::2": "no host on one",
		"192.0.2.3": "one has a fixed MAC address for 192.0.2.3, 02:00:00:00:00:03", "192.0.2.4": "", "192.0.2.5": "",
	} {
		if have := Neighbour(netip.MustParseAddr(addr)); !strings.HasPrefix(have, want) || want == "" && have != "" {
			t.Errorf("%s: %q, want %q", addr, have, want)
		}
	}
}
