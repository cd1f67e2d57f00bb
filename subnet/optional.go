// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"context"
	"net/netip"
)

// The interfaces in this file are optional: a Manager implements those that its store needs. A
// caller finds out by a type assertion, and does without the method if the assertion fails.

// Warner is a Manager whose store shows warnings about this node to operators.
type Warner interface {
	// Warn publishes a warning about this node. reason is one word in CamelCase, by which
	// operators filter, and message is one line. Warn does not block. It drops warnings that are
	// repeated or too many, and warnings that the store refuses.
	Warn(reason, message string)
}

// AddressSource is a Manager whose store may know the addresses of this node.
type AddressSource interface {
	// PublicIPs returns the prescribed addresses, at most one for each family, IPv4 first. The node
	// itself detects its address in a family without a prescribed address. PublicIPs retries
	// failures that can pass, and returns when ctx ends, with its error.
	PublicIPs(ctx context.Context) ([]netip.Addr, error)
	// NodeIPs returns the node's own addresses, at most one for each family, as the last method that has read
	// them knows them. It returns none before, and does not block.
	NodeIPs() []netip.Addr
}

// LocationSource is a Manager whose store may have the location of this node.
type LocationSource interface {
	// Location returns the name of the location, or "" if there is none that can be used. It retries
	// failures that can pass, and returns when ctx ends, with its error.
	Location(ctx context.Context) (string, error)
}

// ConfigWatcher is a Manager whose Watch does not report changes of the network configuration.
type ConfigWatcher interface {
	// WatchConfig blocks. It calls sink from one goroutine with the text of the configuration: at
	// once, and after every change. The text is nil if there is no configuration. WatchConfig
	// returns when ctx ends, with its error.
	WatchConfig(ctx context.Context, sink func(text []byte)) error
}

// Resumer is a Manager that cannot recognize this host's lease by the node's name, but only by its
// public address, which may have changed while the store was unavailable.
type Resumer interface {
	// Resumed tells the manager, before Acquire, that this node had the lease own, from its last
	// known state. own contains the public addresses that the node has published in the store.
	// Acquire continues with that lease, even if the node has another address now, and gives back
	// others that the node has written. After Resumed, Acquire also continues with a lease that has
	// an identity in the data of its claim, such as a VTEP MAC. own is zero if that is all that is
	// known.
	Resumed(own Lease)
}

// Observer is a Manager that can serve one of several networks in a store.
type Observer interface {
	// Observe reads the configuration of the network and this host's lease from the store, both at the
	// same moment. The Observation is zero if the store does not have the configuration. Observe retries
	// failures that can pass, and returns when ctx ends, with its error.
	Observe(ctx context.Context, own Lease) (Observation, error)
}

// Releaser is a Manager that can give up this host's lease.
type Releaser interface {
	// Release deletes the lease own of this node from the store, unless it is a reservation, or another
	// node has taken its subnets since. It does not retry. The manager has no lease after that, even
	// if the store returns an error.
	Release(ctx context.Context, own Lease) error
}
