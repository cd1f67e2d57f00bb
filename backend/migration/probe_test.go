// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"
)

// targetOf returns the target of peer n.
func targetOf(n int) target { return target{to: subnetOf(n).Addr(), device: "new"} }

// TestProbeOrder checks that each peer gets its requests in time, whichever peers come, answer and
// go meanwhile.
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
		probe(leastProbe / 2)
		expect("at first", func(n int) int { return map[bool]int{true: 1}[n < 50] })
		if got := p.take(); len(got) != 1 || got[0] != "7" {
			t.Errorf("answered: %q, want peer 7", got)
		}
		p.aim("3", []target{targetOf(3)}) // as before
		p.aim("7", nil)
		p.aim("9", nil)
		p.aim("50", []target{targetOf(50)})
		probe(leastProbe / 4)
		if sent[targetOf(50).to] != 1 {
			t.Error("no request to a new peer before the second ones to the others")
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
