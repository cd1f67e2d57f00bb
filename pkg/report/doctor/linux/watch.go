// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/underlay"
)

// Watch calls changed after each announcement of what Pods reads: rules for routing tables, routes of other kinds than those
// to peers, such as those that drop packets, and the settings of devices for forwarding and the reverse-path filter. Policies
// of IPsec have announcements of another kind, which it leaves out. stop returns after the last call of changed.
func Watch(changed func()) (stop func(), err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	socket := os.NewFile(uintptr(fd), "netlink")
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) // otherwise nothing is announced to it
	const kindOfRoute = 7
	err = cmp.Or(err, underlay.FilterRoutes(fd, kindOfRoute, false, unix.RTN_UNICAST))
	for _, group := range []int{
		unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF,
	} {
		err = cmp.Or(err, unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group))
	}
	if err != nil {
		_ = socket.Close()
		return nil, fmt.Errorf("subscribe to changes of rules and settings: %w", err)
	}

	var wg sync.WaitGroup
	wg.Go(func() {
		var message [1]byte // the rest of a message is not needed
		for {
			if _, err := socket.Read(message[:]); err != nil && !errors.Is(err, unix.ENOBUFS) { // then announcements were lost
				return
			}
			changed()
		}
	})
	return func() {
		_ = socket.Close()
		wg.Wait()
	}, nil
}
