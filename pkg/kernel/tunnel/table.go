// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"maps"
	"net/netip"
	"sync/atomic"

	"github.com/gaissmai/bart"
)

// Table maps addresses to peers. It may be changed while tunnels use it.
type Table struct{ current atomic.Pointer[routes] }

// routes is immutable once a Table contains it.
type routes struct {
	peers   map[netip.Prefix]netip.Addr // public addresses by subnet; several subnets may have the same one
	publics map[netip.Addr]struct{}     // the values of peers
	subnets bart.Table[netip.Addr]      // peers, for lookups of addresses
}

// NewTable returns a table without peers.
func NewTable() *Table {
	t := &Table{}
	t.current.Store(&routes{})
	return t
}

// Peers returns the public addresses of all peers, by subnet. They are the destinations of
// datagrams to the peer, and the sources of datagrams from it. The map is read-only.
func (t *Table) Peers() map[netip.Prefix]netip.Addr { return t.current.Load().peers }

// Set makes the table contain exactly peers, in the form that Peers returns, and takes ownership of
// the map. Tunnels see all of the changes or none.
func (t *Table) Set(peers map[netip.Prefix]netip.Addr) {
	if maps.Equal(peers, t.Peers()) {
		return
	}

	r := &routes{peers: peers, publics: make(map[netip.Addr]struct{}, len(peers))}
	for subnet, public := range peers {
		r.publics[public] = struct{}{}
		r.subnets.Insert(subnet, public)
	}
	t.current.Store(r)
}
