// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
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
	for name, n := range map[string]int{"few": 10, "many": 1000} {
		t.Run(name, func(t *testing.T) {
			table := NewTable()
			before := table.current.Load()
			var all []Peer
			for i := range n {
				all = append(all, peerNumber(i))
			}
			table.Update(nil, all)
			if table.Size() != n || before.subnets.Size() != 0 {
				t.Errorf("%d peers, and %d in the earlier routes", table.Size(), before.subnets.Size())
			}
			moved := all[3]
			moved.Public = netip.MustParseAddr("192.0.2.1")
			table.Update([]Peer{all[3]}, []Peer{moved})
			r := table.current.Load()
			if got, ok := r.subnets.Lookup(all[3].Subnet.Addr().Next()); !ok || got != moved.Public {
				t.Errorf("the peer is at %v", got)
			}
			if r.publics.Contains(all[3].Public) || !r.publics.Contains(moved.Public) {
				t.Error("the public address has not changed")
			}
			all[3] = moved
			table.Update(all, nil)
			if table.Size() != 0 || table.current.Load().publics.Size() != 0 {
				t.Errorf("%d peers remain", table.Size())
			}
		})
	}
}

// TestTableWithOneAddressForAll checks that the table knows a public address as long as
// at least one peer has the address.
func TestTableWithOneAddressForAll(t *testing.T) {
	for name, n := range map[string]int{"few": 10, "many": 1000} {
		t.Run(name, func(t *testing.T) {
			table := NewTable()
			public := netip.MustParseAddr("192.0.2.1")
			var all []Peer
			for i := range n {
				all = append(all, Peer{Subnet: peerNumber(i).Subnet, Public: public})
			}
			half := all[:n/2]
			for _, step := range []struct {
				name           string
				removed, added []Peer
				size           int
			}{
				{"add a half", nil, half, len(half)},
				{"replace it by the other half", half, all[n/2:], n - len(half)},
				{"all", nil, half, n},
				{"one goes", all[:1], nil, n - 1},
				{"remove all but one", all[1 : n-1], nil, 1},
				{"remove the last", all[n-1:], nil, 0},
			} {
				table.Update(step.removed, step.added)
				if r := table.current.Load(); table.Size() != step.size || r.publics.Contains(public) != (step.size > 0) {
					t.Errorf("%s: %d peers, want %d; the address is known: %v", step.name, table.Size(), step.size, r.publics.Contains(public))
				}
			}
		})
	}
}

func BenchmarkTableUpdate(b *testing.B) {
	table := NewTable()
	var all []Peer
	for i := range 5000 {
		all = append(all, peerNumber(i))
	}
	table.Update(nil, all)
	for i := 0; b.Loop(); i++ {
		p := all[i%len(all)]
		table.Update([]Peer{p}, []Peer{p})
	}
}

func TestReasonsHaveNames(t *testing.T) {
	c := Counters{}
	c.drop(WrongSource)
	all := c.Dropped()
	if len(all) != int(reasons) || all["wrong_source"] != 1 || reasons.String() != "unknown" {
		t.Errorf("%v", all)
	}
}
