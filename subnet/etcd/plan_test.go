// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/pkg/prefix/prefixtest"
	"github.com/flanneld/flanneld/subnet"
	"github.com/flanneld/flanneld/subnet/etcd/codec"
)

func TestChoose(t *testing.T) {
	cfg, _, err := subnet.ParseConfig([]byte(`{"Network":"10.5.0.0/16"}`))
	if err != nil {
		t.Fatal(err)
	}
	pools, err := cfg.Pools()
	if err != nil {
		t.Fatal(err)
	}
	mine := netip.MustParseAddr("192.0.2.1")
	node := func(key, ip string) entry {
		subnets, err := codec.ParseKey(key)
		if err != nil {
			t.Fatal(err)
		}
		return entry{key: key, subnets: subnets, lease: subnet.Lease{
			Key: key, Endpoints: []subnet.Endpoint{{Subnet: subnets[0], PublicIP: netip.MustParseAddr(ip)}},
		}}
	}
	leased := func(e entry) entry { e.leaseID = 1; return e }
	a, b := leased(node("10.5.1.0-24", "192.0.2.1")), leased(node("10.5.2.0-24", "192.0.2.1"))
	other, outside := leased(node("10.5.3.0-24", "192.0.2.3")), leased(node("10.6.3.0-24", "192.0.2.1"))
	reserved, second := node("10.5.7.0-24", "192.0.2.1"), node("10.5.8.0-24", "192.0.2.1")
	misplaced := node("10.6.7.0-24", "192.0.2.1")
	at := func(e entry, revision int64) entry { e.createRevision = revision; return e }
	running := ownLease{key: "10.5.1.0-24", create: 10}
	dualLeased, dualReserved := leased(node("10.5.1.0-24&fd00:0:0:1::-64", "192.0.2.1")), node("10.5.7.0-24&fd00:0:0:7::-64", "192.0.2.1")
	for _, tc := range []struct {
		name    string
		wanted  []netip.Prefix
		running ownLease
		entries []entry
		keep    string
		take    []netip.Prefix // the subnets that the plan takes; nil: not checked
		stale   int
		twin    string
	}{
		{name: "by public IP", entries: []entry{a, other}, keep: a.key},
		{name: "the first of two", entries: []entry{a, b}, keep: a.key, twin: b.key},
		{name: "of two the one we had", wanted: b.subnets, entries: []entry{a, b, other}, keep: b.key, twin: a.key},
		{name: "what we had beats another lease of ours", wanted: b.subnets, entries: []entry{a, other}, take: b.subnets, stale: 1},
		{name: "unless another host has it", wanted: other.subnets, entries: []entry{a, other}, keep: a.key},
		{name: "or it is none of the pool's", wanted: prefixtest.Parse("10.7.1.0/24", "10.5.1.0/25"), entries: []entry{a}, keep: a.key},
		{name: "what we had, nothing in the store", wanted: prefixtest.Parse("10.5.1.0/25", "10.5.9.0/24"), take: prefixtest.Parse("10.5.9.0/24")},
		{name: "ours, but ruled out", entries: []entry{outside, other}, stale: 1},
		{name: "ours, one ruled out and one not", entries: []entry{outside, b}, keep: b.key, stale: 1},
		{name: "and a reservation", wanted: outside.subnets, entries: []entry{outside, reserved}, keep: reserved.key, stale: 1},
		{name: "but both stay while we run", running: running, entries: []entry{outside, b}, keep: b.key},
		{name: "a reservation beats the lease that we had", wanted: a.subnets, entries: []entry{a, other, reserved}, keep: reserved.key, stale: 1},
		{name: "and the one that has run out", wanted: a.subnets, entries: []entry{other, reserved}, keep: reserved.key},
		{name: "and any other of ours", entries: []entry{a, b, reserved}, keep: reserved.key, stale: 2},
		{name: "but nothing while we run", wanted: a.subnets, running: running, entries: []entry{a, reserved}, keep: a.key, twin: reserved.key},
		{name: "nor what we ran with", wanted: a.subnets, running: running, entries: []entry{reserved}, take: a.subnets, twin: reserved.key},
		{name: "of two the one that we had", wanted: second.subnets, entries: []entry{reserved, second}, keep: second.key, twin: reserved.key},
		{name: "or else the first", wanted: a.subnets, entries: []entry{a, reserved, second}, keep: reserved.key, stale: 1, twin: second.key},
		{name: "one that is none of the pool's", wanted: a.subnets, entries: []entry{a, misplaced}, keep: a.key},
		{name: "one of two families, of which one is left", wanted: a.subnets, entries: []entry{dualLeased, dualReserved}, take: reserved.subnets, stale: 2},
		{name: "but not what we run with", wanted: a.subnets, running: running, entries: []entry{dualLeased, dualReserved}, take: a.subnets, stale: 2},
		{name: "an older lease goes at a start", wanted: b.subnets, entries: []entry{at(a, 3), at(b, 4)}, keep: b.key, stale: 1},
		{name: "a younger one stays", wanted: b.subnets, entries: []entry{at(a, 5), at(b, 4)}, keep: b.key, twin: a.key},
		{name: "an older reservation stays", wanted: second.subnets, entries: []entry{at(reserved, 3), at(second, 4)}, keep: second.key, twin: reserved.key},
		{name: "an older lease stays beside one that is kept while we run", running: running, wanted: b.subnets, entries: []entry{at(a, 3), at(b, 4)}, keep: b.key, twin: a.key},
		{name: "it goes when what we ran with is taken again", running: running, wanted: b.subnets, entries: []entry{at(a, 9), other}, take: b.subnets, stale: 1},
		{name: "a lease that was made since stays", running: running, wanted: b.subnets, entries: []entry{at(a, 11), other}, take: b.subnets, twin: a.key},
		{name: "two older ones go", wanted: prefixtest.Parse("10.5.9.0/24"), entries: []entry{a, b, other}, take: prefixtest.Parse("10.5.9.0/24"), stale: 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p, err := choose(pools, tc.wanted, tc.running, func(e entry) bool { return hasPublicIP(e.lease, mine) }, tc.entries)
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
