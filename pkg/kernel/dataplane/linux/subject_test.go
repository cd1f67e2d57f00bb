// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// subject is a kernel, together with the changes that other programs can make to it. A new
// subject has the device eth0, which is up and has the addresses 192.168.77.1/24 and
// fd00:77::1/64.
type subject interface {
	dataplane.Kernel
	// Append creates objects as another program, beside existing ones: a route becomes a
	// duplicate or another next hop of a route with the same key. Links may be of type
	// vxlan, bridge or veth. The name of a veth link must be eth and a digit, such as eth1.
	// A route with Multipath set gets the next hops .8 and .9 of eth0's networks. A route
	// with a NexthopID uses a nexthop object, which Append creates.
	Append(objects ...dataplane.Object) error
	// Remove deletes objects as another program.
	Remove(objects ...dataplane.Object) error
	// SetUp sets a device up or down.
	SetUp(dev string, up bool) error
}

// realKernel contains the changes that only other programs on a real kernel make.
type realKernel interface {
	// Change gives the route with r's key the other attributes of r, as `ip route change` does. The
	// kernel announces only the result.
	Change(r dataplane.Route) error
	// SetCarrier gives a carrier to a device of type veth that is up, or takes it away.
	// It returns when the kernel has handled that.
	SetCarrier(dev string, on bool) error
	// SetARP sets whether a device resolves addresses to neighbours.
	SetARP(dev string, on bool) error
	// RemoveNexthop deletes the nexthop object of another program with that id, together
	// with the routes that use it. It returns nil if there is none.
	RemoveNexthop(id uint32) error
	// Learn creates a neighbour entry that is not permanent.
	Learn(n dataplane.Neigh) error
	// AcceptRA returns the sysctl accept_ra of a device.
	AcceptRA(dev string) (string, error)
}

// disturber contains further disturbances that a subject may implement.
type disturber interface {
	// Overflow makes all monitors lose announcements.
	Overflow() error
	// DeleteNexthop deletes the n-th nexthop object of flanneld, from 0 and modulo their
	// number, together with the routes that use it. It does nothing if there is none.
	DeleteNexthop(n int) error
	// ReplaceNexthop chooses an object like DeleteNexthop, and gives it another gateway.
	ReplaceNexthop(n int) error
}

// traffic is implemented by a subject that has a host behind its tunnels.
type traffic interface {
	// Remote returns the objects that are needed to reach that host. dataplanetest.Peer(i, variant)
	// returns none of them for the hosts of a walk.
	Remote() []dataplane.Object
	// Exchange sends packets to the host through each tunnel and waits for their return. It
	// returns an error if no packet comes back through one of the tunnels. The host sends
	// its packets to the MACs of the devices in state.
	Exchange(ctx context.Context, state dataplane.State) error
}
