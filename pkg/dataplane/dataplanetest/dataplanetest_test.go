// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"testing"
	"time"
)

func TestContract(t *testing.T) {
	Contract(t, func(testing.TB) World { return New() })
}

// TestRandomWalk is TestKernelRandomWalk with the fake of the kernel.
//
//stages:rest it takes seconds of CPU time, and TestKernelRandomWalk takes such steps with the kernel
func TestRandomWalk(t *testing.T) {
	Walk(t, New(), 3000, 0)
}

// TestRandomWalkByAnnouncements is TestRandomWalk with a reconciler that reads the kernel once an hour, and
// otherwise learns of changes by announcements.
//
//stages:rest it takes seconds of CPU time, as TestRandomWalk does
func TestRandomWalkByAnnouncements(t *testing.T) {
	Walk(t, New(), 3000, time.Hour)
}
