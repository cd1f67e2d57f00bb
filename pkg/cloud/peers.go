// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"slices"
	"sync"
	"time"
)

// Peers are the other hosts that have a lease.
type Peers struct {
	Hosts    []Host
	Complete bool // the store has answered: hosts that are not in Hosts are gone, unless Unreadable is set
	// Unreadable is set if the store has leases that cannot be read.
	Unreadable bool
}

// leases is what a keeper knows of the leases in the store. It is safe for concurrent use.
type leases struct {
	own       Host
	connected func() time.Time // KeeperConfig.Connected

	mu            sync.Mutex
	peers         Peers
	completeSince time.Time // since when peers has contained all leases of the store; zero if it does not
}

func (l *leases) set(p Peers) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.peers = p
	if !p.Complete || p.Unreadable {
		l.completeSince = time.Time{}
	} else if l.completeSince.IsZero() {
		l.completeSince = time.Now()
	}
}

// hosts returns all hosts that have a lease, including this one, and the time from which on this host has
// learned of each new lease. Both are zero if there may be leases that this host does not know. answered reports
// whether the store has told its leases and is connected.
func (l *leases) hosts() (all []Host, since time.Time, answered bool) {
	connected := l.connected()
	l.mu.Lock()
	defer l.mu.Unlock()
	answered = !connected.IsZero() && l.peers.Complete
	if !answered || l.peers.Unreadable {
		return nil, time.Time{}, answered
	}

	since = l.completeSince
	if connected.After(since) {
		since = connected
	}
	return append(slices.Clone(l.peers.Hosts), l.own), since, answered
}
