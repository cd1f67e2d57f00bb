// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"runtime"
	"runtime/debug"
	"testing"
	"testing/synctest"
	"time"
)

// TestRuntimeFit is not parallel, because it changes the whole process.
func TestRuntimeFit(t *testing.T) {
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
		fit             *runtimeFit
		threads, memory bool
	}{
		{"embedded", &runtimeFit{}, false, false},
		{"own process", newRuntimeFit([]string{"PATH=/bin"}), true, true},
		{"threads by the environment", newRuntimeFit([]string{"GOMAXPROCS=2"}), false, true},
		{"collector by the environment", newRuntimeFit([]string{"GOGC=50"}), true, false},
		{"memory by the environment", newRuntimeFit([]string{"GOMEMLIMIT=50MiB"}), true, false},
	} {
		const threads = 3
		runtime.GOMAXPROCS(threads)
		debug.SetGCPercent(given)
		tc.fit.begin()
		tc.fit.backend(true)
		if now := runtime.GOMAXPROCS(0); now != threads {
			t.Errorf("%s: GOMAXPROCS is %d during the start, was %d", tc.name, now, threads)
		}
		if fitted := percent() == startGC; fitted != tc.memory {
			t.Errorf("%s: the collector's percentage is %d during the start", tc.name, percent())
		}
		synctest.Test(t, func(t *testing.T) {
			started := make(chan struct{})
			close(started)
			if err := tc.fit.rest(t.Context(), started, func() bool { return true }); err != nil {
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
	// A backend that carries packets gets all CPUs, also if it follows or precedes
	// another backend.
	fit := newRuntimeFit(nil)
	fit.backend(true)
	fit.settle()
	for _, oneThread := range []bool{true, false, true} {
		fit.backend(oneThread)
		want := runtime.NumCPU()
		if oneThread {
			want = 1
		}
		if now := runtime.GOMAXPROCS(0); now != want {
			t.Errorf("GOMAXPROCS is %d, want %d", now, want)
		}
	}
}

// TestRestWithoutStart checks that a daemon that still waits for its store releases
// memory after longStart.
func TestRestWithoutStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		fit := &runtimeFit{memory: true}
		fit.begin()
		go func() { ended <- fit.rest(ctx, nil, func() bool { return true }) }()
		<-time.After(longStart - 1) // in the bubble's time
		select {
		case <-ended:
			t.Error("rest did not wait")
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

// TestRestAfterTheState tests a start whose state is written late or never.
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
			if err := (&runtimeFit{memory: true}).rest(t.Context(), started, written); err != nil {
				t.Error(err)
			}
			if took := time.Since(begin); took < tt.least || took > tt.most {
				t.Errorf("state written after %v: memory released after %v, want %v to %v", tt.written, took, tt.least, tt.most)
			}
		})
	}
}
