// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// TestContractOfTheFake checks that the kernel in memory behaves like the real one.
func TestContractOfTheFake(t *testing.T) {
	contract(t, func(testing.TB) subject { return dataplanetest.New() })
}

// TestWalkOfTheFake takes random steps with the kernel in memory, as TestKernelRandomWalk does with the real
// one.
//
//stages:rest it takes seconds of CPU time, and TestKernelRandomWalk takes such steps with the kernel
func TestWalkOfTheFake(t *testing.T) {
	walkThrough(t, dataplanetest.New(), 3000, 0)
}

// TestWalkOfTheFakeByAnnouncements is TestWalkOfTheFake with a reconciler that reads the kernel once an hour, and
// otherwise learns of changes by announcements.
//
//stages:rest it takes seconds of CPU time, as TestWalkOfTheFake does
func TestWalkOfTheFakeByAnnouncements(t *testing.T) {
	walkThrough(t, dataplanetest.New(), 3000, time.Hour)
}
