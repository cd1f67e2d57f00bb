// SPDX-License-Identifier: Apache-2.0

package discovery

import "time"

// Instant is a point in time on two clocks.
type Instant struct {
	Wall   time.Time     // wall clock, which can be stepped
	Steady time.Duration // time since boot including suspend, which cannot be stepped
}

// handshake is the last handshake with a peer. A device records handshakes by the wall clock. After a
// step forward all sessions would seem to have ended long ago, although they continue. So the age comes
// from the wall clock once per handshake, and from then on from the steady clock.
type handshake struct {
	reported time.Time     // time that the device reports; zero if there was no handshake
	at       time.Duration // time on the steady clock
}

// age returns the time since the last handshake. last is the last reading of the device.
func (h *handshake) age(last, now Instant, reported time.Time) time.Duration {
	if reported.Unix() <= 0 {
		*h = handshake{}
		return Never
	}
	if !h.reported.Equal(reported) {
		*h = handshake{reported, now.Steady - newAge(last, now, reported)}
	}
	return now.Steady - h.at
}

// newAge returns the age of a handshake that is reported for the first time.
func newAge(last, now Instant, reported time.Time) time.Duration {
	age := now.Wall.Sub(reported)
	if last == (Instant{}) {
		return age // no steps of the clock are known
	}

	// The handshake has happened since the last reading. The device has recorded it by the present
	// wall clock, or by the one before a step since then. If both are possible, the younger age counts:
	// a session in use must not be taken for an ended one.
	since := now.Steady - last.Steady
	step := now.Wall.Sub(last.Wall) - since
	youngest := since
	for _, possible := range []time.Duration{age, age - step} {
		if possible >= 0 {
			youngest = min(youngest, possible)
		}
	}
	return youngest
}
