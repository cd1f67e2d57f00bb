// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"testing"
	"time"
)

func TestGracePeriod(t *testing.T) {
	const margin, grace = time.Hour, time.Minute
	now := time.Now()
	var g gracePeriod
	for _, tc := range []struct {
		what         string
		after        time.Duration // since the contact before
		during, ends bool
	}{
		{"at first", 0, false, false},
		{"after a short outage", margin, false, false},
		{"after a long one", margin + 1, true, false},
		{"just before its end", grace - 1, true, false},
		{"at its end", 1, false, true},
		{"once more", 1, false, false},
	} {
		now = now.Add(tc.after)
		g.contact(now, margin, grace)
		if ends := g.end(); ends != tc.ends || now.Before(g.grace) != tc.during {
			t.Errorf("%s: during the grace period %v, at its end %v, want %v and %v", tc.what, now.Before(g.grace), ends, tc.during, tc.ends)
		}
	}
}
