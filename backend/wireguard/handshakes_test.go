// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"maps"
	"slices"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// steppedClock contains a wall clock that a test can step, and a steady clock.
type steppedClock struct {
	passed time.Duration
	step   time.Duration
}

func (c *steppedClock) now() instant {
	return instant{wall: time.Unix(1_000_000_000, 0).Add(c.passed + c.step), steady: time.Hour + c.passed}
}

// TestHandshakes checks that the age of a handshake is right with a step of the clock at
// any time, except before the first call of ages.
func TestHandshakes(t *testing.T) {
	const minute = time.Minute
	type event struct {
		after     time.Duration // time since the last event
		step      time.Duration // step of the wall clock
		handshake bool
		want      time.Duration // age that ages returns; 0 means no call
	}
	begin := []event{{handshake: true}, {after: minute, want: minute}}
	for name, events := range map[string][]event{
		"no step":          {{after: minute, want: 2 * minute}, {after: 5 * minute, want: 7 * minute}, {handshake: true}, {after: minute, want: minute}},
		"forward":          {{step: 1000 * time.Hour}, {after: minute, want: 2 * minute}, {after: 5 * minute, want: 7 * minute}},
		"back":             {{step: -1000 * time.Hour}, {after: minute, want: 2 * minute}, {after: 5 * minute, want: 7 * minute}},
		"handshake before": {{handshake: true}, {after: minute, step: time.Hour}, {after: minute, want: 2 * minute}, {after: 5 * minute, want: 7 * minute}},
		"handshake before, back": {
			{handshake: true}, {after: minute, step: -time.Hour}, {after: minute, want: 2 * minute}, {after: 5 * minute, want: 7 * minute},
		},
		"handshake behind":       {{step: time.Hour}, {after: minute, handshake: true}, {after: minute, want: minute}, {after: 5 * minute, want: 6 * minute}},
		"handshake behind, back": {{step: -time.Hour}, {after: minute, handshake: true}, {after: minute, want: minute}},
		"twice":                  {{step: time.Hour}, {after: minute, want: 2 * minute}, {step: time.Hour}, {after: minute, want: 3 * minute}},
		"there and back":         {{step: time.Hour}, {after: minute, step: -time.Hour}, {after: minute, want: 3 * minute}},
		"by less than the time since the last call": { // two ages are possible (see newAge), and the younger one counts
			{after: minute, handshake: true}, {after: 3 * minute, step: 2 * minute}, {after: minute, want: 4 * minute},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var h handshakes
			var c steppedClock
			p := wgtypes.Peer{PublicKey: key(2)}
			for i, e := range append(slices.Clone(begin), events...) {
				c.passed += e.after
				c.step += e.step
				if e.handshake {
					p.LastHandshakeTime = c.now().wall
				}
				if e.want == 0 {
					continue
				}
				if got := h.ages(c.now(), []wgtypes.Peer{p})[p.PublicKey]; got != e.want {
					t.Errorf("event %d: the handshake is %v old, want %v", i, got, e.want)
				}
			}
		})
	}
	var h handshakes
	now := currentInstant()
	peers := []wgtypes.Peer{{PublicKey: key(2), LastHandshakeTime: now.wall.Add(-time.Hour)}, {PublicKey: key(3)}, {PublicKey: key(4), LastHandshakeTime: time.Unix(0, 0)}}
	want := map[wgtypes.Key]time.Duration{key(2): time.Hour, key(3): never, key(4): never}
	if got := h.ages(now, peers); !maps.Equal(got, want) {
		t.Errorf("ages at the first call are %v, want %v", got, want)
	}
}

// TestClockStep checks that the learned endpoint of a peer survives a step of the clock, with and
// without a pass between the handshake and the step, and that the endpoint of the lease replaces it
// when the session ends.
func TestClockStep(t *testing.T) {
	for name, step := range map[string]time.Duration{"forward": 24 * time.Hour, "a little forward": 200 * time.Second, "back": -24 * time.Hour} {
		for _, passBetween := range []bool{true, false} {
			n, _, c := start(t)
			clock := steppedClock{}
			n.now = clock.now
			pass := func(after time.Duration) {
				t.Helper()
				clock.passed += after
				if _, err := n.Sync(t.Context(), set(nil, host(t, 2, 2))); err != nil {
					t.Fatal(err)
				}
			}
			const learnt, leased = "192.168.77.222:40000 10.5.2.0/24", "192.168.77.2:51820 10.5.2.0/24"
			learn := func() {
				p := c.peers["flannel-wg"][key(2)]
				p.LastHandshakeTime = clock.now().wall
				p.Endpoint.IP, p.Endpoint.Port = []byte{192, 168, 77, 222}, 40000
				c.peers["flannel-wg"][key(2)] = p
			}
			pass(0)
			c.expect(t, "flannel-wg", leased)
			clock.passed += time.Minute
			learn()
			if passBetween {
				pass(time.Minute)
			}
			clock.step = step
			pass(time.Minute)
			c.expect(t, "flannel-wg", learnt)
			learn() // by the new clock
			pass(2 * time.Minute)
			c.expect(t, "flannel-wg", learnt)
			pass(2 * time.Minute)
			c.expect(t, "flannel-wg", leased)
			if t.Failed() {
				t.Fatalf("clock stepped %s, a pass between handshake and step: %v", name, passBetween)
			}
		}
	}
}
