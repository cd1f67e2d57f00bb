// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"maps"
	"net/netip"
	"testing"
)

func peerNumber(i int) Peer {
	return Peer{
		Subnet: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24),
		Public: netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)}),
	}
}

func TestTable(t *testing.T) {
	table := NewTable()
	lookup := func(p Peer) netip.Addr {
		public, _ := table.current.Load().subnets.Lookup(p.Subnet.Addr().Next())
		return public
	}
	set := func(peers ...Peer) map[netip.Prefix]netip.Addr {
		all := map[netip.Prefix]netip.Addr{}
		for _, p := range peers {
			all[p.Subnet] = p.Public
		}
		return all
	}
	a, b, elsewhere := peerNumber(1), peerNumber(2), peerNumber(9)
	moved := Peer{a.Subnet, elsewhere.Public}
	sharing := Peer{b.Subnet, a.Public}
	for _, tc := range []struct {
		name         string
		peers        []Peer
		known, other []Peer // whose public addresses are those of peers, or are not
	}{
		{"nothing", nil, nil, []Peer{a, b}},
		{"both", []Peer{a, b}, []Peer{a, b}, []Peer{elsewhere}},
		{"one has moved", []Peer{moved, b}, []Peer{elsewhere, b}, []Peer{a}},
		{"both share an address", []Peer{a, sharing}, []Peer{a}, []Peer{b, elsewhere}},
		{"one of them goes", []Peer{sharing}, []Peer{a}, []Peer{b, elsewhere}},
		{"none is left", nil, nil, []Peer{a, b}},
	} {
		before := table.current.Load()
		peersBefore := maps.Clone(before.peers)
		table.Set(set(tc.peers...))
		if !maps.Equal(before.peers, peersBefore) || before.subnets.Size() != len(peersBefore) {
			t.Errorf("%s: the routes that tunnels may still use have changed", tc.name)
		}
		if now := table.current.Load(); !maps.Equal(table.Peers(), set(tc.peers...)) || now.subnets.Size() != len(tc.peers) {
			t.Errorf("%s: the table contains %v", tc.name, table.Peers())
		}
		for _, p := range tc.peers {
			if got := lookup(p); got != p.Public {
				t.Errorf("%s: %v is at %v, want %v", tc.name, p.Subnet, got, p.Public)
			}
		}
		for _, p := range tc.known {
			if _, known := table.current.Load().publics[p.Public]; !known {
				t.Errorf("%s: %v is not the address of a peer", tc.name, p.Public)
			}
		}
		for _, p := range tc.other {
			if _, known := table.current.Load().publics[p.Public]; known {
				t.Errorf("%s: %v is still the address of a peer", tc.name, p.Public)
			}
		}
	}
}

func BenchmarkTableSet(b *testing.B) {
	table := NewTable()
	peers := map[netip.Prefix]netip.Addr{}
	for i := range 5000 {
		p := peerNumber(i)
		peers[p.Subnet] = p.Public
	}
	for name, changed := range map[string]bool{"equal": false, "one changed": true} {
		b.Run(name, func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				now := maps.Clone(peers)
				if changed {
					now[peerNumber(0).Subnet] = peerNumber(i % 5000).Public
				}
				table.Set(now)
			}
		})
	}
}

func TestReasonsHaveNames(t *testing.T) {
	c := Counters{}
	c.drop(WrongSource)
	all := c.Dropped()
	if len(all) != int(reasons) || all["wrong_source"] != 1 {
		t.Errorf("%v", all)
	}
}
