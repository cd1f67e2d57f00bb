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

// readings is a carrier that does what a test says.
type readings func(fd uintptr) error

func (r readings) read(fd uintptr) error { return r(fd) }

func (readings) flush() {}

// TestLanesGiveWay has one lane so busy that it never waits: what comes on the other is
// carried before long, whether or not there is a thread for that.
func TestLanesGiveWay(t *testing.T) {
	there, sender := pair(t)
	here, _ := pair(t)
	var closing atomic.Bool
	count, carried := 0, false
	busy := newLane(readings(func(uintptr) error {
		if count++; count == 1 {
			if _, err := unix.Write(sender, []byte("hello")); err != nil {
				t.Error(err)
			}
		}
		if carried || count == 10*burst {
			closing.Store(true)
		}
		return nil
	}), here.raw, "flood")
	quiet := newLane(readings(func(fd uintptr) error {
		_, err := read(fd, make([]byte, 10))
		carried = carried || err == nil
		return err
	}), there.raw, "count")
	join([]*lane{busy, quiet})
	ended := make(chan error, 1)
	go func() { ended <- busy.run(&closing) }()
	<-ended
	if !carried {
		t.Errorf("one lane has read %d times, the other not once", count)
	}
}

// TestLanesLetOthersRun has a lane begin that never waits, in a process that has one
// thread and was idle until then: what else there is to do gets done.
func TestLanesLetOthersRun(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	here, there := pair(t)
	var closing atomic.Bool
	began, others := make(chan struct{}), atomic.Bool{}
	var start time.Time
	busy := newLane(readings(func(fd uintptr) error {
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
	}), here.raw, "flood")
	ended := make(chan error, 1)
	go func() { ended <- busy.run(&closing) }()
	// A process of its own: whatever this one did would wake the runtime's watchdog.
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "sleep 0.3; printf go")
	out := os.NewFile(uintptr(there), "there")
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
		t.Errorf("nobody else got to run for %s", took)
	}
	runtime.KeepAlive(out)
}
