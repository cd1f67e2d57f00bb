// SPDX-License-Identifier: Apache-2.0

package wait

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// TestRenewal checks when the context of the function ends, with a TTL of 30 seconds.
func TestRenewal(t *testing.T) {
	failed, lost := errors.New("failed"), errors.New("lost")
	for name, test := range map[string]struct {
		renew func(at time.Duration) error // at is the time since the start
		ends  time.Duration                // time from the start to the end of the context
	}{
		"it is renewed until the caller ends":        {func(time.Duration) error { return nil }, time.Hour},
		"no renewal succeeds":                        {func(time.Duration) error { return failed }, 20 * time.Second},
		"renewals fail after a successful one":       {func(at time.Duration) error { return errorAfter(at, 15*time.Second, failed) }, 30 * time.Second},
		"an outage is shorter than what is left":     {func(at time.Duration) error { return errorBefore(at, 17*time.Second, failed) }, time.Hour},
		"it is lost, so there is no further attempt": {func(time.Duration) error { return fmt.Errorf("renew: %w", lost) }, 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				r := Renewal{TTL: 30 * time.Second, Lost: lost, Renew: func(context.Context) error { return test.renew(time.Since(start)) }}
				r.Hold(ctx, start, func(ctx context.Context) {
					<-ctx.Done()
					if took := time.Since(start); took != test.ends {
						t.Errorf("it ended after %v, want %v", took, test.ends)
					}
				})
			})
		})
	}
}

// TestRenewalEndsWithItsUser expects that nothing is renewed after the function has returned.
func TestRenewalEndsWithItsUser(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		renewals := 0
		r := Renewal{TTL: 30 * time.Second, Renew: func(context.Context) error { renewals++; return nil }}
		r.Hold(t.Context(), time.Now(), func(context.Context) { time.Sleep(25 * time.Second) })
		time.Sleep(time.Minute)
		if renewals != 2 {
			t.Errorf("%d renewals, want 2", renewals)
		}
	})
}

func errorAfter(at, limit time.Duration, err error) error {
	if at > limit {
		return err
	}
	return nil
}

func errorBefore(at, limit time.Duration, err error) error {
	if at < limit {
		return err
	}
	return nil
}
