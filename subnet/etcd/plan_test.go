// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/prefix/prefixtest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

func TestChoose(t *testing.T) {
	cfg, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16"}`))
	if err != nil {
		t.Fatal(err)
	}
	pools, err := cfg.Pools()
	if err != nil {
		t.Fatal(err)
	}
	mine := netip.MustParseAddr("192.0.2.1")
	node := func(key, ip string) *entry {
		subnets, err := codec.ParseKey(key)
		if err != nil {
			t.Fatal(err)
		}
		return &entry{key: key, subnets: subnets, lease: subnet.Lease{
			Key: key, Endpoints: []subnet.Endpoint{{Subnet: subnets[0], PublicIP: netip.MustParseAddr(ip)}},
		}}
	}
	leased := func(e *entry) *entry { e.leaseID = 1; return e }
	a, b := leased(node("10.5.1.0-24", "192.0.2.1")), leased(node("10.5.2.0-24", "192.0.2.1"))
	other, outside := leased(node("10.5.3.0-24", "192.0.2.3")), leased(node("10.6.3.0-24", "192.0.2.1"))
	reserved, second := node("10.5.7.0-24", "192.0.2.1"), node("10.5.8.0-24", "192.0.2.1")
	misplaced, wide := node("10.6.7.0-24", "192.0.2.1"), leased(node("10.5.0.0-23", "192.0.2.3"))
	at := func(e *entry, revision int64) *entry {
		copied := new(*e)
		copied.createRevision = revision
		return copied
	}
	running := ownLease{key: "10.5.1.0-24", create: 10}
	only := func(keys ...string) *rights {
		r := &rights{}
		for _, key := range keys {
			r.keys = append(r.keys, keyRange{begin: key})
		}
		return r
	}
	dualLeased, dualReserved := leased(node("10.5.1.0-24&fd00:0:0:1::-64", "192.0.2.1")), node("10.5.7.0-24&fd00:0:0:7::-64", "192.0.2.1")
	for _, tc := range []struct {
		name    string
		wanted  []netip.Prefix
		running ownLease
		may     *rights
		entries []*entry
		keep    string
		take    []netip.Prefix // the subnets that the plan takes; nil: not checked
		stale   int
		twin    string
	}{
		{name: "lease with this host's public IP", entries: []*entry{a, other}, keep: a.key},
		{name: "first of two own leases", entries: []*entry{a, b}, keep: a.key, twin: b.key},
		{name: "of two own leases the former one", wanted: b.subnets, entries: []*entry{a, b, other}, keep: b.key, twin: a.key},
		{name: "former subnet, not another own lease", wanted: b.subnets, entries: []*entry{a, other}, take: b.subnets, stale: 1},
		{name: "former subnet of another host is not taken", wanted: other.subnets, entries: []*entry{a, other}, keep: a.key},
		{name: "former subnets outside of the pool are not taken", wanted: prefixtest.Parse("10.7.1.0/24", "10.5.1.0/25"), entries: []*entry{a}, keep: a.key},
		{name: "former subnet, without a lease in the store", wanted: prefixtest.Parse("10.5.1.0/25", "10.5.9.0/24"), take: prefixtest.Parse("10.5.9.0/24")},
		{name: "own lease outside of the pool is stale", entries: []*entry{outside, other}, stale: 1},
		{name: "of two own leases the one in the pool", entries: []*entry{outside, b}, keep: b.key, stale: 1},
		{name: "reservation, not an own lease outside of the pool", wanted: outside.subnets, entries: []*entry{outside, reserved}, keep: reserved.key, stale: 1},
		{name: "own lease outside of the pool stays while the host runs", running: running, entries: []*entry{outside, b}, keep: b.key},
		{name: "reservation, not the former lease", wanted: a.subnets, entries: []*entry{a, other, reserved}, keep: reserved.key, stale: 1},
		{name: "reservation, not the former lease that has run out", wanted: a.subnets, entries: []*entry{other, reserved}, keep: reserved.key},
		{name: "reservation, not any of two own leases", entries: []*entry{a, b, reserved}, keep: reserved.key, stale: 2},
		{name: "own lease, not a reservation, while the host runs", wanted: a.subnets, running: running, entries: []*entry{a, reserved}, keep: a.key, twin: reserved.key},
		{name: "former subnet, not a reservation, while the host runs", wanted: a.subnets, running: running, entries: []*entry{reserved}, take: a.subnets, twin: reserved.key},
		{name: "of two reservations the former one", wanted: second.subnets, entries: []*entry{reserved, second}, keep: second.key, twin: reserved.key},
		{name: "first of two reservations", wanted: a.subnets, entries: []*entry{a, reserved, second}, keep: reserved.key, stale: 1, twin: second.key},
		{name: "reservation outside of the pool is not used", wanted: a.subnets, entries: []*entry{a, misplaced}, keep: a.key},
		{name: "reservation of two families, with one family enabled", wanted: a.subnets, entries: []*entry{dualLeased, dualReserved}, take: reserved.subnets, stale: 2},
		{name: "former subnet, not a reservation of two families, while the host runs", wanted: a.subnets, running: running, entries: []*entry{dualLeased, dualReserved}, take: a.subnets, stale: 2},
		{name: "older lease is stale at a start", wanted: b.subnets, entries: []*entry{at(a, 3), at(b, 4)}, keep: b.key, stale: 1},
		{name: "younger lease stays at a start", wanted: b.subnets, entries: []*entry{at(a, 5), at(b, 4)}, keep: b.key, twin: a.key},
		{name: "older reservation stays at a start", wanted: second.subnets, entries: []*entry{at(reserved, 3), at(second, 4)}, keep: second.key, twin: reserved.key},
		{name: "older lease stays beside the kept one while the host runs", running: running, wanted: b.subnets, entries: []*entry{at(a, 3), at(b, 4)}, keep: b.key, twin: a.key},
		{name: "older lease is stale if the host takes its subnet again", running: running, wanted: b.subnets, entries: []*entry{at(a, 9), other}, take: b.subnets, stale: 1},
		{name: "lease that is younger than the former one stays", running: running, wanted: b.subnets, entries: []*entry{at(a, 11), other}, take: b.subnets, twin: a.key},
		{name: "two older leases are stale", wanted: prefixtest.Parse("10.5.9.0/24"), entries: []*entry{a, b, other}, take: prefixtest.Parse("10.5.9.0/24"), stale: 2},
		{name: "own lease in a younger one of another length stays", entries: []*entry{at(a, 3), at(wide, 4)}, keep: a.key},
		{name: "own lease in an older one of another length is stale", entries: []*entry{at(a, 4), at(wide, 3)}, stale: 1},
		{name: "the only key that may be written", may: only("10.5.9.0-24", other.key), entries: []*entry{other}, take: prefixtest.Parse("10.5.9.0/24")},
		{name: "none of the other keys", may: only(reserved.key), entries: []*entry{a, other}, take: reserved.subnets},
	} {
		t.Run(tc.name, func(t *testing.T) {
			relationOf := func(e *entry) relation {
				if tc.may.permits(e.key) && hasPublicIP(e.lease, mine) {
					return likely
				}
				return foreign
			}
			p, err := choose(pools, tc.wanted, nil, tc.running, relationOf, tc.may, tc.entries)
			if err != nil {
				t.Fatal(err)
			}
			keep := ""
			if p.keep != nil {
				keep = p.keep.key
			}
			if keep != tc.keep || len(p.stale) != tc.stale || p.duplicate != tc.twin {
				t.Errorf("keeps %q with %d stale and twin %q, want %q, %d, %q", keep, len(p.stale), p.duplicate, tc.keep, tc.stale, tc.twin)
			}
			if tc.take != nil && !slices.Equal(p.subnets, tc.take) || keep == "" && len(p.subnets) != 1 {
				t.Errorf("takes %v, want %v", p.subnets, tc.take)
			}
		})
	}
}
