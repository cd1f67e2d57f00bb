// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// Neighbour says why a host of the same segment that does not answer may be away, from what the kernel has found out
// about its MAC address. It returns an empty text if that says nothing.
func Neighbour(a netip.Addr) string {
	family := netlink.FAMILY_V4
	if a.Is6() {
		family = netlink.FAMILY_V6
	}
	all, _ := dump(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, family) })
	for _, n := range all {
		if is, ok := netip.AddrFromSlice(n.IP); !ok || is.Unmap() != a {
			continue
		}
		link, err := netlink.LinkByIndex(n.LinkIndex)
		if err != nil {
			continue
		}
		dev := link.Attrs().Name
		switch {
		case n.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE|netlink.NUD_PROBE) != 0:
			return fmt.Sprintf("no host on %s says that it has the address %s: it is off, disconnected, or has another address", dev, a)
		case n.State&netlink.NUD_PERMANENT != 0:
			return fmt.Sprintf("%s has a fixed MAC address for %s, %s, and nothing answers there: if it is wrong: ip neigh del %s dev %s", dev, a, n.HardwareAddr, a, dev)
		}
	}
	return ""
}
