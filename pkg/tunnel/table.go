// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/gaissmai/bart"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// Peer is the subnet of another host, and the public address of that host. A host with
// a subnet of each family is two Peers.
type Peer struct {
	Subnet netip.Prefix
	Public netip.Addr // destination of datagrams to the peer, and source of datagrams from it; several peers may share it
}

// Table maps addresses to peers. It may be changed while tunnels use it.
type Table struct {
	writing sync.Mutex
	current atomic.Pointer[routes]
}

// routes is immutable once a Table contains it.
type routes struct {
	subnets *bart.Table[netip.Addr] // public addresses by subnet
	publics *bart.Table[int]        // number of peers by public address, which is a prefix of full length
}

// peersAt returns the number of peers with a public address.
func (r routes) peersAt(public netip.Addr) int {
	n, _ := r.publics.Get(prefix.Host(public))
	return n
}

// NewTable returns a table without peers.
func NewTable() *Table {
	t := &Table{}
	t.current.Store(&routes{new(bart.Table[netip.Addr]), new(bart.Table[int])})
	return t
}

// maxPersistentChanges is the maximum number of changes for which Update copies only the
// parts of the tables that each change touches. For more changes, one copy of the whole
// tables is faster.
const maxPersistentChanges = 64

// Update removes peers and then adds others. Tunnels see all of the changes or none. A
// removed peer must be in the table. The subnet of an added peer must not be in the table
// after the removals. Otherwise the number of peers by public address becomes wrong.
func (t *Table) Update(removed, added []Peer) {
	t.writing.Lock()
	defer t.writing.Unlock()
	r := *t.current.Load()
	if len(removed)+len(added) > maxPersistentChanges {
		r = routes{r.subnets.Clone(), r.publics.Clone()}
		for _, p := range removed {
			r.subnets.Delete(p.Subnet)
			if host, left := prefix.Host(p.Public), r.peersAt(p.Public)-1; left > 0 {
				r.publics.Insert(host, left)
			} else {
				r.publics.Delete(host)
			}
		}
		for _, p := range added {
			r.subnets.Insert(p.Subnet, p.Public)
			r.publics.Insert(prefix.Host(p.Public), r.peersAt(p.Public)+1)
		}
		t.current.Store(&r)
		return
	}
	for _, p := range removed {
		r.subnets = r.subnets.DeletePersist(p.Subnet)
		if host, left := prefix.Host(p.Public), r.peersAt(p.Public)-1; left > 0 {
			r.publics = r.publics.InsertPersist(host, left)
		} else {
			r.publics = r.publics.DeletePersist(host)
		}
	}
	for _, p := range added {
		r.subnets = r.subnets.InsertPersist(p.Subnet, p.Public)
		r.publics = r.publics.InsertPersist(prefix.Host(p.Public), r.peersAt(p.Public)+1)
	}
	t.current.Store(&r)
}

// Size returns the number of subnets of peers.
func (t *Table) Size() int { return t.current.Load().subnets.Size() }
