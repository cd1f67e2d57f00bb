// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"fmt"
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

// equal reports whether p and o are equal. The order of the hosts does not count.
func (p Peers) equal(o Peers) bool {
	sorted := func(hosts []Host) []string {
		names := make([]string, len(hosts))
		for i, h := range hosts {
			names[i] = fmt.Sprint(h)
		}
		slices.Sort(names)
		return names
	}
	return p.Complete == o.Complete && p.Unreadable == o.Unreadable && slices.Equal(sorted(p.Hosts), sorted(o.Hosts))
}

// leases is what a keeper knows of the leases in the store. It is safe for concurrent use.
type leases struct {
	own       Host
	connected func() time.Time // KeeperConfig.Connected

	mu            sync.Mutex
	peers         Peers
	read          bool      // a comparison has used peers
	completeSince time.Time // since when peers has contained all leases of the store; zero if it does not
}

// set sets the other hosts that have a lease. compare is set if a comparison is needed: p differs from the earlier
// peers, and a comparison has used these. After that, set does not ask again until a comparison has used p.
func (l *leases) set(p Peers) (compare bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	compare = l.read && !p.equal(l.peers)
	if l.peers = p; compare {
		l.read = false
	}
	switch {
	case !p.Complete || p.Unreadable:
		l.completeSince = time.Time{}
	case l.completeSince.IsZero():
		l.completeSince = time.Now()
	}
	return compare
}

// answered reports whether the store has told its leases and is connected.
func (l *leases) answered() bool {
	connected := !l.connected().IsZero()
	l.mu.Lock()
	defer l.mu.Unlock()
	return connected && l.peers.Complete
}

// hosts returns all hosts that have a lease, including this one. since is the time from which on this host has
// learned of each new lease. If there may be leases that this host does not know, since is zero and all is nil.
func (l *leases) hosts() (all []Host, since time.Time) {
	connected := l.connected()
	l.mu.Lock()
	defer l.mu.Unlock()
	if connected.IsZero() || l.completeSince.IsZero() {
		return nil, time.Time{}
	}
	if since = l.completeSince; connected.After(since) {
		since = connected
	}
	return append(slices.Clone(l.peers.Hosts), l.own), since
}

// others returns the other hosts, without those whose leases are refused. It sets l.read, so that the next change
// of the hosts causes a comparison.
func (l *leases) others() []Host {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.read = true
	return slices.DeleteFunc(slices.Clone(l.peers.Hosts), func(h Host) bool { return h.Refused })
}
