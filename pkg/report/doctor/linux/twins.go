// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// holdersTime is the time to wait for the hosts that have an address. Hosts of one segment answer within milliseconds.
const holdersTime = 200 * time.Millisecond

// ownTwins returns the other hosts that have an IPv4 address of this one. The kernel itself detects IPv6
// addresses that another host has, and does not use them.
func ownTwins(ctx context.Context, r status.Report) (all []doctor.Twin) {
	for _, a := range r.Interface.Addresses {
		for _, mac := range holders(ctx, r.Interface.Name, a.Local, 1) {
			all = append(all, doctor.Twin{Dev: r.Interface.Name, Addr: a.Local, MAC: mac})
		}
	}
	return all
}

// Twins says that several hosts of the same segment may have an address. It returns an empty text if not.
func Twins(ctx context.Context, a netip.Addr) string {
	asks, err := newAsker()
	if err != nil {
		return ""
	}
	defer asks.handle.Close()
	route, err := asks.lookUp(a, nil)
	if err != nil || route.Err != nil || route.Via.IsValid() {
		return ""
	}
	macs := holders(ctx, route.Dev, a, 2)
	if len(macs) == 0 {
		return ""
	}
	return fmt.Sprintf("%s answer on %s for %s: two hosts have this address, or one has two interfaces there",
		strings.Join(macs, " and "), route.Dev, a)
}

// arp is a packet of ARP for Ethernet and IPv4.
type arp struct {
	Hardware, Protocol uint16
	Sizes              [2]uint8
	Operation          uint16
	Sender             [6]byte
	SenderIP           [4]byte
	Target             [6]byte
	TargetIP           [4]byte
}

// holders returns the MAC addresses of the other hosts that answer for an IPv4 address on the segment of a
// device, or nothing if fewer than least do. It sends the probe of RFC 5227, which has no address of its
// sender, so no host learns anything from it. It returns nothing if it cannot ask, as without CAP_NET_RAW, or
// on a device without ARP.
func holders(ctx context.Context, dev string, a netip.Addr, least int) (macs []string) {
	link, err := netlink.LinkByName(dev)
	if err != nil || !a.Is4() || len(link.Attrs().HardwareAddr) != 6 || link.Attrs().Flags&net.FlagBroadcast == 0 {
		return nil
	}
	// The socket wants the protocol in the byte order of the network.
	protocol := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ARP))
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(protocol))
	if err != nil {
		return nil
	}
	defer unix.Close(fd)

	everyone := &unix.SockaddrLinklayer{
		Protocol: protocol, Ifindex: link.Attrs().Index,
		Halen: 6, Addr: [8]byte{255, 255, 255, 255, 255, 255},
	}
	probe := arp{
		Hardware: 1, Protocol: unix.ETH_P_IP, Sizes: [2]uint8{6, 4}, Operation: 1,
		Sender: [6]byte(link.Attrs().HardwareAddr), TargetIP: a.As4(),
	}
	packet, err := binary.Append(nil, binary.BigEndian, probe)
	if err != nil || unix.Bind(fd, everyone) != nil || unix.Sendto(fd, packet, 0, everyone) != nil {
		return nil
	}

	// All answers are read at the end, so none is missed while this process waits for a CPU.
	if wait.For(ctx, holdersTime) != nil {
		return nil
	}
	answer := make([]byte, 64)
	for {
		n, _, err := unix.Recvfrom(fd, answer, 0)
		if err != nil {
			break
		}
		var said arp
		if _, err := binary.Decode(answer[:n], binary.BigEndian, &said); err != nil || said.SenderIP != a.As4() {
			continue
		}

		if mac := net.HardwareAddr(said.Sender[:]).String(); !slices.Contains(macs, mac) {
			macs = append(macs, mac)
		}
	}

	// Usually only one host answers. Reading all routes and links takes longer than everything else here.
	if len(macs) >= least {
		macs = ofHosts(macs, link.Attrs().Index)
	}
	if len(macs) < least {
		return nil
	}
	slices.Sort(macs)
	return macs
}

// ofHosts returns macs without those of this host and of its default gateways through the device: switches and
// clouds have gateways that answer for all addresses. It returns nothing if it cannot read them.
func ofHosts(macs []string, device int) []string {
	known, err := gateways(device)
	links, failed := dump(netlink.LinkList)
	if cmp.Or(err, failed) != nil {
		return nil
	}
	for _, own := range links {
		known = append(known, own.Attrs().HardwareAddr.String())
	}
	return slices.DeleteFunc(macs, func(mac string) bool { return slices.Contains(known, mac) })
}

// gateways returns the MAC addresses of the gateways of default routes through a device, as far as the kernel
// knows them.
func gateways(device int) (macs []string, err error) {
	routes, err := routes(unix.RTN_UNICAST)
	neighbours, failed := dump(func() ([]netlink.Neigh, error) { return netlink.NeighList(device, netlink.FAMILY_V4) })
	for _, r := range routes {
		if to, ok := toPrefix(r.Dst); ok && to.Bits() > 0 {
			continue
		}
		for _, n := range neighbours {
			if n.IP.Equal(r.Gw) {
				macs = append(macs, n.HardwareAddr.String())
			}
		}
	}
	return macs, cmp.Or(err, failed)
}

// Neighbour says why a host of the same segment that does not answer may be away, from what the kernel has found out
// about its MAC address. It returns an empty text if that says nothing.
func Neighbour(a netip.Addr) string {
	all, _ := dump(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, netlink.FAMILY_ALL) })
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
