// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/backend"
)

// senders contains the public addresses of the peers of one kernelNetwork, by lease key.
type senders map[string][]netip.Addr

// apply makes s contain the peers of set, and returns the changes. An address of a changed lease
// may be in both results. If set is not complete, no lease is removed because it is missing. The
// cost depends on the number of changed leases, unless set.All is set.
func (s senders) apply(set backend.Set) (removed, added []netip.Addr) {
	for _, key := range backend.KeysToSync(set, s) {
		lease := set.Leases[key]
		if lease == nil && !set.Complete {
			continue
		}

		var want []netip.Addr
		if lease != nil {
			for _, e := range lease.Endpoints {
				want = append(want, e.PublicIP)
			}
		}
		if slices.Equal(s[key], want) {
			continue
		}

		removed = append(removed, s[key]...)
		added = append(added, want...)
		s[key] = want
		if lease == nil {
			delete(s, key)
		}
	}
	return removed, added
}

// list returns all addresses, each as often as leases have it, in any order.
func (s senders) list() []netip.Addr { return slices.Concat(slices.Collect(maps.Values(s))...) }
