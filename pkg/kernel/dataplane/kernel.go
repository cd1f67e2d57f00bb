// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"context"
	"net/netip"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// Kernel reads and changes the network state of an operating system.
type Kernel interface {
	// Read returns the state of the kernel in the scope: the scope's devices, their FDB
	// entries, their addresses and neighbours in the scope's networks, and the routes of
	// the main table, on any device, for which Scope.Shows is true. A device that does not
	// exist is no error. Read leaves out entries that are learned, not permanent, for a
	// group, or link-local. For a scope without networks it reads only the links. For a
	// scope with Connected it does not read the routing table, see Scope.Connected. If a
	// dump is interrupted or incomplete, Read returns an error. The state is then partial,
	// and the caller must not use it.
	Read(ctx context.Context, s Scope) (State, error)
	// Apply executes all of ops in order and returns the failures. A failure does not
	// stop the operations after it. If ctx ends, the remaining operations fail. Deleting
	// an object that does not exist succeeds. Apply writes the attributes that it has
	// chosen, such as NexthopID, into the objects of ops. The caller needs them for its
	// cache, because a Monitor need not announce the caller's own writes.
	Apply(ctx context.Context, ops []Op) []OpError
	// Monitor starts to listen to changes in the scope. changed receives when there may be
	// announcements to drain. The caller closes the monitor.
	Monitor(s Scope, changed wait.Signal) (Monitor, error)
	// OnLink returns the device whose directly connected network contains dst: the device
	// of the route to dst, if that route has no gateway. It returns "" if dst is an address of
	// this host, unreachable or behind a gateway, or if the route has several next hops or its
	// device is unknown. It also returns "" if the route is a default route (see IsNetwork), or
	// if the device does not resolve addresses to neighbours, such as the device of a VPN. The
	// route may use a device other than external only if it belongs to an address of the device:
	// another route to a host, such as that of a VPN, does not prove that the host is there.
	OnLink(ctx context.Context, dst netip.Addr, external string) (dev string, err error)
}

func write(ctx context.Context, k Kernel, ops []Op) []OpError {
	if log := klog.FromContext(ctx).V(4); log.Enabled() {
		for _, op := range ops {
			log.Info("kernel change", "op", op.String())
		}
	}
	return k.Apply(ctx, ops)
}

// Event is a change that the kernel announced.
type Event struct {
	Object  Object
	Deleted bool
	// Replaced is set if Object is a route that has replaced another route. The kernel
	// does not announce which one.
	Replaced bool
	// Nexthop is the id of a nexthop object that has been deleted or has another gateway
	// now; 0 for any other change. If it is set, Object is nil. The kernel may not announce
	// what happened to the routes that use the nexthop object.
	Nexthop uint32
}

// Monitor receives the kernel's announcements of changes. It receives all changes in its
// scope that other programs make after its creation, unless Drain reports lost. It may also
// receive the caller's own writes. The announcement of a write is available to Drain as
// soon as the kernel has acknowledged the write.
type Monitor interface {
	// Drain returns the events since the last call, in order. lost means that some events
	// are missing, or that no event can describe what has happened, for example that a
	// link went down and the kernel deleted its routes. A cached state is invalid then.
	// rerouted means that another program may have changed routes, addresses or links,
	// inside or outside of the scope. OnLink may then return another result.
	Drain() (events []Event, rerouted, lost bool)
	// Close ends the monitor.
	Close() error
}
