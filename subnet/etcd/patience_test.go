// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"slices"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// TestPatience checks the deadlines of requests to a store that does not answer in time. Each request
// must have twice as much time as the one before, up to four times the usual, until an answer comes
// quickly.
func TestPatience(t *testing.T) {
	t.Parallel()
	m := newFixture(t, sharedServer(t)).manager(t)
	const usual = 400 * time.Millisecond
	m.timing.request = usual
	var given []time.Duration // the times from the request to the deadline, rounded, because part of them has passed
	request := func(answer func(context.Context)) {
		_ = m.call(t.Context(), func(ctx context.Context, _ *clientv3.Client) error {
			deadline, _ := ctx.Deadline()
			given = append(given, time.Until(deadline).Round(usual))
			answer(ctx)
			return ctx.Err()
		})
	}
	never := func(ctx context.Context) { <-ctx.Done() }
	slowly := func(context.Context) { <-time.After(usual) }
	quickly := func(context.Context) {}
	for _, answer := range []func(context.Context){never, never, never, slowly, quickly, quickly} {
		request(answer)
	}
	want := []time.Duration{usual, 2 * usual, 4 * usual, 4 * usual, 4 * usual, usual}
	if !slices.Equal(given, want) {
		t.Errorf("requests had %v, want %v", given, want)
	}
}
