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

// PublicIPSource is a Manager whose store may prescribe the public addresses of this node.
type PublicIPSource interface {
	// PublicIPs returns the prescribed addresses, at most one for each family, IPv4 first. It
	// returns none for a family whose address the node detects itself. It retries failures that
	// can pass, and returns when ctx ends, with its error.
	PublicIPs(ctx context.Context) ([]netip.Addr, error)
}

// ConfigWatcher is a Manager whose Watch does not report changes of the network configuration.
type ConfigWatcher interface {
	// WatchConfig blocks. It calls sink from one goroutine with the text of the configuration: at
	// once, and after every change. The text is nil if there is no configuration. WatchConfig
	// returns when ctx ends, with its error.
	WatchConfig(ctx context.Context, sink func(text []byte)) error
}

// Resumer is a Manager that cannot recognize the own lease by the node's name, but only by its
// public address, which may have changed while the store was unavailable.
type Resumer interface {
	// Resumed tells the manager that this node uses own, which it knows from its last known
	// state. own contains the addresses with which it was published. If the store still has own
	// unchanged, Acquire continues with it, even if the node has another address now.
	Resumed(own Lease)
}

// Sighter is implemented by managers of one of several networks.
type Sighter interface {
	// Sight reads from the store, at one moment, whether it has the configuration of the network and
	// the own lease. The Sighting is zero if it does not have the configuration. Sight retries failures
	// that can pass, and returns when ctx ends, with its error.
	Sight(ctx context.Context, own Lease) (Sighting, error)
}

// Releaser is implemented by managers that can give up the own lease.
type Releaser interface {
	// Release deletes a lease of this node from the store, unless it is a reservation, or another
	// node has taken its subnets since. The manager has no lease after that.
	Release(ctx context.Context, own Lease) error
}
