// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/flanneld/flanneld/subnet"
)

func TestGracePeriod(t *testing.T) {
	const margin, grace = time.Hour, time.Minute
	lease := func(key, s, public string) *entry {
		p := netip.MustParsePrefix(s)
		return &entry{key: key, subnets: []netip.Prefix{p}, lease: subnet.Lease{Key: key, Endpoints: []subnet.Endpoint{{Subnet: p, PublicIP: netip.MustParseAddr(public)}}}}
	}
	entries := map[string]*entry{}
	for _, e := range []*entry{lease("a", "10.5.1.0/24", "192.0.2.1"), lease("b", "10.5.2.0/24", "192.0.2.2"), lease("c", "10.5.3.0/24", "192.0.2.3")} {
		entries[e.key] = e
	}
	now := time.Now()
	var r gracePeriod
	later := func(d time.Duration) []string {
		now = now.Add(d)
		r.contact(now, margin, grace)
		return r.expired(t.Context())
	}
	spared := func(want bool, keys ...string) {
		t.Helper()
		for _, key := range keys {
			if got := r.retain(key); got != want {
				t.Errorf("%s is spared: %t, want %t", key, got, want)
			}
		}
	}
	gone := func(what string, got []string, want ...string) {
		t.Helper()
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}

	gone("at first", later(0))
	spared(false, "a")
	gone("after a short outage", later(margin))
	spared(false, "a")

	gone("after a long one", later(margin+1))
	spared(true, "a", "b", "c")
	gone("with a taken again", r.replaced(lease("a", "10.5.1.0/24", "192.0.2.1"), entries))
	gone("with b's subnet another's", r.replaced(lease("d", "10.5.2.0/25", "192.0.2.9"), entries), "b")
	gone("with c's node elsewhere", r.replaced(lease("e", "10.5.8.0/24", "192.0.2.3"), entries), "c")
	spared(true, "b")
	gone("just before its end", later(grace-1))
	gone("at its end", later(1), "b")
	gone("once more", later(1))
	spared(false, "a")
}

// TestListAfterTheGracePeriod expects that a list after the grace period removes all leases that it
// does not contain, also those that were retained.
func TestListAfterTheGracePeriod(t *testing.T) {
	now := time.Now()
	over := gracePeriod{lastContact: now, until: now, expiring: map[string]struct{}{"a": {}}}
	old := leaseCache{entries: map[string]*entry{"a": {key: "a"}}, gracePeriod: over}
	cache := leaseCache{entries: map[string]*entry{"b": {key: "b"}}, gracePeriod: over}
	cache.retainFrom(old)
	if keys := slices.Collect(maps.Keys(cache.entries)); !slices.Equal(keys, []string{"b"}) || len(cache.expiring) > 0 {
		t.Errorf("there are %v, of these expiring %v", keys, cache.expiring)
	}
}

// TestListKeepsLeasesOfOneAddress lists two leases with one public address. One of them was
// retained, and was written again while the host did not watch. The other lease must not replace
// it.
func TestListKeepsLeasesOfOneAddress(t *testing.T) {
	lease := func(key, s string) *entry {
		e := subnet.Endpoint{Subnet: netip.MustParsePrefix(s), PublicIP: netip.MustParseAddr("192.0.2.1")}
		return &entry{key: key, subnets: []netip.Prefix{e.Subnet}, lease: subnet.Lease{Key: key, Endpoints: []subnet.Endpoint{e}}}
	}
	a, b := lease("a", "10.5.1.0/24"), lease("b", "10.5.2.0/24")
	now := time.Now()
	for range 50 { // the order of a map is random
		during := gracePeriod{lastContact: now, until: now.Add(time.Minute), expiring: map[string]struct{}{"a": {}}}
		old := leaseCache{entries: map[string]*entry{"a": a}, gracePeriod: during}
		cache := leaseCache{entries: map[string]*entry{"a": a, "b": b}, gracePeriod: during}
		cache.retainFrom(old)
		if keys := slices.Sorted(maps.Keys(cache.entries)); !slices.Equal(keys, []string{"a", "b"}) || len(cache.expiring) > 0 {
			t.Fatalf("there are %v, of these expiring %v", keys, cache.expiring)
		}
	}
}
