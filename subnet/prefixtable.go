// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"fmt"
	"net/netip"

	"github.com/gaissmai/bart"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// prefixOwner is the lease that has a prefix.
type prefixOwner struct {
	lease  *Lease
	family prefix.Family
	public bool // the prefix is its public address, and it is the oldest lease that has it; otherwise it is its subnet
}

func (o prefixOwner) String() string {
	e, _ := o.lease.Endpoint(o.family)
	return fmt.Sprintf("%s of %s", e.Subnet, o.lease.Key)
}

// prefixTable finds overlapping prefixes. The zero table is empty.
type prefixTable struct{ table bart.Table[prefixOwner] }

func (t *prefixTable) add(p netip.Prefix, o prefixOwner) { t.table.Insert(p, o) }
func (t *prefixTable) remove(p netip.Prefix)             { t.table.Delete(p) }

// get returns the owner of exactly p.
func (t *prefixTable) get(p netip.Prefix) (o prefixOwner, found bool) { return t.table.Get(p) }

// find returns the owner of a prefix that overlaps p. If several prefixes lie in p, it is the owner
// of the lowest.
func (t *prefixTable) find(p netip.Prefix) (o prefixOwner, found bool) {
	if !t.table.OverlapsPrefix(p) { // the usual case, and quick
		return prefixOwner{}, false
	}
	if o, found = t.table.LookupPrefix(p); found {
		return o, true
	}
	for _, o = range t.table.Subnets(p) {
		return o, true
	}
	return prefixOwner{}, false
}
