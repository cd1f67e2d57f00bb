// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Watch calls changed after each announcement of what Pods reads: rules for routing tables, and the settings of devices for
// forwarding and the reverse-path filter. Policies of IPsec have announcements of another kind, which it leaves out. It
// returns nil when ctx ends.
func Watch(ctx context.Context, changed func()) error {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE,
		unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF)
	if err != nil {
		return fmt.Errorf("subscribe to netlink: %w", err)
	}
	defer socket.Close()
	defer context.AfterFunc(ctx, socket.Close)()

	for {
		switch _, _, err := socket.Receive(); {
		case err == nil, errors.Is(err, unix.ENOBUFS): // announcements were lost
			changed()
		case ctx.Err() != nil:
			return nil
		default:
			return fmt.Errorf("read from netlink: %w", err)
		}
	}
}
