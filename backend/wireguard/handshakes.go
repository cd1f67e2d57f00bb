package wireguard

import (
	"math"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// instant is a moment by two clocks.
type instant struct {
	wall   time.Time     // which can be stepped
	steady time.Duration // since boot, with the time in suspend: it cannot be stepped
}

// currentInstant returns the present one.
func currentInstant() instant {
	var boot unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) // fails for unknown clocks only
	return instant{wall: time.Now().Round(0), steady: time.Duration(boot.Nano())}
}

// handshakes knows how old the sessions with a device's peers are. A device records
// handshakes by the wall clock. If that is stepped forward, every session seems to have ended
// long ago, though all go on. So the age is taken from the wall clock once for each
// handshake, and from then on from a clock that cannot be stepped.
type handshakes struct {
	looked instant // zero before the first look
	seen   map[wgtypes.Key]handshake
}

type handshake struct {
	recorded time.Time     // as the device has it
	at       time.Duration // by the steady clock
}

// never is the age of a handshake that has not been.
const never = time.Duration(math.MaxInt64)

// look returns the age of the last handshake with each of the peers, as the device has them
// now.
func (h *handshakes) look(now instant, peers []wgtypes.Peer) map[wgtypes.Key]time.Duration {
	ages := make(map[wgtypes.Key]time.Duration, len(peers))
	seen := make(map[wgtypes.Key]handshake, len(peers))
	for _, p := range peers {
		if p.LastHandshakeTime.Unix() <= 0 {
			ages[p.PublicKey] = never
			continue
		}
		last, known := h.seen[p.PublicKey]
		if !known || !last.recorded.Equal(p.LastHandshakeTime) {
			last = handshake{p.LastHandshakeTime, now.steady - h.age(now, p.LastHandshakeTime)}
		}
		ages[p.PublicKey], seen[p.PublicKey] = now.steady-last.at, last
	}
	h.looked, h.seen = now, seen
	return ages
}

// age returns how old a handshake is that was not there at the last look. So it is not older
// than that, and the record is by the wall clock as it is now, or as it was before a step
// since then. What is possible of these counts, and the younger if both are: a session that
// goes on is not to be taken for one that has ended. Before the first look nothing is known
// of steps.
func (h *handshakes) age(now instant, recorded time.Time) time.Duration {
	age := now.wall.Sub(recorded)
	if h.looked == (instant{}) {
		return age
	}
	since := now.steady - h.looked.steady
	step := now.wall.Sub(h.looked.wall) - since
	youngest := since
	for _, possible := range []time.Duration{age, age - step} {
		if possible >= 0 {
			youngest = min(youngest, possible)
		}
	}
	return youngest
}
