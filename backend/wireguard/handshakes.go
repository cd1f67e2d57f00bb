// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"math"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// instant is a point in time on two clocks.
type instant struct {
	wall   time.Time     // wall clock, which can be stepped
	steady time.Duration // time since boot including suspend, which cannot be stepped
}

// currentInstant returns the present instant.
func currentInstant() instant {
	var boot unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) // fails only for unknown clocks
	return instant{wall: time.Now().Round(0), steady: time.Duration(boot.Nano())}
}

// handshakes finds the ages of a device's sessions, which begin with a handshake. A device
// records handshakes by the wall clock. After a step forward all sessions would seem to have
// ended long ago, although they continue. So handshakes takes the age from the wall clock once
// per handshake, and from then on from a clock that cannot be stepped.
type handshakes struct {
	lastCall instant // time of the last call of ages; zero before the first
	seen     map[wgtypes.Key]handshake
}

type handshake struct {
	reported time.Time     // time that the device reports
	at       time.Duration // time on the steady clock
}

// never is the age of a handshake that has not happened.
const never = time.Duration(math.MaxInt64)

// ages returns the time since the last handshake with each peer, or never if there was none.
// peers must be the present state of the device.
func (h *handshakes) ages(now instant, peers []wgtypes.Peer) map[wgtypes.Key]time.Duration {
	ages := make(map[wgtypes.Key]time.Duration, len(peers))
	seen := make(map[wgtypes.Key]handshake, len(peers))
	for _, p := range peers {
		if p.LastHandshakeTime.Unix() <= 0 {
			ages[p.PublicKey] = never
			continue
		}
		last, known := h.seen[p.PublicKey]
		if !known || !last.reported.Equal(p.LastHandshakeTime) {
			last = handshake{p.LastHandshakeTime, now.steady - h.newAge(now, p.LastHandshakeTime)}
		}
		ages[p.PublicKey], seen[p.PublicKey] = now.steady-last.at, last
	}
	h.lastCall, h.seen = now, seen
	return ages
}

// newAge returns the age of a handshake that ages sees for the first time. The handshake has
// happened since the last call of ages. The device has recorded it by the present wall clock,
// or by the wall clock before a step since that call. If both are possible the younger age
// counts, because a session in use must not be taken for an ended one. If neither is possible,
// newAge returns the time since that call. Before the first call of ages no steps are known,
// so the age is that by the present wall clock.
func (h *handshakes) newAge(now instant, reported time.Time) time.Duration {
	age := now.wall.Sub(reported)
	if h.lastCall == (instant{}) {
		return age
	}
	since := now.steady - h.lastCall.steady
	step := now.wall.Sub(h.lastCall.wall) - since
	youngest := since
	for _, possible := range []time.Duration{age, age - step} {
		if possible >= 0 {
			youngest = min(youngest, possible)
		}
	}
	return youngest
}
