// SPDX-License-Identifier: Apache-2.0

// Package parallel runs a loop on several CPUs.
package parallel

import (
	"runtime"
	"sync"
)

// least is the number of iterations per goroutine below which waking another CPU costs more
// than it saves.
const least = 500

// For calls f(0) to f(n-1), in any order and on as many CPUs as the program may use. It
// returns when all calls have returned. f must be cheap and safe for concurrent use.
func For(n int, f func(i int)) {
	parts := max(1, min(runtime.GOMAXPROCS(0), n/least))
	part := func(k int) {
		for i := k * n / parts; i < (k+1)*n/parts; i++ {
			f(i)
		}
	}
	var wg sync.WaitGroup
	for k := 1; k < parts; k++ {
		wg.Go(func() { part(k) })
	}
	part(0)
	wg.Wait()
}
