// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"net/netip"
	"slices"
	"testing"
)

func TestLeasesAreSortedAsNumbers(t *testing.T) {
	of := func(key string, subnets ...string) Lease {
		l := Lease{Key: key}
		for _, s := range subnets {
			l.Endpoints = append(l.Endpoints, Endpoint{Subnet: netip.MustParsePrefix(s)})
		}
		return l
	}
	want := []Lease{
		of("broken"), of("b", "10.5.12.0/24"), of("a", "10.5.52.0/24", "fd00:5:0:52::/64"), of("c", "10.5.52.0/24", "fd00:5:0:152::/64"),
		of("d", "10.5.152.0/24"), of("e", "10.5.152.0/24"), of("f", "fd00:5:0:9::/64"),
	}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, Lease.Compare)
	for i, l := range got {
		if l.Key != want[i].Key {
			t.Errorf("lease %d is %s %v, want %s", i, l.Key, l.Subnets(), want[i].Key)
		}
	}
}
