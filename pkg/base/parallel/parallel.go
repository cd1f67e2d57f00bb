// SPDX-License-Identifier: Apache-2.0

// Package parallel runs a loop on several CPUs.
package parallel

import (
	"runtime"
	"sync"
	"sync/atomic"
)

const (
	// least is the number of iterations per goroutine below which waking another CPU costs more
	// than it saves.
	least = 500
	// chunk is the number of iterations that a goroutine takes at a time. The call waits for the
	// last chunk, which takes longer if its CPU has to run another program meanwhile.
	chunk = 250
)

// For calls f(0) to f(n-1), in any order and on as many CPUs as the program may use. It
// returns when all calls have returned. f must be cheap and safe for concurrent use.
func For(n int, f func(i int)) {
	var taken atomic.Int64 // iterations
	work := func() {
		for {
			end := int(taken.Add(chunk))
			if end-chunk >= n {
				return
			}
			for i := end - chunk; i < min(end, n); i++ {
				f(i)
			}
		}
	}

	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), n/least) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
}
