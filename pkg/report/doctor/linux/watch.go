// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Watch calls changed after each announcement of what Pods reads: rules for routing tables, routes of other kinds than those
// to peers, such as those that drop packets, and the settings of devices for forwarding and the reverse-path filter. Policies
// of IPsec have announcements of another kind, which it leaves out. It returns nil when ctx ends.
func Watch(ctx context.Context, changed func()) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open a netlink socket: %w", err)
	}
	socket := os.NewFile(uintptr(fd), "netlink")
	defer socket.Close()
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil { // otherwise nothing is announced to it
		return fmt.Errorf("bind a netlink socket: %w", err)
	}
	for _, group := range []int{
		unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF,
	} {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group); err != nil {
			return fmt.Errorf("join netlink group %d: %w", group, err)
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = socket.Close() })
	defer stop()

	// The rest of a message is not needed. Each network waits here: the library would keep 64 kB for each of them.
	var message [unix.SizeofNlMsghdr + unix.SizeofRtMsg]byte
	const typeOfMessage, typeOfRoute = 4, unix.SizeofNlMsghdr + 7
	for {
		_, err := socket.Read(message[:])
		typ := binary.NativeEndian.Uint16(message[typeOfMessage:])
		switch {
		case err == nil && (typ == unix.RTM_NEWROUTE || typ == unix.RTM_DELROUTE) && message[typeOfRoute] == unix.RTN_UNICAST: // as that of a peer
		case err == nil, errors.Is(err, unix.ENOBUFS): // announcements were lost
			changed()
		case ctx.Err() != nil:
			return nil
		default:
			return fmt.Errorf("read from a netlink socket: %w", err)
		}
	}
}
