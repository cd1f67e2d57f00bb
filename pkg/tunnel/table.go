package tunnel

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/gaissmai/bart"

	"flanneld/pkg/prefix"
)

// Peer is a host behind which a subnet is.
type Peer struct {
	Subnet netip.Prefix
	Public netip.Addr // where datagrams to it go, and come from; no two peers have the same
}

// Table says which peer has an address. It may be changed while tunnels use it.
type Table struct {
	writing sync.Mutex
	now     atomic.Pointer[routes]
}

// routes are not changed once a Table has them.
type routes struct {
	subnets *bart.Table[netip.Addr] // public addresses by subnet
	publics *bart.Table[struct{}]   // as prefixes of full length
}

// NewTable returns a table without peers.
func NewTable() *Table {
	t := &Table{}
	t.now.Store(&routes{new(bart.Table[netip.Addr]), new(bart.Table[struct{}])})
	return t
}

// few is up to how many changes are made by copying what each touches, instead
// of everything once.
const few = 64

// Update removes peers and then adds others. Packets see all of that or nothing.
func (t *Table) Update(removed, added []Peer) {
	t.writing.Lock()
	defer t.writing.Unlock()
	r := *t.now.Load()
	if len(removed)+len(added) > few {
		r = routes{r.subnets.Clone(), r.publics.Clone()}
		for _, p := range removed {
			r.subnets.Delete(p.Subnet)
			r.publics.Delete(prefix.Host(p.Public))
		}
		for _, p := range added {
			r.subnets.Insert(p.Subnet, p.Public)
			r.publics.Insert(prefix.Host(p.Public), struct{}{})
		}
		t.now.Store(&r)
		return
	}
	for _, p := range removed {
		r.subnets = r.subnets.DeletePersist(p.Subnet)
		r.publics = r.publics.DeletePersist(prefix.Host(p.Public))
	}
	for _, p := range added {
		r.subnets = r.subnets.InsertPersist(p.Subnet, p.Public)
		r.publics = r.publics.InsertPersist(prefix.Host(p.Public), struct{}{})
	}
	t.now.Store(&r)
}

// Size returns how many peers there are.
func (t *Table) Size() int { return t.now.Load().subnets.Size() }
