// SPDX-License-Identifier: Apache-2.0

package dataplanetest

import (
	"testing"
	"time"
)

func TestContract(t *testing.T) {
	Contract(t, func(testing.TB) World { return New() })
}

func TestRandomWalk(t *testing.T) {
	Walk(t, New(), 3000, 0)
}

func TestRandomWalkByAnnouncements(t *testing.T) {
	Walk(t, New(), 3000, time.Hour)
}
