// SPDX-License-Identifier: Apache-2.0

package dataplane

// Event is a change that the kernel announced.
type Event struct {
	Object  Object
	Deleted bool
	// Replaced is set if a route has replaced another one, which the kernel does not
	// name.
	Replaced bool
	// Nexthop is the id of a nexthop object that has been deleted or has another gateway
	// now. Object is nil in that case. The kernel may not announce what happened to the
	// routes that use the nexthop object.
	Nexthop uint32
}

// Monitor receives the kernel's announcements of changes. It receives all changes after
// its creation, including the caller's own writes. The announcement of a write is
// available to Drain as soon as the kernel has acknowledged the write.
type Monitor interface {
	// Ready returns a channel that receives when there may be announcements to drain.
	Ready() <-chan struct{}
	// Drain returns the events since the last call, in order. lost means that some are
	// missing, or that something happened which no event can describe, such as a link
	// that went down and took its routes along. A cached state is invalid then. rerouted
	// means that another program has changed routes, addresses or links, inside or
	// outside of the scope, so that OnLink may return another result.
	Drain() (events []Event, rerouted, lost bool)
	// Mute suspends announcements until the next Drain, which then reports that some were
	// lost.
	Mute()
	// Close ends the monitor.
	Close() error
}
