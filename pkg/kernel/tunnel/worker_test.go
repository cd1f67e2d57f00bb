// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// testDirection is a direction. It is a function that each read calls.
type testDirection func(fd uintptr) error

func (r testDirection) read(fd uintptr) error { return r(fd) }

func (testDirection) flush() {}

func (testDirection) ready() bool { return true }

// TestWorkersYield checks that a worker that never waits runs another worker, which has data
// to read.
func TestWorkersYield(t *testing.T) {
	there, sender := devicePair(t)
	here, _ := devicePair(t)
	var closing atomic.Bool
	count, carried := 0, false
	busy := newWorker(testDirection(func(uintptr) error {
		if count++; count == 1 {
			if _, err := unix.Write(sender, []byte("hello")); err != nil {
				t.Error(err)
			}
		}
		if carried || count == 10*readsPerTurn {
			closing.Store(true)
		}
		return nil
	}), here.raw, &closing, "flood")
	quiet := newWorker(testDirection(func(fd uintptr) error {
		_, err := read(fd, make([]byte, 10))
		carried = carried || err == nil
		return err
	}), there.raw, &closing, "count")
	connect([]*worker{busy, quiet})
	ended := make(chan error, 1)
	go func() { ended <- busy.run() }()
	<-ended
	if !carried {
		t.Errorf("one worker has read %d times, the other never", count)
	}
}

// fullDirection is a direction whose output is full.
type fullDirection struct{ testDirection }

func (fullDirection) ready() bool { return false }

// TestWorkersDoNotWaitForOthers checks that a worker never runs another worker that would
// have to wait for room in its output, and that no worker reads after the tunnel is closed.
func TestWorkersDoNotWaitForOthers(t *testing.T) {
	there, sender := devicePair(t)
	here, _ := devicePair(t)
	if _, err := unix.Write(sender, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	var closing atomic.Bool
	const last = 3*readsPerTurn + 5
	count, others := 0, 0
	busy := newWorker(testDirection(func(uintptr) error {
		if count++; count == last {
			closing.Store(true)
		}
		if count > last {
			return unix.EBADFD
		}
		return nil
	}), here.raw, &closing, "flood")
	full := newWorker(fullDirection{func(uintptr) error { others++; return unix.EAGAIN }}, there.raw, &closing, "wait")
	connect([]*worker{busy, full})
	if err := here.file.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	_ = busy.run()
	if count != last || others != 0 {
		t.Errorf("%d reads, want %d; %d of a worker that would have to wait", count, last, others)
	}
}

// TestWorkersLetOthersRun checks that other goroutines run beside a worker that never
// waits, in a process that has one thread and was idle before.
func TestWorkersLetOthersRun(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	here, there := devicePair(t)
	var closing atomic.Bool
	began, others := make(chan struct{}), atomic.Bool{}
	var start time.Time
	busy := newWorker(testDirection(func(fd uintptr) error {
		if start.IsZero() {
			if _, err := read(fd, make([]byte, 10)); err != nil {
				return err
			}
			start = time.Now()
			close(began)
		}
		if others.Load() || time.Since(start) > 5*time.Second {
			closing.Store(true)
		}
		return nil
	}), here.raw, &closing, "flood")
	ended := make(chan error, 1)
	go func() { ended <- busy.run() }()
	// A separate process, because activity in this one would wake the runtime's watchdog.
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "sleep 0.3; printf go")
	own, err := unix.FcntlInt(uintptr(there), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	out := os.NewFile(uintptr(own), "there")
	defer out.Close()
	cmd.Stdout = out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-began
	others.Store(true)
	took := time.Since(start)
	<-ended
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if took > time.Second {
		t.Errorf("no other goroutine ran for %s", took)
	}
}
