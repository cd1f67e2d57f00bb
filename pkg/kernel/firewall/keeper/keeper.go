// SPDX-License-Identifier: Apache-2.0

// Package keeper maintains the traffic rules of networks in the firewall of a host. It
// chooses the firewall, applies the rules, repairs them, and removes the rules that are left
// in other firewalls and from former networks.
package keeper

import (
	"context"
	"sync/atomic"
	"time"
)

// Config is what a Keeper needs.
type Config struct {
	// Resync is the period in which the rules are read even if the kernel has announced
	// no change.
	Resync time.Duration
	// LegacyResync replaces Resync for the variant of iptables whose changes the kernel
	// does not announce.
	LegacyResync time.Duration
	// Report is called after each attempt to apply the rules, except for one that the end
	// of ctx has cut off. repaired is set if another program had changed them.
	Report func(ctx context.Context, repaired bool, err error)
	// Cleaned is called at most once in each Keep, when no rules of former networks or in
	// other firewalls are left.
	Cleaned func()
}

// Keeper maintains the traffic rules of one network. A process has a Keeper for each of
// its networks, and one Host for all of them.
type Keeper struct {
	config Config
	host   *Host

	inUse  atomic.Value // a Flavour; nil before the first Keep
	logged Choice       // the last choice that was logged, without its Source
	// unreported is set if a Keep may have written rules and has ended before it could
	// report that. The next Keep finds the rules in place and logs them as written.
	unreported bool
}

// Keeper returns a Keeper that uses what h finds out about the host.
func (h *Host) Keeper(c Config) *Keeper { return &Keeper{config: c, host: h} }

// Flavour returns the flavour of the last Keep, or "" before the first Keep.
func (k *Keeper) Flavour() Flavour {
	f, _ := k.inUse.Load().(Flavour)
	return f
}
