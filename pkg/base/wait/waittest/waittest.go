// SPDX-License-Identifier: Apache-2.0

// Package waittest waits in tests for what other goroutines, processes or the kernel do.
package waittest

import (
	"errors"
	"testing"
	"time"
)

// Eventually calls check until it returns nil. After limit it fails the test with the last error.
// The message names the expected result by the parameter what.
func Eventually(tb testing.TB, limit time.Duration, what string, check func() error) {
	tb.Helper()
	deadline := time.Now().Add(limit)
	tick := time.NewTicker(max(limit/1000, 5*time.Millisecond))
	defer tick.Stop()

	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			tb.Fatalf("%s: %v", what, err)
		}
		<-tick.C
	}
}

// Until is Eventually for a check that reports only whether it has succeeded.
func Until(tb testing.TB, limit time.Duration, what string, check func() bool) {
	tb.Helper()
	Eventually(tb, limit, what, func() error {
		if check() {
			return nil
		}
		return errors.New("waited in vain")
	})
}

// Receive returns the next value of a channel, or the zero value if the channel is closed. After limit it
// fails the test. The message names the expected value by the parameter what.
func Receive[T any](tb testing.TB, limit time.Duration, what string, c <-chan T) (v T) {
	tb.Helper()
	select {
	case v = <-c:
	case <-time.After(limit):
		tb.Fatalf("%s: waited in vain for %s", what, limit)
	}
	return v
}
