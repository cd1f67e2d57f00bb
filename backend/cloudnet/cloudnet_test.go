// SPDX-License-Identifier: Apache-2.0

package cloudnet

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/subnet"
)

// TestRefusedLeasesCount checks that hosts returns the host of a refused lease, so that its
// route stays. The host must be marked as refused, because it cannot be reached by other tables.
func TestRefusedLeasesCount(t *testing.T) {
	address := netip.MustParseAddr("192.168.77.1")
	l := &subnet.Lease{Endpoints: []subnet.Endpoint{{Subnet: netip.MustParsePrefix("10.5.1.0/24"), PublicIP: address}}}
	for _, set := range []backend.Set{
		{Leases: map[string]*subnet.Lease{"a": l}},
		{Refused: func() []*subnet.Lease { return []*subnet.Lease{l} }},
	} {
		if got := hosts(set); len(got) != 1 || got[0].Refused != (set.Refused != nil) || !slices.Equal(got[0].Subnets, l.Subnets()) || !slices.Contains(got[0].Addresses, address) {
			t.Errorf("hosts %v, want the one with the lease", got)
		}
	}
}
