// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// TestTrials checks which endpoint is tried for one peer, at each of several times.
func TestTrials(t *testing.T) {
	lease, one, two := netip.MustParseAddrPort("192.168.77.2:51820"), netip.MustParseAddrPort("203.0.113.2:1"), netip.MustParseAddrPort("203.0.113.2:2")
	candidates := []netip.AddrPort{one}
	ts, age, sent := trials{}, never, int64(0)
	try := func(now time.Duration) netip.AddrPort {
		d := diff{
			have: &wgtypes.Device{Peers: []wgtypes.Peer{{PublicKey: key(2), TransmitBytes: sent}}},
			want: map[wgtypes.Key]peer{key(2): {key: key(2), endpoint: lease}},
			ages: map[wgtypes.Key]time.Duration{key(2): age},
		}
		return ts.next(now, d, func(peer) []netip.AddrPort { return candidates })[key(2)]
	}
	expect := func(now time.Duration, want netip.AddrPort) {
		t.Helper()
		sent += 148
		if got := try(now); got != want {
			t.Errorf("at %s the endpoint is %s, want %s", now, got, want)
		}
	}

	expect(0, one)
	expect(14*time.Second, one)
	expect(15*time.Second, lease) // the second round, of 30 s
	expect(44*time.Second, lease)
	expect(45*time.Second, one)
	candidates = []netip.AddrPort{lease, two, one} // the endpoint of the lease is not tried twice
	expect(50*time.Second, two)                    // at the index of one, for 15 s
	if got := ts.pause(55 * time.Second); got != 10*time.Second {
		t.Errorf("pause of %s, want 10s", got)
	}
	expect(65*time.Second, one)
	candidates = []netip.AddrPort{two}
	expect(70*time.Second, lease) // there is no second candidate any more
	candidates = []netip.AddrPort{one}
	expect(75*time.Second, lease) // the new candidate waits until the trial of the lease has lasted 15 s
	expect(85*time.Second, one)
	candidates = []netip.AddrPort{two, one}
	expect(95*time.Second, two)
	expect(100*time.Second, one)
	expect(115*time.Second, lease)
	expect(145*time.Second, two)

	// Without packets the first candidate stays for longer.
	for now := 160 * time.Second; now < 175*time.Second+idleTrials*firstTrial; now += firstTrial {
		if got := try(now); got != two {
			t.Errorf("without packets the endpoint at %s is %s, want still %s", now, got, two)
		}
	}

	// After trialRounds rounds, the peer keeps the endpoint of the lease for trialRest.
	now := 5 * time.Minute
	var tried []netip.AddrPort
	for range 100 {
		now += ts.pause(now)
		sent += 148
		got := try(now)
		if pause := ts.pause(now); pause == trialRest {
			if got != lease {
				t.Errorf("during the rest the endpoint is %s, want %s", got, lease)
			}
			break
		}
		tried = append(tried, got)
	}
	if n := len(tried); n < 10 || n > 20 || !slices.Contains(tried, one) || !slices.Contains(tried, two) || now > 35*time.Minute {
		t.Errorf("%d trials until %s: %v, want at most 20 within 30m", n, now, tried)
	}
	expect(now+trialRest, two)

	// A session ends the search. The next search begins with the first candidate.
	age = sessionLife
	if got := try(now + trialRest); got.IsValid() || len(ts) > 0 {
		t.Errorf("with a session the endpoint %s is tried", got)
	}
	age = sessionLife + 1
	expect(now+trialRest, two)
	candidates = nil
	if got := try(now + trialRest); got.IsValid() || len(ts) > 0 {
		t.Errorf("without candidates the endpoint %s is tried", got)
	}
}

// TestTrialsReachTheEndpointOfTheLease checks that the endpoint of the lease is tried within 3
// minutes, even if the device sends nothing and the candidates change.
func TestTrialsReachTheEndpointOfTheLease(t *testing.T) {
	lease := netip.MustParseAddrPort("192.168.77.2:51820")
	at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(lease.Addr(), port) }
	for name, candidates := range map[string]func(pass int) []netip.AddrPort{
		"the host has no route to one":     func(int) []netip.AddrPort { return []netip.AddrPort{at(1)} },
		"another host changes one often":   func(pass int) []netip.AddrPort { return []netip.AddrPort{at(uint16(1 + pass))} },
		"another host adds and removes it": func(pass int) []netip.AddrPort { return []netip.AddrPort{at(1), at(2)}[:1+pass%2] },
		"the order of two changes":         func(pass int) []netip.AddrPort { return []netip.AddrPort{at(1), at(2), at(1)}[pass%2:][:2] },
	} {
		t.Run(name, func(t *testing.T) {
			ts := trials{}
			d := diff{
				have: &wgtypes.Device{Peers: []wgtypes.Peer{{PublicKey: key(2), TransmitBytes: 148}}},
				want: map[wgtypes.Key]peer{key(2): {key: key(2), endpoint: lease}},
				ages: map[wgtypes.Key]time.Duration{key(2): never},
			}
			for pass := 0; ; pass++ {
				now := time.Duration(pass) * 5 * time.Second
				if now > 3*time.Minute {
					t.Fatalf("the endpoint of the lease has not been tried for %s", now)
				}
				if ts.next(now, d, func(peer) []netip.AddrPort { return candidates(pass) })[key(2)] == lease {
					return
				}
			}
		})
	}
}
