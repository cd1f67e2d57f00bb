// SPDX-License-Identifier: Apache-2.0

package migration

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/flanneld/flanneld/pkg/probe/ping"
)

// targetOf returns the target of peer n.
func targetOf(n int) target { return target{to: subnetOf(n).Addr(), device: "new"} }

// fakePing counts requests, and answers those to the addresses in up.
type fakePing struct {
	mu   sync.Mutex
	up   map[netip.Addr]bool
	sent map[netip.Addr]int
}

func (f *fakePing) ping(_ context.Context, to netip.Addr, _ ping.Path, timeout time.Duration) (time.Duration, error) {
	f.mu.Lock()
	f.sent[to]++
	up := f.up[to]
	f.mu.Unlock()
	if up {
		time.Sleep(roundTrip)
		return roundTrip, nil
	}

	time.Sleep(timeout)
	return 0, errors.New("no answer")
}

// roundTrip is the time to an answer.
const roundTrip = 50 * time.Millisecond

// take returns how many requests were sent since the last call.
func (f *fakePing) take() map[netip.Addr]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	sent := f.sent
	f.sent = map[netip.Addr]int{}
	return sent
}

// runProber runs a prober with fake requests until the test ends.
func runProber(t *testing.T, up ...netip.Addr) (*prober, *fakePing) {
	t.Helper()
	f := &fakePing{up: map[netip.Addr]bool{}, sent: map[netip.Addr]int{}}
	for _, a := range up {
		f.up[a] = true
	}
	p := newProber(func() {})
	p.ping = f.ping
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { p.run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return p, f
}

// TestProbeOrder checks that each peer gets its requests in time while other peers are added,
// answer and are removed. A peer that has answered must get no more requests.
func TestProbeOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, f := runProber(t, targetOf(7).to)
		for n := range 50 {
			p.aim(fmt.Sprint(n), []target{targetOf(n)})
		}
		time.Sleep(settling - time.Millisecond)
		if sent := f.take(); len(sent) > 0 {
			t.Errorf("%v: requests while the peers settle", sent)
		}
		time.Sleep(leastProbe / 2)
		sent := f.take()
		for n := range 50 {
			if got := sent[targetOf(n).to]; got != 1 {
				t.Errorf("%d first requests to peer %d, want 1", got, n)
			}
		}
		if got := p.answered(); len(got) != 1 || !slices.Equal(got["7"], []target{targetOf(7)}) {
			t.Errorf("answered: %v, want peer 7", got)
		}

		p.aim("3", []target{targetOf(3)}) // the same target as before
		p.aim("9", nil)
		p.aim("50", []target{targetOf(50)})
		time.Sleep(settling + leastProbe/4)
		if f.take()[targetOf(50).to] != 1 {
			t.Error("no request to a new peer soon after it has settled")
		}
		time.Sleep(2 * time.Minute)
		sent = f.take()
		for n := range 51 {
			if got := sent[targetOf(n).to]; (n == 7 || n == 9) != (got == 0) {
				t.Errorf("%d requests to peer %d in two minutes", got, n)
			}
		}
	})
}

// TestProbeNeedsAllTargets checks that a peer with both families has answered only if both are answered, and that an
// answer that comes after the targets have changed does not count.
func TestProbeNeedsAllTargets(t *testing.T) {
	v4, v6 := targetOf(2), target{to: netip.MustParseAddr("fd00:5:2::"), device: "new"}
	for _, tt := range []struct {
		name  string
		up    []netip.Addr
		other []target // aimed at before the last answer comes
		want  bool
	}{
		{"both", []netip.Addr{v4.to, v6.to}, nil, true},
		{"IPv4 only", []netip.Addr{v4.to}, nil, false},
		{"IPv6 only", []netip.Addr{v6.to}, nil, false},
		{"of former targets", []netip.Addr{v4.to, v6.to}, []target{{to: v4.to, device: "other"}}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, _ := runProber(t, tt.up...)
				targets := []target{v4, v6}
				p.aim("2", targets)
				time.Sleep(settling + roundTrip/2)
				if tt.other != nil {
					p.aim("2", tt.other)
				}
				time.Sleep(time.Minute)
				if got := p.answered(); slices.Equal(got["2"], targets) != tt.want {
					t.Errorf("answered: %v, want the peer: %v", got, tt.want)
				}
			})
		})
	}
}
