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

// burst is how many reads a lane makes before it gives way.
const burst = 64

// carrier takes packets from a descriptor to where they belong.
type carrier interface {
	// read makes one read, and handles what it brings.
	read(fd uintptr) error
	// flush hands on what reads have gathered.
	flush()
	// ready reports whether what a read brings can be handed on without waiting.
	ready() bool
}

// lane has a carrier at work while there is something to read.
//
// The runtime is not told of the system calls of a carrier (see call.go), so it takes a
// lane that never has to wait for one that computes. It would not look at the other
// lanes' descriptors before that has had its time, and not at all if it was idle before:
// who gives way sees to both.
//
// With nothing left to read a lane waits at once. To yield the CPU and look once more
// would save it a tenth of its time, as more has come then, but on a host whose CPUs are
// busy that is milliseconds later, for every packet: who waits is woken before others.
type lane struct {
	carrier
	doing   string // for errors
	conn    syscall.RawConn
	closing *atomic.Bool
	others  []*lane

	mu     sync.Mutex // held while the carrier is at work
	assist func(fd uintptr)
}

func newLane(c carrier, conn syscall.RawConn, closing *atomic.Bool, doing string) *lane {
	l := &lane{carrier: c, conn: conn, closing: closing, doing: doing}
	l.assist = func(fd uintptr) { _, _ = l.turn(fd, l.ready) } // an error comes again when l itself is at it
	return l
}

// join makes lanes give way to each other.
func join(lanes []*lane) {
	for i, l := range lanes {
		l.others = slices.Delete(slices.Clone(lanes), i, i+1)
	}
}

// run carries until closing is set and the descriptor says so, or it fails.
func (l *lane) run() error {
	var failed error
	whatever := func() bool { return true }
	err := l.conn.Read(func(fd uintptr) bool {
		for {
			l.mu.Lock()
			var more bool
			more, failed = l.turn(fd, whatever)
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

// turn makes a burst of reads, as long as goOn says so. It reports whether there may be
// more to read. The caller has locked mu.
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

// giveWay has the other lanes take turns, unless they are at it, and the runtime's
// watchdog awake: it looks after whoever else wants to run. Nobody waits here for what
// another lane lacks.
func (l *lane) giveWay() {
	_, _, _ = unix.Syscall(unix.SYS_GETPID, 0, 0, 0) // wakes it, as every call does that it is told of
	for _, o := range l.others {
		if o.mu.TryLock() {
			_ = o.conn.Control(o.assist)
			o.mu.Unlock()
		}
	}
}
