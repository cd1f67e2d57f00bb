package dataplane

// Event is a change that the kernel announced.
type Event struct {
	Object  Object
	Deleted bool
	// Replaced is set when a route took the place of another, which the
	// kernel does not name.
	Replaced bool
	// Nexthop is the id of a nexthop object that has gone or leads elsewhere now, and
	// Object nil then. The kernel may say nothing of the routes that use it.
	Nexthop uint32
}

// Monitor listens to what the kernel announces. It hears of everything that
// happens after it was made, also of the own writes: an announcement is there
// to be drained as soon as the write is acknowledged.
type Monitor interface {
	// Ready delivers when there may be something to drain.
	Ready() <-chan struct{}
	// Drain returns what was announced since the last time, in order. lost
	// means that this is not all, or that something happened which cannot be
	// told as an event, such as a link that went down and took its routes
	// along: what is known of the kernel is void then. rerouted means that others have
	// changed routes, addresses or links, in the scope or not: OnLink may say something
	// else now.
	Drain() (events []Event, rerouted, lost bool)
	// Mute has nothing announced until the next Drain, which says that it is lost.
	Mute()
	// Close ends the monitor.
	Close() error
}
