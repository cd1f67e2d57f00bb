// SPDX-License-Identifier: Apache-2.0

package subnet_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/flanneld/flanneld/subnet"
)

// TestChangeAndResetAgree changes one lease after the other, in a network so small that the leases
// contradict each other. It compares an Arbiter that applies each change with one that decides
// about all leases again.
//
//stages:rest it compares many random changes
func TestChangeAndResetAgree(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/20","SubnetMin":"10.5.1.0","SubnetMax":"10.5.12.0",
		"EnableIPv6":true,"IPv6Network":"fd00:10:5::/60"}`))
	if err != nil {
		t.Fatal(err)
	}
	ours := lease("own", 5, "10.5.1.0/24", "192.0.2.1", "fd00:10:5:1::/64", "2001:db8::1")
	own := subnet.Claimant{Lease: &ours, Identities: []string{"MAC 1"}}
	local := 0
	for seed := range uint64(300) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		all := map[string]subnet.Claimant{}
		a := subnet.NewArbiter(cfg, own)
		for step := range 60 {
			key := fmt.Sprintf("k%02d", rnd.IntN(12))
			c := subnet.Claimant{Lease: &subnet.Lease{Key: key}}
			if rnd.IntN(3) > 0 {
				c = randomClaimant(rnd, key)
			}
			all[key] = c
			if len(c.Lease.Endpoints) == 0 {
				delete(all, key)
			}
			var claimants []subnet.Claimant
			for _, c := range all {
				claimants = append(claimants, c)
			}
			if a.Change(c) {
				local++
			} else {
				a.Reset(claimants)
			}
			fresh := subnet.NewArbiter(cfg, own)
			fresh.Reset(claimants)
			if diff := cmp.Diff(accepted(fresh), accepted(a)); diff != "" {
				t.Fatalf("seed %d step %d: accepted (-anew +by change):\n%s", seed, step, diff)
			}
			if diff := cmp.Diff(fresh.AllRefused(), a.AllRefused()); diff != "" {
				t.Fatalf("seed %d step %d: refused (-anew +by change):\n%s", seed, step, diff)
			}
			if diff := cmp.Diff(fresh.Shared(), a.Shared(), cmpopts.EquateComparable(netip.Addr{})); diff != "" {
				t.Fatalf("seed %d step %d: leases that share addresses (-anew +by change):\n%s", seed, step, diff)
			}
		}
	}
	if local < 300*60/4 {
		t.Errorf("only %d of %d changes were decided by themselves", local, 300*60)
	}
}

func accepted(a *subnet.Arbiter) []string {
	var s []string
	for _, l := range a.Accepted() {
		s = append(s, fmt.Sprint(*l))
	}
	slices.Sort(s)
	return s
}

func randomClaimant(rnd *rand.Rand, key string) subnet.Claimant {
	public := 1 + rnd.IntN(20)
	ends := []string{
		fmt.Sprintf("10.5.%d.0/24", rnd.IntN(18)), fmt.Sprintf("192.0.2.%d", public),
		fmt.Sprintf("fd00:10:5:%x::/64", rnd.IntN(18)), fmt.Sprintf("2001:db8::%d", public),
	}
	if rnd.IntN(10) == 0 {
		ends[0] = fmt.Sprintf("10.5.%d.0/23", 2*rnd.IntN(8))
	}
	if rnd.IntN(3) == 0 {
		ends = ends[:2]
	}
	if rnd.IntN(10) == 0 {
		ends[1] = fmt.Sprintf("10.5.%d.9", rnd.IntN(18))
	}
	l := lease(key, uint64(rnd.IntN(10)), ends...)
	l.Claimed = uint64(rnd.IntN(5))
	c := subnet.Claimant{Lease: &l, Identities: []string{fmt.Sprintf("MAC %d", rnd.IntN(40))}}
	if rnd.IntN(3) == 0 {
		less, identities := l, c.Identities
		l.NextType = "another"
		c.Less = &subnet.Claimant{Lease: &less, Identities: identities}
		c.Identities = append(slices.Clone(identities), fmt.Sprintf("MAC %d", rnd.IntN(40)))
	}
	return c
}

// TestChangeCostsOneLease adds, changes and removes leases that contradict no other lease. The
// arbiter must decide about each of these changes without the other leases.
func TestChangeCostsOneLease(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16"}`))
	if err != nil {
		t.Fatal(err)
	}
	a := subnet.NewArbiter(cfg, subnet.Claimant{Lease: &subnet.Lease{Key: "own"}})
	for i, step := range []struct{ key, subnet, public, mac string }{
		{"a", "10.5.1.0/24", "192.0.2.1", "MAC 1"},
		{"b", "10.5.2.0/24", "192.0.2.2", "MAC 2"},
		{"a", "10.5.1.0/24", "192.0.2.1", "MAC 3"}, // another MAC
		{"a", "10.5.1.0/24", "192.0.2.3", "MAC 3"}, // another address
		{"a", "10.5.3.0/24", "192.0.2.3", "MAC 3"}, // another subnet
		{"c", "10.5.1.0/24", "192.0.2.1", "MAC 1"}, // the subnet, address and MAC that a had
		{"c", "", "", ""},
		{"d", "10.5.1.0/24", "192.0.2.1", "MAC 1"}, // the subnet, address and MAC that c had
		{"e", "10.5.5.0/24", "192.0.2.1", "MAC 5"}, // the address of d
		{"e", "10.5.5.0/24", "192.0.2.2", "MAC 5"}, // the address of b
		{"f", "10.5.6.0/24", "192.0.2.2", "MAC 6"}, // the address of b and e
		{"b", "", "", ""},
		{"b", "10.5.2.0/24", "192.0.2.2", "MAC 2"},
		{"f", "", "", ""},
	} {
		c := subnet.Claimant{Lease: &subnet.Lease{Key: step.key}}
		if step.subnet != "" {
			l := lease(step.key, uint64(i), step.subnet, step.public)
			c = subnet.Claimant{Lease: &l, Identities: []string{step.mac}}
		}
		if !a.Change(c) {
			t.Fatalf("step %d: %+v cannot be decided by itself: %v", i, step, a.AllRefused())
		}
	}
	if have := slices.Sorted(maps.Keys(a.Accepted())); !slices.Equal(have, []string{"a", "b", "d", "e"}) {
		t.Errorf("accepted are %v", have)
	}
}
