// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"context"
	"encoding/json"
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

// Resumer is a Manager that cannot recognize the own lease by the node's name, but only by its
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
	// Observe reads the configuration of the network and the own lease from the store, both at the
	// same moment. The Observation is zero if the store does not have the configuration. Observe retries
	// failures that can pass, and returns when ctx ends, with its error.
	Observe(ctx context.Context, own Lease) (Observation, error)
}

// Releaser is a Manager that can give up the own lease.
type Releaser interface {
	// Release deletes the lease own of this node from the store, unless it is a reservation, or another
	// node has taken its subnets since. It does not retry. The manager has no lease after that, even
	// if the store returns an error.
	Release(ctx context.Context, own Lease) error
}

// Leader is the node that does a task for all nodes of a network.
type Leader struct {
	Name string `json:"name"` // name of the Node, or public address; empty if there is no leader
	// Announced is the JSON that the leader has announced last; nil if it has announced nothing yet.
	Announced json.RawMessage `json:"announced,omitempty"`
}

// Announce publishes text to all nodes: Elector.Leader returns it as Leader.Announced. It returns an
// error if this node is not the leader any more, or the store does not answer.
type Announce func(ctx context.Context, text json.RawMessage) error

// Elector is a Manager that can elect one node of the network for a task. The name of a task has the
// form of a DNS label.
type Elector interface {
	// Lead tries once to make this node the leader. If that succeeds, it runs lead, and returns nil
	// when lead has returned. The context term ends when ctx ends, when this node is not the leader
	// any more, or when the store cannot be reached for 20 seconds. In the last case another node
	// can become the leader only 10 seconds later, so that the two terms do not overlap. own is the
	// lease of this node. Lead returns ErrLed, wrapped, if there is another leader.
	Lead(ctx context.Context, task string, own Lease, lead func(term context.Context, announce Announce)) error
	// Leader tries once to read the present leader.
	Leader(ctx context.Context, task string) (Leader, error)
}
