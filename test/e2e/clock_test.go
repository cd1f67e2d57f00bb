// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
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
			expectPeersProgrammed(t, l)
			expectSaved(t, h)
			expectStop(t, h.Daemon())
			if err := stepClock(h, step); err != nil {
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

// stepClock makes the next flanneld of the host see what it would see if the clock had
// been stepped by d since the last flanneld ended. A process cannot have a clock of its
// own. But a starting flanneld compares the clock only with the times in its state
// files, so stepClock moves these by -d. It returns an error if they contain no time.
func stepClock(h *lab.Host, d time.Duration) error {
	files, err := filepath.Glob(h.Path("/var/lib/flannel/flanneld-*.json"))
	if err != nil {
		return err
	}

	moved := 0
	for _, file := range files {
		n, err := moveTimes(file, -d)
		if err != nil {
			return fmt.Errorf("step clock of %s: %w", h.Name(), err)
		}
		moved += n
	}
	if moved == 0 {
		return fmt.Errorf("step clock of %s: no time in %q", h.Name(), files)
	}
	return nil
}

// moveTimes adds d to all times in a JSON file.
func moveTimes(file string, d time.Duration) (moved int, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}

	var content any
	if err := json.Unmarshal(text, &content); err != nil {
		return 0, err
	}

	var move func(v any) any
	move = func(v any) any {
		switch v := v.(type) {
		case map[string]any:
			for k := range v {
				v[k] = move(v[k])
			}

		case []any:
			for i := range v {
				v[i] = move(v[i])
			}

		case string:
			if at, err := time.Parse(time.RFC3339Nano, v); err == nil && !at.IsZero() {
				moved++
				return at.Add(d).Format(time.RFC3339Nano)
			}
		}
		return v
	}

	if text, err = json.Marshal(move(content)); err != nil {
		return 0, err
	}
	return moved, os.WriteFile(file, text, 0o600)
}
