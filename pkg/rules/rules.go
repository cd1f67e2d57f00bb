// SPDX-License-Identifier: Apache-2.0

// Package rules maintains the traffic rules of networks in the firewall of a host. It
// chooses the firewall, applies the rules, repairs them, and removes those that other
// firewalls and former networks have left.
package rules

import (
	"context"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/firewall"
)

// Flavour is a kind of firewall.
type Flavour string

// The flavours.
const (
	IPTables Flavour = "iptables"
	NFTables Flavour = "nftables"
	// Auto stands for the flavour that suits the other programs of the host.
	Auto Flavour = "auto"
)

// Choice is the flavour that contains the rules, and the reason for it.
type Choice struct {
	Flavour Flavour
	Reason  string // for the log; Auto has reasons of its own
	// Source follows Reason in the log, and says where it is from. A change of Source
	// alone is not logged.
	Source string
}

// Config is what a Keeper needs.
type Config struct {
	// Resync is the period in which the rules are read even if the kernel has announced
	// no change.
	Resync time.Duration
	// LegacyResync replaces Resync for the variant of iptables whose changes the kernel
	// does not announce.
	LegacyResync time.Duration
	// Report is called after each attempt to apply the rules. repaired is set if another
	// program had changed them.
	Report func(ctx context.Context, repaired bool, err error)
	// Cleaned is called when no rules of former networks are left.
	Cleaned func()
}

// Keeper maintains the traffic rules of one network. A process has a Keeper for each of
// its networks, and one Host for all of them.
type Keeper struct {
	config Config
	host   *Host

	inUse  atomic.Value // a Flavour; nil before the first Keep
	logged Choice       // without Source
	// unreported is set if a Keep has ended while it wrote rules. The next one finds the
	// result and reports it.
	unreported bool
}

// Keeper returns a Keeper that uses what h finds out about the host.
func (h *Host) Keeper(c Config) *Keeper { return &Keeper{config: c, host: h} }

// Flavour returns the flavour that contains the rules, or "" before the first Keep.
func (k *Keeper) Flavour() Flavour {
	f, _ := k.inUse.Load().(Flavour)
	return f
}

// Keep maintains the rules of p until ctx ends. They stay after that. It calls tried after
// the first attempt to apply them, even if that fails. A Keeper keeps one policy at a time:
// the next Keep begins after the last one has returned.
func (k *Keeper) Keep(ctx context.Context, c Choice, p firewall.Policy, tried func()) {
	newSession(k, k.choose(ctx, c), p, tried).run(ctx)
}

// choose returns the flavour for a session. It logs the flavour if it differs from that of
// the last session.
func (k *Keeper) choose(ctx context.Context, c Choice) Flavour {
	if c.Flavour == Auto {
		c.Flavour, c.Reason = k.host.automatic()
	}
	source := c.Source
	if c.Source = ""; c != k.logged {
		k.logged = c
		klog.FromContext(ctx).Info("firewall chosen", "firewall", string(c.Flavour), "because", c.Reason+source)
	}
	k.inUse.Store(c.Flavour)
	return c.Flavour
}
