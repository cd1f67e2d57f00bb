// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"testing"
	"time"
)

func TestContract(t *testing.T) {
	Contract(t, func(testing.TB) World { return New() })
}

// TestWalkOfTheFake takes random steps with the kernel in memory, as TestKernelRandomWalk of
// package linux does with the real kernel.
//
//stages:rest it takes seconds of CPU time, and TestKernelRandomWalk takes such steps with the kernel
func TestWalkOfTheFake(t *testing.T) {
	Walk(t, New(), 3000, 0)
}

// TestWalkOfTheFakeByAnnouncements is TestWalkOfTheFake with a reconciler that reads the kernel once an hour, and
// otherwise learns of changes by announcements.
//
//stages:rest it takes seconds of CPU time, as TestWalkOfTheFake does
func TestWalkOfTheFakeByAnnouncements(t *testing.T) {
	Walk(t, New(), 3000, time.Hour)
}
