package e2e

import (
	"fmt"
	"testing"
	"time"

	"flanneld/pkg/lab"
)

// A clock that was stepped while the daemon was down takes no traffic down, and
// moves nobody to another subnet: forward, so that the lease seems to have run
// out, and back, so that it seems to be good for years. The store is away at
// first.
func TestClockSteps(t *testing.T) {
	for name, step := range map[string]time.Duration{"forward": 400 * 24 * time.Hour, "back": -400 * 24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, lab.Config{Hosts: 2}, `{"Type":"vxlan"}`)
			startAll(t, l, lab.FlanneldOptions{})
			flows := startFlows(t, l, 100)
			h := l.Host(1)
			own := statusOf(t, h).Lease.Key
			pause(t, 3*time.Second) // the state on disk is not older than that
			expectStop(t, h.Daemon())
			if err := h.StepClock(step); err != nil {
				t.Fatal(err)
			}
			if err := l.Etcd().Stop(); err != nil {
				t.Fatal(err)
			}
			d := start(t, h, lab.FlanneldOptions{})
			pause(t, 2*time.Second) // in which nothing may be taken down
			if err := l.Etcd().Cont(); err != nil {
				t.Fatal(err)
			}
			expectReady(t, d)
			if now := statusOf(t, h).Lease; now.Key != own || time.Until(now.Expires) > 25*time.Hour || time.Until(now.Expires) < 23*time.Hour {
				t.Errorf("the lease is %+v, want %s for another 24 hours", now, own)
			}
			eventually(t, "the peer is served", func() error {
				if r := statusOf(t, h); len(r.Peers) != 1 || r.Peers[0].State != "in place" {
					return fmt.Errorf("peers are %+v", r.Peers)
				}
				return nil
			})
			expectNothingLost(t, flows)
		})
	}
}
