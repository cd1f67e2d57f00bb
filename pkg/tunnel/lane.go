// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// burst is the number of reads that a lane makes before it gives way.
const burst = 64

// carrier moves packets from a descriptor to their destination.
type carrier interface {
	// read makes one read and handles the result.
	read(fd uintptr) error
	// flush passes on the packets that reads have gathered.
	flush()
	// ready reports whether the result of a read can be passed on without waiting.
	ready() bool
}

// lane runs a carrier while there is data to read.
//
// The runtime does not know of the carrier's system calls (see call.go). To it, a lane
// that never waits looks like a goroutine that computes. It would not check the
// descriptors of other lanes until the lane's time slice is over and, if the process was
// idle before, not at all. giveWay solves both problems.
//
// A lane without data to read waits at once. It could yield the CPU and read once more,
// because more packets have often arrived by then. That would save a tenth of its CPU
// time. But on a busy host a goroutine that yields runs again only milliseconds later,
// while one that waits is woken before others.
type lane struct {
	carrier
	doing   string // the lane's task, for errors
	conn    syscall.RawConn
	closing *atomic.Bool
	others  []*lane

	mu     sync.Mutex // held while the carrier runs
	assist func(fd uintptr)
}

func newLane(c carrier, conn syscall.RawConn, closing *atomic.Bool, doing string) *lane {
	l := &lane{carrier: c, conn: conn, closing: closing, doing: doing}
	l.assist = func(fd uintptr) { _, _ = l.turn(fd, l.ready) } // the lane itself meets an error again
	return l
}

// join makes lanes give way to each other.
func join(lanes []*lane) {
	for i, l := range lanes {
		l.others = slices.Delete(slices.Clone(lanes), i, i+1)
	}
}

// run runs the carrier until it fails, or until closing is set and the descriptor is
// closed.
func (l *lane) run() error {
	var failed error
	always := func() bool { return true }
	err := l.conn.Read(func(fd uintptr) bool {
		for {
			l.mu.Lock()
			var more bool
			more, failed = l.turn(fd, always)
			l.mu.Unlock()
			if !more {
				return failed != nil || l.closing.Load()
			}
			l.giveWay()
		}
	})
	if failed == nil {
		failed = err
	}
	return fmt.Errorf("%s: %w", l.doing, failed)
}

// turn makes up to burst reads while goOn returns true. It reports whether there may be
// more to read. The caller holds mu.
func (l *lane) turn(fd uintptr, goOn func() bool) (more bool, err error) {
	defer l.flush()
	for range burst {
		if l.closing.Load() || !goOn() {
			return false, nil
		}
		switch err := l.read(fd); {
		case err == nil, errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return false, nil
		default:
			return false, err
		}
	}
	return true, nil
}

// giveWay runs the other lanes for a turn, unless they are running. It also wakes the
// runtime's watchdog, which schedules other goroutines. It never waits for the output of
// another lane.
func (l *lane) giveWay() {
	_, _, _ = unix.Syscall(unix.SYS_GETPID, 0, 0, 0) // wakes the watchdog, like every call that the runtime knows of
	for _, o := range l.others {
		if o.mu.TryLock() {
			_ = o.conn.Control(o.assist)
			o.mu.Unlock()
		}
	}
}
