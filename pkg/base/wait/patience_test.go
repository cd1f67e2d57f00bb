// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// TestPatience checks the deadlines of requests to a server that does not answer in time. Each request
// must have twice as much time as the one before, up to four times the usual, until an answer comes
// quickly.
func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const usual = 10 * time.Second
		var p Patience
		var given []time.Duration
		for _, takes := range []time.Duration{time.Hour, time.Hour, time.Hour, usual, 0, 0} {
			took, _ := p.Try(usual, func(deadline time.Duration) error {
				given = append(given, deadline)
				time.Sleep(min(takes, deadline))
				if takes > deadline {
					return context.DeadlineExceeded
				}
				return nil
			})
			if want := min(takes, given[len(given)-1]); took != want {
				t.Errorf("a request took %s, want %s", took, want)
			}
		}
		want := []time.Duration{usual, 2 * usual, 4 * usual, 4 * usual, 4 * usual, usual}
		if !slices.Equal(given, want) {
			t.Errorf("requests had %v, want %v", given, want)
		}
	})
}
