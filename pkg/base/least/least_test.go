// SPDX-License-Identifier: Apache-2.0

package least_test

import (
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/least"
)

func TestOf(t *testing.T) {
	for _, tt := range []struct {
		values []time.Duration
		want   time.Duration
	}{
		{nil, 0}, {[]time.Duration{0, 0}, 0}, {[]time.Duration{0, 3}, 3}, {[]time.Duration{3, 0}, 3}, {[]time.Duration{3, 0, 2, 5}, 2},
	} {
		if got := least.Of(tt.values...); got != tt.want {
			t.Errorf("%v: %v, want %v", tt.values, got, tt.want)
		}
	}
}
