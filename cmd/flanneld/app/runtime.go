// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

const (
	// startGC is the percentage (GOGC) of the garbage collector during the start. A start
	// uses most of its memory until its end, and collecting would be a fifth of its work.
	startGC = 800
	// restGC makes the collector run earlier than by default: at rest there is little to
	// collect, and garbage uses memory until the collector runs.
	restGC = 50
	// tidyAfter is the time after the start during which it may have more work.
	tidyAfter = savePause
	// longStart is the time after which memory is released even if the daemon still waits
	// for its store, or constantly writes.
	longStart = time.Minute
)

// runtimeFit adapts the Go runtime to a daemon that works for a tenth of a second and
// then waits for days. Settings in the environment have precedence. The zero value
// changes nothing, for programs that embed the daemon.
type runtimeFit struct {
	threads, memory bool // whether they may be adapted

	mu        sync.Mutex
	resting   bool
	oneThread bool // one thread is sufficient for the backend
	fitted    bool // the runtime uses one thread
}

func newRuntimeFit(env []string) *runtimeFit {
	unset := func(name string) bool {
		return !slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, name+"=") })
	}
	return &runtimeFit{threads: unset("GOMAXPROCS"), memory: unset("GOGC") && unset("GOMEMLIMIT")}
}

// begin is called before the start.
func (f *runtimeFit) begin() {
	if f.memory {
		debug.SetGCPercent(startGC)
	}
}

// backend is called when the kind of backend is known.
func (f *runtimeFit) backend(oneThread bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.oneThread = oneThread
	f.fitThreads()
}

// fitThreads sets GOMAXPROCS. It is 1 at rest, because an event is handled in small steps by
// several goroutines, and to wake a second thread for a step takes more CPU time than the step.
// During the start it is the number of CPUs. It stays that if packets go through the process
// and there are enough CPUs. The caller holds f.mu.
func (f *runtimeFit) fitThreads() {
	switch one := f.resting && f.oneThread; {
	case !f.threads || one == f.fitted:
	case one:
		runtime.GOMAXPROCS(1)
		f.fitted = true
	default:
		runtime.SetDefaultGOMAXPROCS()
		f.fitted = false
	}
}

// settle is called when the start is over.
func (f *runtimeFit) settle() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resting = true
	f.fitThreads()
	if f.memory {
		debug.SetGCPercent(restGC)
	}
}

// rest waits until the start is over and the state is written, because writing a large
// state takes memory too. It then releases the memory that the start has used.
func (f *runtimeFit) rest(ctx context.Context, started <-chan struct{}, written func() bool) error {
	if !f.threads && !f.memory {
		return nil
	}
	select {
	case <-ctx.Done():
		return nil
	case <-started:
	case <-time.After(longStart):
	}
	late := time.Now().Add(longStart)
	for over := false; !over; over = written() || !time.Now().Before(late) {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(tidyAfter):
			f.settle()
		}
	}
	if !f.memory {
		return nil
	}
	runtime.GC() // pools keep their memory for one collection
	debug.FreeOSMemory()
	if err := unmapProgram(); err != nil {
		klog.FromContext(ctx).V(1).Info("cannot release the pages of the program", "err", err)
	}
	return nil
}
