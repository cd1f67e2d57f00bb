// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// ignoreEncapLimit (IP6_TNL_F_IGN_ENCAP_LIMIT) makes an ip6tnl device leave out the
// option of 8 bytes that limits the nesting of tunnels.
const ignoreEncapLimit = 1

// tunnel leaves attributes as other flannel daemons do: TTL and TOS of the inner packet, and no path MTU
// discovery.
func tunnel(want dataplane.Link) netlink.Link {
	attrs := netlink.LinkAttrs{Name: want.Name, MTU: want.MTU}
	local := net.IP(want.Tunnel.Local.AsSlice())
	if want.Kind == dataplane.KindIP6Tnl {
		return &netlink.Ip6tnl{LinkAttrs: attrs, Local: local, Proto: unix.IPPROTO_IPV6, Flags: ignoreEncapLimit}
	}
	return &netlink.Iptun{LinkAttrs: attrs, Local: local}
}

func (k *Kernel) createTunnel(want dataplane.Link) error {
	err := k.links.LinkAdd(tunnel(want))
	if !errors.Is(err, unix.EEXIST) {
		return err
	}

	// Name the device that is in the way.
	links, listErr := k.links.LinkList()
	if listErr != nil {
		return oneline.Join(err, listErr)
	}
	for _, l := range links {
		if name := l.Attrs().Name; l.Type() == want.Kind && readTunnel(l).Local == want.Tunnel.Local {
			return fmt.Errorf("%w: %s is a tunnel from %s to anywhere already: remove it (ip link delete %s) if nothing else needs it",
				err, name, want.Tunnel.Local, name)
		}
	}
	return err
}

// readTunnel returns zero for other devices.
func readTunnel(link netlink.Link) dataplane.Tunnel {
	var t dataplane.Tunnel
	var local, remote net.IP
	switch l := link.(type) {
	case *netlink.Iptun:
		local = l.Local
		remote = l.Remote
		t.Foreign = l.FlowBased || l.EncapType != 0 || l.Proto != 0 && l.Proto != unix.IPPROTO_IPIP
	case *netlink.Ip6tnl:
		local = l.Local
		remote = l.Remote
		t.Foreign = l.FlowBased || l.EncapType != 0 || l.Proto != unix.IPPROTO_IPV6 || l.Flags&ignoreEncapLimit == 0
	default:
		return t
	}
	if a, ok := netip.AddrFromSlice(local); ok && !a.IsUnspecified() {
		t.Local = a
	}
	if a, ok := netip.AddrFromSlice(remote); ok && !a.IsUnspecified() {
		t.Foreign = true
	}
	return t
}
