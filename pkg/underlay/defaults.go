// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// dumpTimeout limits the wait for the next message of a dump.
const dumpTimeout = 5 * time.Second

// listDefaults returns the default routes of family f in the main table, in the kernel's
// order. The kernel lists IPv4 routes sorted by destination. For IPv4, listDefaults stops
// reading after the default routes, because a router may have a million others. If a change
// interrupts the dump, listDefaults returns netlink.ErrDumpInterrupted.
func listDefaults(f prefix.Family) (defaults []DefaultRoute, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }() // closing the socket also ends the dump
	tv := unix.NsecToTimeval(int64(dumpTimeout))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return nil, err
	}
	// With strict checking the kernel sends only the routes of the table in the request.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
	family := uint8(unix.AF_INET)
	if f == prefix.IPv6 {
		family = unix.AF_INET6
	}
	req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: family, Table: unix.RT_TABLE_MAIN}})
	if err := unix.Sendto(fd, req.Serialize(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	for buf := make([]byte, 64<<10); ; {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		messages, err := syscall.ParseNetlinkMessage(buf[:n])
		if err != nil {
			return nil, err
		}
		for _, m := range messages {
			done, err := collect(&defaults, f, m)
			if err != nil || done {
				return defaults, err
			}
		}
	}
}

// collect adds the route in one message of a route dump to defaults, if it is a default
// route of the main table. done reports that no default route can follow, because the
// dump or its default routes have ended.
func collect(defaults *[]DefaultRoute, f prefix.Family, m syscall.NetlinkMessage) (done bool, err error) {
	switch {
	case m.Header.Flags&unix.NLM_F_DUMP_INTR != 0:
		return true, netlink.ErrDumpInterrupted
	case (m.Header.Type == unix.NLMSG_DONE || m.Header.Type == unix.NLMSG_ERROR) && len(m.Data) >= 4:
		errno := syscall.Errno(-int32(binary.NativeEndian.Uint32(m.Data)))
		if errno == 0 || errno == unix.ENOENT { // the table does not exist, so it has no routes
			return true, nil
		}
		return true, errno
	case m.Header.Type != unix.RTM_NEWROUTE || len(m.Data) < unix.SizeofRtMsg:
		return false, nil
	}
	rt := nl.DeserializeRtMsg(m.Data)
	if f == prefix.IPv6 && rt.Dst_len != 0 {
		return false, nil
	}
	attrs, err := syscall.ParseNetlinkRouteAttr(&m)
	if err != nil {
		return true, fmt.Errorf("parse route: %w", err)
	}
	r, table, zero := DefaultRoute{Family: f}, uint32(rt.Table), true
	for _, a := range attrs {
		switch a.Attr.Type {
		case unix.RTA_DST:
			zero = !slices.ContainsFunc(a.Value, func(b byte) bool { return b != 0 })
		case unix.RTA_TABLE:
			table = binary.NativeEndian.Uint32(a.Value)
		case unix.RTA_OIF:
			r.add(int(binary.NativeEndian.Uint32(a.Value)))
		case unix.RTA_PRIORITY:
			r.Metric = int(binary.NativeEndian.Uint32(a.Value))
		case unix.RTA_MULTIPATH:
			r.addHops(a.Value)
		}
	}
	if table != unix.RT_TABLE_MAIN {
		return false, nil
	}
	// Some systems keep an unreachable default route as a backstop. It carries no
	// traffic, so it does not count.
	if rt.Dst_len == 0 && rt.Type == unix.RTN_UNICAST && rt.Tos == 0 && rt.Flags&unix.RTM_F_CLONED == 0 {
		*defaults = append(*defaults, r)
	}
	return f == prefix.IPv4 && !zero, nil
}

// add adds a link unless the route has it already, because packets to several gateways on
// one link leave by a single interface.
func (r *DefaultRoute) add(link int) {
	if link > 0 && !slices.Contains(r.Links, link) {
		r.Links = append(r.Links, link)
	}
}

// addHops adds the links of an RTA_MULTIPATH attribute, a sequence of struct rtnexthop,
// each followed by its own attributes.
func (r *DefaultRoute) addHops(b []byte) {
	for len(b) >= unix.SizeofRtNexthop {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtNexthop || n > len(b) {
			return
		}
		r.add(int(int32(binary.NativeEndian.Uint32(b[4:]))))
		const alignment = 4
		b = b[min((n+alignment-1)&^(alignment-1), len(b)):]
	}
}
