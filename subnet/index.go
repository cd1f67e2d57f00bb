// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"fmt"
	"net/netip"

	"github.com/gaissmai/bart"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// holder is the lease that has a prefix.
type holder struct {
	lease  *Lease
	family prefix.Family
	public bool // the prefix is its public address, and it is the oldest lease that has it; otherwise it is its subnet
}

func (h holder) String() string {
	e, _ := h.lease.Endpoint(h.family)
	return fmt.Sprintf("%s of %s", e.Subnet, h.lease.Key)
}

// index finds overlapping prefixes. The zero index has none.
type index struct{ table bart.Table[holder] }

func (x *index) add(p netip.Prefix, h holder) { x.table.Insert(p, h) }
func (x *index) remove(p netip.Prefix)        { x.table.Delete(p) }

// get returns the holder of exactly p.
func (x *index) get(p netip.Prefix) (h holder, found bool) { return x.table.Get(p) }

// find returns the holder of a prefix that overlaps p. If several lie in p, it is the holder of
// the lowest.
func (x *index) find(p netip.Prefix) (h holder, found bool) {
	if !x.table.OverlapsPrefix(p) { // the usual case, and quick
		return holder{}, false
	}
	if h, found = x.table.LookupPrefix(p); found {
		return h, true
	}
	for _, h = range x.table.Subnets(p) {
		return h, true
	}
	return holder{}, false
}
