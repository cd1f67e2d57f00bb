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
	// startGC is the collector's percentage during the start: what a start
	// allocates is used to its end, and collecting it is a fifth of the work.
	startGC = 800
	// restGC has the collector run earlier than by default: at rest there is little
	// to collect, and all that lies about until it runs is memory.
	restGC = 50
	// tidyAfter leaves a start time for what comes behind it.
	tidyAfter = savePause
	// longStart is when a daemon that waits for its store, or has always something to
	// write, has to be tidy, too.
	longStart = time.Minute
)

// runtimeFit fits the Go runtime to a daemon that works for a tenth of a second
// and then waits for days. The zero value, for a program that embeds the daemon,
// leaves the runtime alone, and what the environment says stays.
type runtimeFit struct {
	threads, memory bool // may be fitted

	mu        sync.Mutex
	resting   bool
	oneThread bool // is enough for the backend
	fitted    bool // to one thread
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

// fitThreads is called with f.mu held. At rest it costs more to wake a second
// thread for each step of an event than the steps do, unless packets go through
// the process and there are CPUs for more. A start uses all it can get.
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

// rest waits until the start is over and the state is written, of which a large
// one takes memory as well, and gives back what all that took.
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
	runtime.GC() // what pools hold outlives one collection
	debug.FreeOSMemory()
	if err := unmapProgram(); err != nil {
		klog.FromContext(ctx).V(1).Info("the start's pages of the program stay in use", "err", err)
	}
	return nil
}
