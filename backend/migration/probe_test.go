// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// targetOf returns the target of peer n.
func targetOf(n int) target { return target{to: subnetOf(n).Addr(), device: "new"} }

// TestProbeOrder checks that each peer gets its requests in time while other peers are added,
// answer and are removed. A peer that has answered must get no more requests.
func TestProbeOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newProber(func() {})
		for n := range 50 {
			p.aim(fmt.Sprint(n), []target{targetOf(n)})
		}
		sent := map[netip.Addr]int{}
		probe := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); {
				requests, pause := p.next(time.Now())
				for id, to := range requests {
					sent[to.to]++
					if to == targetOf(7) {
						p.answer(id, to.to)
					}
				}
				time.Sleep(pause)
			}
		}
		expect := func(when string, want func(n int) int) {
			t.Helper()
			for n := range 51 {
				if got := sent[targetOf(n).to]; got != want(n) {
					t.Errorf("%s: %d requests to peer %d, want %d", when, got, n, want(n))
				}
			}
			if len(p.order) != len(p.peers) {
				t.Errorf("%s: %d peers in the queue, want %d", when, len(p.order), len(p.peers))
			}
		}
		probe(settling - time.Millisecond)
		expect("while the peers settle", func(int) int { return 0 })
		probe(leastProbe / 2)
		expect("at first", func(n int) int { return map[bool]int{true: 1}[n < 50] })
		if got := p.take(); len(got) != 1 || !slices.Equal(got["7"], []target{targetOf(7)}) {
			t.Errorf("answered: %v, want peer 7", got)
		}
		p.aim("3", []target{targetOf(3)}) // the same target as before
		p.aim("7", nil)
		p.aim("9", nil)
		p.aim("50", []target{targetOf(50)})
		probe(settling + leastProbe/4)
		if sent[targetOf(50).to] != 1 {
			t.Error("no request to a new peer soon after it has settled")
		}
		clear(sent)
		probe(2 * time.Minute)
		for n := range 51 {
			if got := sent[targetOf(n).to]; (n == 7 || n == 9) != (got == 0) {
				t.Errorf("%d requests to peer %d in two minutes", got, n)
			}
		}
	})
}

// TestAnswerFromAnotherAddress checks which addresses may answer for a target: over IPv4 only the
// target itself, and over IPv6 any address. A peer with both families must answer at both targets.
func TestAnswerFromAnotherAddress(t *testing.T) {
	v4, v6 := targetOf(2), target{to: netip.MustParseAddr("fd00:5:2::"), device: "new"}
	other4, other6 := netip.MustParseAddr("192.168.77.2"), netip.MustParseAddr("fd00:77::2")
	for _, tt := range []struct {
		name   string
		target target
		from   netip.Addr
		want   bool
	}{
		{"IPv4, the target itself", v4, v4.to, true},
		{"IPv4, another address", v4, other4, false},
		{"IPv6, the target itself", v6, v6.to, true},
		{"IPv6, another address because the target is an anycast address", v6, other6, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newProber(func() {})
			targets := []target{v4, v6}
			p.aim("2", targets)
			requests, _ := p.next(time.Now().Add(settling))
			for id, r := range requests {
				from := r.to
				if r == tt.target {
					from = tt.from
				}
				p.answer(id+1, from)
				p.answer(id, from)
			}
			if got := p.take(); slices.Equal(got["2"], targets) != tt.want {
				t.Errorf("answered: %v, want the peer: %v", got, tt.want)
			}
		})
	}
}
