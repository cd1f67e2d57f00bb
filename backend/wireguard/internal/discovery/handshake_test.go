// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"slices"
	"testing"
	"time"
)

// steppedClock contains a wall clock that a test can step, and a steady clock.
type steppedClock struct {
	passed time.Duration
	step   time.Duration
}

func (c *steppedClock) now() Instant {
	return Instant{Wall: time.Unix(1_000_000_000, 0).Add(c.passed + c.step), Steady: time.Hour + c.passed}
}

// TestHandshake checks that the age of a handshake is right with a step of the clock at
// any time, except before the first reading.
func TestHandshake(t *testing.T) {
	const minute = time.Minute
	type event struct {
		after     time.Duration // time since the last event
		step      time.Duration // step of the wall clock
		handshake bool
		want      time.Duration // age at a reading; 0 means that there is none
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
			var h handshake
			var c steppedClock
			var last Instant
			var reported time.Time
			for i, e := range append(slices.Clone(begin), events...) {
				c.passed += e.after
				c.step += e.step
				if e.handshake {
					reported = c.now().Wall
				}
				if e.want == 0 {
					continue
				}
				got := h.age(last, c.now(), reported)
				last = c.now()
				if got != e.want {
					t.Errorf("event %d: the handshake is %v old, want %v", i, got, e.want)
				}
			}
		})
	}
	now := Instant{Wall: time.Unix(1_000_000_000, 0), Steady: time.Hour}
	for reported, want := range map[time.Time]time.Duration{now.Wall.Add(-time.Hour): time.Hour, {}: Never, time.Unix(0, 0): Never} {
		if got := new(handshake).age(Instant{}, now, reported); got != want {
			t.Errorf("at the first reading the handshake at %s is %s old, want %s", reported, got, want)
		}
	}
}
