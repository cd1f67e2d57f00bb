// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"net/netip"
	"path"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/subnet"
)

// Manager is a subnet.Manager on etcd. It is safe for concurrent use.
type Manager struct {
	cfg    Config
	dir    string // prefix of the keys of leases, with a slash at its end
	timing timing
	wall   func() time.Time // returns the present time without the reading of the monotonic clock
	client *client
	guest  bool // the connection belongs to another manager
	outage *loglimit.Outage
	// undecodable limits the log lines about leases that cannot be read.
	undecodable *loglimit.Changes

	// writing guards own, unanswered and spare. Unlike a mutex, it lets a method return when its context ends.
	writing *semaphore.Weighted
	own     ownLease
	// unanswered has the writes of this host's key since own was set, without an answer: the store may have executed
	// one of them, or may still do so.
	unanswered []ownLease
	spare      grant                         // an etcd lease that no key uses yet, for all tries to write one; zero: none
	self       atomic.Pointer[self]          // this host's part of the store; never nil
	cache      atomic.Pointer[leaseCache]    // the leases as the last method knew them, while no Watch has them; never nil
	exhausted  atomic.Pointer[exhaustedPool] // see awaitFreeSubnet
	resumed    atomic.Pointer[subnet.Lease]  // see Resumed
	slow       atomic.Bool                   // the last request that the method call made took longer than timing.slow
	patience   wait.Patience                 // with requests
}

var (
	_ subnet.Manager = (*Manager)(nil)
	_ subnet.Resumer = (*Manager)(nil)
)

// Warn does nothing, and the next three methods return nothing, because etcd knows hosts only by their leases.
func (*Manager) Warn(string, string) {}

// PublicIPs implements subnet.Manager.
func (*Manager) PublicIPs(context.Context) ([]netip.Addr, error) { return nil, nil }

// NodeIPs implements subnet.Manager.
func (*Manager) NodeIPs() []netip.Addr { return nil }

// Location implements subnet.Manager.
func (*Manager) Location(context.Context) (string, error) { return "", nil }

// Close ends the connection. Methods that are still running return an error. Close does nothing for
// a manager that Network returned.
func (m *Manager) Close() error {
	if !m.guest {
		m.client.close()
	}
	return nil
}

// Reconnect closes the connection. The next request makes a new one. The caller must call Reconnect
// when this host has lost an address, because a connection from that address would be silent for a
// long time.
func (m *Manager) Reconnect() { m.client.renew() }

func (m *Manager) configKey() string { return path.Join(m.cfg.Prefix, "config") }
