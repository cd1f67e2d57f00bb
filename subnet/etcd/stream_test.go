// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"errors"
	"net"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"

	"github.com/flanneld/flanneld/pkg/base/loglimit"
	"github.com/flanneld/flanneld/pkg/base/wait"
)

// TestAwaitRevision expects that a stream counts as behind only if it does not reach the revision
// of the store in time. The time is timing.probeAnswer if the server answers probes. Otherwise it
// is timing.quiet, because the next notification is due then.
func TestAwaitRevision(t *testing.T) {
	const probeAnswer, quiet = time.Second, time.Minute
	for name, tc := range map[string]struct {
		answers           bool
		revision, reaches int64         // the awaited revision, and the one that the stream reaches; before that, the stream is at 3
		after             time.Duration // when it reaches that revision
		want              error
		takes             time.Duration
	}{
		"it was there already":                      {true, 3, 3, probeAnswer / 2, nil, 0},
		"it comes there":                            {true, 5, 5, probeAnswer / 2, nil, probeAnswer / 2},
		"it stays behind":                           {true, 5, 4, probeAnswer / 2, errBehind, probeAnswer},
		"no answers, and it comes there in time":    {false, 5, 5, quiet / 2, nil, quiet / 2},
		"no answers, and it is behind at that time": {false, 5, 4, quiet / 2, errBehind, quiet},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := &Manager{timing: timing{probeAnswer: probeAnswer, quiet: quiet}}
				s := &stream{advanced: wait.NewSignal()}
				s.answers.Store(tc.answers)
				s.advance(3)
				time.AfterFunc(tc.after, func() { s.advance(tc.reaches) })
				start := time.Now()
				err := m.awaitRevision(t.Context(), s, tc.revision)
				if !errors.Is(err, tc.want) || tc.want == nil && err != nil {
					t.Errorf("error is %v, want %v", err, tc.want)
				}
				if took := time.Since(start); took != tc.takes {
					t.Errorf("it took %s, want %s", took, tc.takes)
				}
			})
		})
	}
}

// silentServer accepts watches and never sends anything.
type silentServer struct{ pb.UnimplementedWatchServer }

// Watch implements pb.WatchServer.
func (silentServer) Watch(s pb.Watch_WatchServer) error {
	<-s.Context().Done()
	return nil
}

// TestSilentWatchPasses expects that a silent server counts as a failure of the store that passes:
// a start then tries again, and does not end the daemon.
func TestSilentWatchPasses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pb.RegisterWatchServer(server, silentServer{})
	go func() { _ = server.Serve(l) }()
	defer server.Stop()
	endpoint := "http://" + l.Addr().String()
	m, err := New(Config{Endpoints: []string{endpoint}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	m.timing.request = 100 * time.Millisecond
	err = m.follow(t.Context(), []string{"key"}, 1, watcher{on: func(*pb.WatchResponse, int64) error { return nil }})
	if !errors.Is(err, errStalled) || !loglimit.Passes(err) || !strings.Contains(err.Error(), endpoint) {
		t.Errorf("error is %v, want one that passes and names the endpoint", err)
	}
}

// TestIntervals expects that every interval has a default: other tests set the intervals, so they would
// not find a missing one.
func TestIntervals(t *testing.T) {
	m, err := New(Config{Endpoints: []string{"http://127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	intervals := reflect.ValueOf(m.timing)
	for i := range intervals.NumField() {
		if intervals.Field(i).Int() <= 0 {
			t.Errorf("%s is zero", intervals.Type().Field(i).Name)
		}
	}
	// If the token expired between two checks, every check would cost a login.
	if longest := m.timing.check * 6 / 5; longest >= 5*time.Minute {
		t.Errorf("a check may come after %s, when the login has run out", longest)
	}
}
