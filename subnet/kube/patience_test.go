// SPDX-License-Identifier: Apache-2.0

package kube

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
		var c client
		var given []time.Duration
		for _, takes := range []time.Duration{time.Hour, time.Hour, time.Hour, usual, 0, 0} {
			_ = c.patiently(t.Context(), usual, func(ctx context.Context) error {
				deadline, _ := ctx.Deadline()
				given = append(given, time.Until(deadline))
				select {
				case <-ctx.Done():
				case <-time.After(takes):
				}
				return ctx.Err()
			})
		}
		want := []time.Duration{usual, 2 * usual, 4 * usual, 4 * usual, 4 * usual, usual}
		if !slices.Equal(given, want) {
			t.Errorf("requests had %v, want %v", given, want)
		}
	})
}
