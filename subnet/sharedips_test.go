// SPDX-License-Identifier: Apache-2.0

package subnet_test

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/subnet"
)

// TestShared lets leases share an address and stop sharing it, and the arbiter decide about one lease or
// about all again.
func TestShared(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16"}`))
	if err != nil {
		t.Fatal(err)
	}
	public := netip.MustParseAddr("192.0.2.7")
	claim := func(key, prefix, public string) subnet.Claimant {
		l := lease(key, 1, prefix, public)
		return subnet.Claimant{Lease: &l}
	}
	all := map[string]subnet.Claimant{}
	steps := []struct {
		name        string
		key, public string // public is empty if the step removes the lease
		want        []subnet.SharedPublicIP
	}{
		{"alone", "b", "192.0.2.7", nil},
		{"the second", "a", "192.0.2.7", []subnet.SharedPublicIP{{PublicIP: public, Keys: []string{"a", "b"}}}},
		{"the third", "c", "192.0.2.7", []subnet.SharedPublicIP{{PublicIP: public, Keys: []string{"a", "b", "c"}}}},
		{"one moves", "a", "192.0.2.8", []subnet.SharedPublicIP{{PublicIP: public, Keys: []string{"b", "c"}}}},
		{"one goes", "b", "", nil},
		{"again", "a", "192.0.2.7", []subnet.SharedPublicIP{{PublicIP: public, Keys: []string{"a", "c"}}}},
	}
	subnets := map[string]string{"a": "10.5.1.0/24", "b": "10.5.2.0/24", "c": "10.5.3.0/24"}
	for _, anew := range []bool{false, true} {
		a := subnet.NewArbiter(cfg, subnet.Claimant{Lease: &subnet.Lease{Key: "own"}})
		clear(all)
		for _, s := range steps {
			c := subnet.Claimant{Lease: &subnet.Lease{Key: s.key}}
			delete(all, s.key)
			if s.public != "" {
				c = claim(s.key, subnets[s.key], s.public)
				all[s.key] = c
			}
			if !anew && !a.Change(c) {
				t.Errorf("%s: it cannot be decided by itself", s.name)
			}
			if anew {
				var claimants []subnet.Claimant
				for _, c := range all {
					claimants = append(claimants, c)
				}
				a.Reset(claimants)
			}
			if diff := cmp.Diff(s.want, a.Shared(), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
				t.Errorf("%s, anew %v (-want +got):\n%s", s.name, anew, diff)
			}
			if n := len(a.Accepted()); n != len(all) {
				t.Errorf("%s, anew %v: %d of %d are accepted: %v", s.name, anew, n, len(all), a.AllRefused())
			}
		}
	}
}
