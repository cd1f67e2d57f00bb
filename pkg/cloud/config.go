// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"net/netip"
	"time"
)

// leastConfirm is the first pause after a write before the tables are read again, because a cloud may accept
// a call and show its result later. The pause grows while every comparison finds something to write.
// Otherwise two programs that want different routes would use up the calls that the cloud allows for
// all hosts together.
const leastConfirm = 5 * time.Second

// KeeperConfig configures a Keeper. All fields are required except Tunnel.
type KeeperConfig struct {
	Cloud Cloud
	Own   Host
	// Tunnel is set if a tunnel carries the packets that the routers of the cloud do not carry.
	Tunnel   bool
	Networks []netip.Prefix // removals are limited to routes in them
	Resync   time.Duration  // time between two comparisons if nothing happens
	// Connected returns the time since which the store is connected; zero if it is not.
	Connected func() time.Time
	// Compared is called after each comparison. It must not block.
	Compared func()
}
