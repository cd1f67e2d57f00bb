package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"flanneld/pkg/lab"
)

// stepClock makes what the daemon of h has on disk look as it would if the
// host's clock had been stepped by d since: a process cannot be given a clock of
// its own, but all that a start compares with the clock are the times in there.
func stepClock(t *testing.T, h *lab.Host, d time.Duration) {
	t.Helper()
	files, err := filepath.Glob(h.Path("/var/lib/flannel/flanneld-*.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("state files %q, %v", files, err)
	}
	text, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	var content any
	if err := json.Unmarshal(text, &content); err != nil {
		t.Fatal(err)
	}
	moved := 0
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
				return at.Add(-d).Format(time.RFC3339Nano)
			}
		}
		return v
	}
	content = move(content)
	if moved == 0 {
		t.Fatalf("no time in %s", text)
	}
	if text, err = json.Marshal(content); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(files[0], text, 0o600); err != nil {
		t.Fatal(err)
	}
}

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
			stepClock(t, h, step)
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
