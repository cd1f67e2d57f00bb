// SPDX-License-Identifier: Apache-2.0

package pathmtu

import (
	"net/netip"
	"time"

	"golang.org/x/time/rate"
)

// Path is the way from this host to one subnet of a peer.
type Path struct {
	Subnet   netip.Prefix
	Device   string     // through which the packets leave
	From, To netip.Addr // addresses of the requests: of this host, and of the peer's device
	PublicIP netip.Addr // of the peer
	Full     int        // MTU of the device in bytes
	Least    int        // smallest size in bytes that the path may get; not less than the family of the addresses allows
}

// state is the present knowledge of a path.
type state struct {
	key    string
	path   Path
	size   int       // of the largest packet that passes, in bytes
	due    time.Time // when the next check is due; zero before the first one
	raised time.Time // time of the last attempt to find a larger size, or of the last change
	gone   bool
	// searches limits the searches on the path. It is nil before the first one.
	searches *rate.Limiter
}
