// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
)

// TestConflictIsAnAnswer lets a write fail first because the store is down, and then because another host was faster.
// The outage must be over then.
func TestConflictIsAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reported []error
		m := &Manager{timing: defaultTiming(), outage: loglimit.NewOutage("etcd", func(err error) { reported = append(reported, err) })}
		results := []error{&storeError{"down", "down", nil}, errConflict, errors.New("the end")}
		err := m.retry(t.Context(), sourceLease, func() error {
			next := results[0]
			results = slices.Delete(results, 0, 1)
			if len(results) == 0 && (len(reported) != 2 || reported[1] != nil) {
				t.Errorf("after the conflict %v were reported, want the outage and its end", reported)
			}
			return next
		})
		if len(results) > 0 {
			t.Errorf("retry ended with %v", err)
		}
	})
}
