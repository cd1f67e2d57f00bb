// SPDX-License-Identifier: Apache-2.0

package parallel_test

import (
	"runtime"
	"slices"
	"testing"

	"github.com/flanneld/flanneld/pkg/base/parallel"
)

func TestForCallsEachOnce(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, cpus := range []int{1, 2, 7} {
		runtime.GOMAXPROCS(cpus)
		for _, n := range []int{0, 1, 499, 500, 999, 1000, 1001, 5003} {
			calls := make([]int, n)
			parallel.For(n, func(i int) { calls[i]++ })
			if i := slices.IndexFunc(calls, func(c int) bool { return c != 1 }); i >= 0 {
				t.Errorf("%d rounds on %d CPUs: round %d ran %d times", n, cpus, i, calls[i])
			}
		}
	}
}
