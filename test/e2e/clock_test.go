// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/flanneld/flanneld/test/lab"
)

// TestClockSteps checks that a host keeps its traffic and its subnet if its clock is stepped
// while the daemon is down. After a step forward the lease seems to have expired, and after a
// step back it seems to be valid for years. etcd does not answer at first.
func TestClockSteps(t *testing.T) {
	t.Parallel()
	for name, step := range map[string]time.Duration{"forward": 400 * 24 * time.Hour, "back": -400 * 24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
			startAll(t, l, lab.FlanneldOptions{})
			flows := startFlows(t, l, 100)
			h := l.Host(1)
			own := statusOf(t, h).Lease.Key
			pause(t, 3*time.Second) // until the daemon has saved its state
			expectStop(t, h.Daemon())
			if err := h.StepClock(step); err != nil {
				t.Fatal(err)
			}
			if err := l.Etcd().Stop(); err != nil {
				t.Fatal(err)
			}
			d := start(t, h, lab.FlanneldOptions{})
			pause(t, 2*time.Second) // the daemon must remove nothing in this time
			if err := l.Etcd().Cont(); err != nil {
				t.Fatal(err)
			}
			expectReady(t, d)
			if now := statusOf(t, h).Lease; now.Key != own || time.Until(now.Expires) > 25*time.Hour || time.Until(now.Expires) < 23*time.Hour {
				t.Errorf("the lease is %+v, want %s, to expire in 24 hours", now, own)
			}
			eventually(t, "the peer is in place", func() error {
				if r := statusOf(t, h); len(r.Peers) != 1 || r.Peers[0].State != "in place" {
					return fmt.Errorf("peers are %+v, want one in place", r.Peers)
				}
				return nil
			})
			expectNothingLost(t, flows)
		})
	}
}
