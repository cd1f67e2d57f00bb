// Package parallel spreads a loop over CPUs.
package parallel

import (
	"runtime"
	"sync"
)

// least is how many rounds are worth the wait for another CPU to wake up.
const least = 500

// For calls f with each of 0 to n-1, in any order and on as many CPUs as the
// program may use, and returns when all calls have. f is cheap, and safe for
// concurrent use.
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
