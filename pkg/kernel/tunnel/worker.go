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

// readsPerTurn is the number of reads after which a worker lets other workers run.
const readsPerTurn = 64

// direction moves the packets of one descriptor to their destination. outbound is the
// direction from the device to peers, and inbound is the direction from one socket to the
// device.
type direction interface {
	// read makes one read and handles the result.
	read(fd uintptr) error
	// flush passes on the packets that reads have gathered.
	flush()
	// ready reports whether the result of a read can be passed on without waiting.
	ready() bool
}

// worker runs a direction while there is data to read.
//
// The runtime does not know of the direction's system calls (see syscall.go). To it, a
// worker that never waits looks like a goroutine that computes. So the runtime would
// check the descriptors of other workers only when the worker's time slice is over and,
// if the process was idle before, never. yield solves both problems.
//
// A worker without data to read waits at once. It could yield the CPU and read once
// more, because more packets have often arrived by then. That would save a tenth of its
// CPU time. But on a busy host a goroutine that yields runs again only milliseconds
// later, while one that waits is woken before others.
type worker struct {
	direction
	task    string // for errors
	conn    syscall.RawConn
	closing *atomic.Bool
	others  []*worker

	mu      sync.Mutex // taken while the direction runs
	runTurn func(fd uintptr)
}

func newWorker(d direction, conn syscall.RawConn, closing *atomic.Bool, task string) *worker {
	w := &worker{direction: d, conn: conn, closing: closing, task: task}
	w.runTurn = func(fd uintptr) { _, _ = w.turn(fd, w.ready) } // the next turn of the worker itself gets the same error again
	return w
}

// connect makes each worker know the others, which yield runs.
func connect(workers []*worker) {
	for i, w := range workers {
		w.others = slices.Delete(slices.Clone(workers), i, i+1)
	}
}

// run runs the direction until it fails or the tunnel is closing. Its result is never nil.
func (w *worker) run() error {
	var failed error
	always := func() bool { return true }
	err := w.conn.Read(func(fd uintptr) bool {
		for {
			w.mu.Lock()
			var more bool
			more, failed = w.turn(fd, always)
			w.mu.Unlock()
			if !more {
				return failed != nil || w.closing.Load()
			}
			w.yield()
		}
	})
	if failed == nil {
		failed = err
	}
	return fmt.Errorf("%s: %w", w.task, failed)
}

// turn makes up to readsPerTurn reads, while goOn returns true and the tunnel is not closing, and then
// flushes. more means that there may be more to read. The caller holds mu.
func (w *worker) turn(fd uintptr, goOn func() bool) (more bool, err error) {
	defer w.flush()
	for range readsPerTurn {
		if w.closing.Load() || !goOn() {
			return false, nil
		}
		err := w.read(fd)
		if errors.Is(err, unix.EAGAIN) {
			return false, nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return false, err
		}
	}
	return true, nil
}

// yield runs every other worker for a turn, unless that is running already. The turn ends early when the
// other worker's output has no room, so yield never waits.
func (w *worker) yield() {
	// Like every call that the runtime knows of, this wakes its watchdog, which schedules goroutines.
	_, _, _ = unix.Syscall(unix.SYS_GETPID, 0, 0, 0)
	for _, o := range w.others {
		if o.mu.TryLock() {
			_ = o.conn.Control(o.runTurn)
			o.mu.Unlock()
		}
	}
}
