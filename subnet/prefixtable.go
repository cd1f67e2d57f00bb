// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"fmt"
	"net/netip"

	"github.com/gaissmai/bart"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// prefixOwner is the lease that has a prefix.
type prefixOwner struct {
	lease  *Lease // nil for a public address, which several leases may have
	family prefix.Family
}

func (o prefixOwner) String() string {
	e, _ := o.lease.Endpoint(o.family)
	return fmt.Sprintf("%s of %s", e.Subnet, o.lease.Key)
}

// prefixTable finds overlapping prefixes. The zero table is empty.
type prefixTable struct{ bart.Table[prefixOwner] }

// find returns the owner of a prefix that overlaps p. If several prefixes lie in p, find returns the
// owner of the lowest one.
func (t *prefixTable) find(p netip.Prefix) (o prefixOwner, found bool) {
	if !t.OverlapsPrefix(p) { // usually nothing overlaps, and this is the quickest check
		return prefixOwner{}, false
	}
	if o, found = t.LookupPrefix(p); found {
		return o, true
	}
	for _, o = range t.Subnets(p) {
		return o, true
	}
	return prefixOwner{}, false
}
