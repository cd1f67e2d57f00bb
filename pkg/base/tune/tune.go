// SPDX-License-Identifier: Apache-2.0

// Package tune adapts the Go runtime to a daemon that works for a tenth of a second and then
// waits for days.
package tune

import (
	"context"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

const (
	// startGC is the percentage (GOGC) of the garbage collector during the start. A start
	// uses most of its memory until its end, and collecting would be a fifth of its work.
	startGC = 800
	// restGC makes the collector run earlier than by default: at rest there is little to
	// collect, and garbage uses memory until the collector runs.
	restGC = 50
	// tidyAfter is the time after the start during which the daemon may have more work, such
	// as writing the state file.
	tidyAfter = 2 * time.Second
	// longStart is the time after which memory is released even if the daemon still waits for its
	// store, or constantly writes the state file.
	longStart = time.Minute
)

// Tuner changes the settings of the Go runtime: one set for the start, another for the time
// after it. Settings in the environment have precedence. The zero value changes nothing, for
// programs that embed the daemon.
type Tuner struct {
	threads, memory bool // the number of threads, or the settings of the collector, may be adapted

	mu        sync.Mutex
	resting   bool
	networks  map[string]bool // by name: one thread is sufficient for the network
	oneThread bool            // one thread is sufficient for all of them
	fitted    bool            // the runtime uses one thread
}

// New returns a Tuner for a process of its own, whose environment ("NAME=value") is env.
func New(env []string) *Tuner {
	unset := func(name string) bool {
		return !slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, name+"=") })
	}
	return &Tuner{threads: unset("GOMAXPROCS"), memory: unset("GOGC") && unset("GOMEMLIMIT")}
}

// Begin prepares for a start that is short and needs little memory. Call it before the start.
func (t *Tuner) Begin() {
	if t.memory {
		debug.SetGCPercent(startGC)
	}
}

// Network must be called when the backends of a network are known, and when they change. oneThread is set
// if one thread of Go code is sufficient for them once the start is over.
func (t *Tuner) Network(name string, oneThread bool) {
	t.change(func() { t.networks[name] = oneThread })
}

// Ended must be called when a network has ended.
func (t *Tuner) Ended(name string) { t.change(func() { delete(t.networks, name) }) }

func (t *Tuner) change(networks func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.networks == nil {
		t.networks = map[string]bool{}
	}
	networks()
	t.oneThread = !slices.Contains(slices.Collect(maps.Values(t.networks)), false)
	t.fitThreads()
}

// fitThreads sets GOMAXPROCS. During the start GOMAXPROCS is the number of CPUs. At rest it is 1,
// unless oneThread is false. Several goroutines handle an event in small steps, and
// to wake a second thread for a step takes more CPU time than the step. The caller holds t.mu.
func (t *Tuner) fitThreads() {
	switch one := t.resting && t.oneThread; {
	case !t.threads || one == t.fitted:
	case one:
		runtime.GOMAXPROCS(1)
		t.fitted = true
	default:
		runtime.SetDefaultGOMAXPROCS()
		t.fitted = false
	}
}

func (t *Tuner) applyRest() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.resting = true
	t.fitThreads()
	if t.memory {
		debug.SetGCPercent(restGC)
	}
}

// Rest waits until started is closed, because the start is over then, and for tidyAfter. It then
// applies the settings for the time after the start. After that it waits until written reports that
// the state file is written, because writing a large one takes memory too, and releases the memory
// that the start has used. Rest waits for the end of the start and for the file for at most longStart
// each. A zero Tuner does nothing. Rest always returns nil, also if ctx ends first.
func (t *Tuner) Rest(ctx context.Context, started <-chan struct{}, written func() bool) error {
	if !t.threads && !t.memory {
		return nil
	}
	if wait.ForOr(ctx, longStart, started) != nil {
		return nil
	}

	late := time.Now().Add(longStart)
	for over := false; !over; over = written() || !time.Now().Before(late) {
		if wait.For(ctx, tidyAfter) != nil {
			return nil
		}
		t.applyRest()
	}
	if t.memory {
		release(ctx)
	}
	return nil
}

// cpuTime returns the CPU time that the process has used. Elapsed time would also contain the work of other programs on a
// busy host.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Cost returns a function that returns what the work of one goroutine since then has cost: the CPU time that the process
// has used, or the elapsed time if that is less, because other goroutines on other CPUs have worked as well.
func Cost() func() time.Duration {
	begin := time.Now()
	before := cpuTime()
	return func() time.Duration { return min(time.Since(begin), cpuTime()-before) }
}
