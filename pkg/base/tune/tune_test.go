// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"runtime"
	"runtime/debug"
	"testing"
	"testing/synctest"
	"time"
)

// TestTuner checks which settings change at the start and after it. It is not parallel,
// because it changes the whole process.
func TestTuner(t *testing.T) {
	defer runtime.SetDefaultGOMAXPROCS()
	const given = 60
	defer debug.SetGCPercent(debug.SetGCPercent(given))
	percent := func() int {
		now := debug.SetGCPercent(given)
		debug.SetGCPercent(now)
		return now
	}
	for _, tc := range []struct {
		name            string
		fit             *Tuner
		threads, memory bool
	}{
		{"embedded", &Tuner{}, false, false},
		{"own process", New([]string{"PATH=/bin"}), true, true},
		{"threads by the environment", New([]string{"GOMAXPROCS=2"}), false, true},
		{"collector by the environment", New([]string{"GOGC=50"}), true, false},
		{"memory by the environment", New([]string{"GOMEMLIMIT=50MiB"}), true, false},
	} {
		const threads = 3
		runtime.GOMAXPROCS(threads)
		debug.SetGCPercent(given)
		tc.fit.Begin()
		tc.fit.Network("", true)
		if now := runtime.GOMAXPROCS(0); now != threads {
			t.Errorf("%s: GOMAXPROCS is %d during the start, was %d", tc.name, now, threads)
		}
		if fitted := percent() == startGC; fitted != tc.memory {
			t.Errorf("%s: the collector's percentage is %d during the start", tc.name, percent())
		}
		synctest.Test(t, func(t *testing.T) {
			started := make(chan struct{})
			close(started)
			if err := tc.fit.Rest(t.Context(), started, func() bool { return true }); err != nil {
				t.Error(err)
			}
		})
		if fitted := runtime.GOMAXPROCS(0) == 1; fitted != tc.threads {
			t.Errorf("%s: GOMAXPROCS is %d after the start, was %d", tc.name, runtime.GOMAXPROCS(0), threads)
		}
		want := given
		if tc.memory {
			want = restGC
		}
		if percent() != want {
			t.Errorf("%s: the collector's percentage is %d after the start, want %d", tc.name, percent(), want)
		}
	}
	// The process uses all CPUs while at least one of its networks needs several threads, and one CPU
	// otherwise. The steps change what one network needs, add two others, and end one of these.
	fit := New(nil)
	fit.Network("", true)
	fit.applyRest()
	for _, tt := range []struct {
		change func()
		want   int
	}{
		{func() { fit.Network("", true) }, 1},
		{func() { fit.Network("", false) }, runtime.NumCPU()},
		{func() { fit.Network("", true) }, 1},
		{func() { fit.Network("red", false) }, runtime.NumCPU()},
		{func() { fit.Network("green", true) }, runtime.NumCPU()},
		{func() { fit.Ended("red") }, 1},
	} {
		tt.change()
		if now := runtime.GOMAXPROCS(0); now != tt.want {
			t.Errorf("GOMAXPROCS is %d, want %d", now, tt.want)
		}
	}
}

// TestRestWithoutStart checks that a daemon that still waits for its store releases
// memory after longStart.
func TestRestWithoutStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		fit := &Tuner{memory: true}
		fit.Begin()
		go func() { ended <- fit.Rest(ctx, nil, func() bool { return true }) }()
		<-time.After(longStart - 1) // in the bubble's time
		select {
		case <-ended:
			t.Error("Rest did not wait")
		default:
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if now := debug.SetGCPercent(restGC); now != restGC {
			t.Errorf("the collector's percentage is %d", now)
		}
		cancel()
	})
}

// TestRestAfterTheState checks when Rest releases memory if the state is written at once,
// late or never.
func TestRestAfterTheState(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(startGC))
	for _, tt := range []struct{ written, least, most time.Duration }{
		{0, tidyAfter, tidyAfter},
		{3 * tidyAfter / 2, 2 * tidyAfter, 2 * tidyAfter},
		{time.Hour, longStart, longStart + tidyAfter},
	} {
		synctest.Test(t, func(t *testing.T) {
			started, begin := make(chan struct{}), time.Now()
			close(started)
			written := func() bool {
				if now := debug.SetGCPercent(restGC); now != restGC {
					t.Errorf("the collector's percentage is %d while the state is not written", now)
				}
				return time.Since(begin) >= tt.written
			}
			if err := (&Tuner{memory: true}).Rest(t.Context(), started, written); err != nil {
				t.Error(err)
			}
			if took := time.Since(begin); took < tt.least || took > tt.most {
				t.Errorf("state written after %v: memory released after %v, want %v to %v", tt.written, took, tt.least, tt.most)
			}
		})
	}
}

// TestCost expects neither the CPU time of other goroutines nor the time of a wait in a cost. The clock of the test
// stands while it computes.
func TestCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cost := Cost()
		for begin := cpuTime(); cpuTime()-begin < 20*time.Millisecond; {
			continue
		}
		if got := cost(); got != 0 {
			t.Errorf("%s of work that took no time", got)
		}
		time.Sleep(24 * time.Hour)
		if got := cost(); got < 20*time.Millisecond || got > time.Hour {
			t.Errorf("%s of 20 ms of work and a wait", got)
		}
	})
}
