// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// watcher receives the responses of a watch.
type watcher struct {
	// on is called with every response, from the one that confirms the beginning of the first
	// watch. An error ends the watch. If confirmed is not zero, the stream has brought all events
	// of the first key up to that revision, including those in resp.
	on func(resp *pb.WatchResponse, confirmed int64) error
	// waits reports whether the caller needs an answer of the store soon, so that a silent stream
	// is probed after timing.idle. nil means that the caller never needs one soon.
	waits func() bool
	// checks makes follow run verify. One watch of a connection is enough for that.
	checks bool
}

// stream is one call of etcd's Watch.
type stream struct {
	pb.Watch_WatchClient
	sending      sync.Mutex   // gRPC allows one sender at a time
	reached      atomic.Int64 // the highest revision that the server has named on the stream
	advanced     wait.Signal  // sent when reached has grown
	answersEarly bool         // the server answers probes at once, before it has sent all events
	answers      atomic.Bool  // the server has answered a probe, which etcd's grpc-proxy never does
	background   sync.WaitGroup
}

// follow watches keys from revision next on, with one stream, until the stream fails, w.on returns
// an error or ctx ends, and returns the reason as an error. It detects three kinds of failures:
//
//   - A connection that is dead: gRPC sends pings over it, which cost the store nothing.
//   - A server that works and sends nothing: it should send a progress notification every ten
//     minutes. follow probes a stream that is silent for timing.quiet, or for timing.idle while the
//     caller waits for something. It returns errStalled, wrapped, if there is no answer within
//     timing.probeAnswer.
//   - A server that sends notifications and is behind the store: see verify.
//
// etcd's library has a watch too, which reconnects by itself. So it hides outages, and the store
// may be another one after that.
func (m *Manager) follow(ctx context.Context, keys []string, next int64, w watcher) error {
	conn, _, err := m.client.get(ctx)
	if err != nil {
		return explain(m.cfg.Endpoints, m.timing.request, err)
	}
	inner, cancel := context.WithCancelCause(clientv3.WithRequireLeader(ctx))
	defer cancel(nil)
	watchdog := time.AfterFunc(m.timing.request, func() { cancel(m.stalled()) })
	defer watchdog.Stop()
	s, err := open(inner, conn, keys, next)
	if err == nil {
		if w.checks {
			s.background.Go(func() { cancel(m.verify(inner, s)) })
		}
		err = m.receive(s, watchdog, w)
		defer s.background.Wait()
	}
	cause := context.Cause(inner)
	cancel(nil)

	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(cause, errStalled), errors.Is(cause, errBehind):
		m.client.fail(conn)
		return cause
	case cause != nil:
		return cause
	}
	if broken, ok := errors.AsType[*brokenError](err); ok {
		m.client.observe(ctx, conn, time.Now(), broken.error)
		return explain(m.cfg.Endpoints, m.timing.request, broken.error)
	}
	return err
}

// stalled returns the error of a watch that is silent: a storeError that wraps errStalled.
func (m *Manager) stalled() error {
	return &storeError{"", fmt.Sprintf("etcd %s: %s", strings.Join(m.cfg.Endpoints, ","), errStalled), errStalled}
}

// brokenError is the error of gRPC that ended a stream.
type brokenError struct{ error }

// open starts a stream and begins to watch keys. A key that ends in a slash stands for all keys
// below it.
func open(ctx context.Context, conn *connection, keys []string, next int64) (*stream, error) {
	watch, err := pb.NewWatchClient(conn.ActiveConnection()).Watch(ctx)
	if err != nil {
		return nil, &brokenError{err}
	}
	s := &stream{Watch_WatchClient: watch, advanced: wait.NewSignal()}
	s.probe() // see answersEarly

	for i, key := range keys {
		r := watchRequest(key, next)
		r.GetCreateRequest().ProgressNotify = i == 0 // one notification is sufficient for all keys
		if err := s.send(r); err != nil {
			return nil, &brokenError{err}
		}
	}
	return s, nil
}

// watchRequest returns the request for a watch of a key, or of all keys below it if it ends in a
// slash. The watch starts one revision before next, because a server does not answer probes of a
// watch that starts at a future revision. The caller must skip the events of that revision.
func watchRequest(key string, next int64) *pb.WatchRequest {
	r := &pb.WatchCreateRequest{Key: []byte(key), StartRevision: next - 1}
	if strings.HasSuffix(key, "/") {
		r.RangeEnd = []byte(clientv3.GetPrefixRangeEnd(key))
	}
	return &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: r}}
}

func (s *stream) send(r *pb.WatchRequest) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.Send(r)
}

// probe requests the revision up to which the server has sent events. It ignores an error, because
// an error means that the stream has failed, and Recv also returns that.
func (s *stream) probe() {
	_ = s.send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}})
}

// receive passes responses to w.on until the stream fails or w.on returns an error, and returns the
// reason.
func (m *Manager) receive(s *stream, watchdog *time.Timer, w watcher) error {
	probe := time.AfterFunc(m.timing.quiet, s.probe)
	defer probe.Stop()

	for created := false; ; {
		resp, err := s.Recv()
		switch {
		case err != nil:
			return &brokenError{err}
		case resp.CompactRevision != 0:
			return errRelist
		case resp.Canceled:
			return explain(m.cfg.Endpoints, m.timing.request, status.Error(codes.Unavailable, "watch was canceled: "+resp.CancelReason))
		}
		if resp.WatchId == clientv3.InvalidWatchID {
			s.answers.Store(true)
		}

		created = created || resp.Created
		if !created {
			// Before 3.4.25 and 3.5.8 etcd answers a probe at once, even on a stream without a
			// watch. Later versions answer when the watches have sent all events.
			s.answersEarly = true
			continue
		}

		s.advance(resp.Header.Revision)
		if err := w.on(resp, s.confirmed(resp)); err != nil {
			return err
		}

		quiet := m.timing.quiet
		if w.waits != nil && w.waits() {
			quiet = m.timing.idle
		}
		probe.Reset(quiet)
		watchdog.Reset(quiet + m.timing.probeAnswer)
	}
}

// firstWatch is the id of the watch of the first key: etcd and its grpc-proxy count from zero.
const firstWatch = 0

// mostRevisions is the largest number of revisions in one response of etcd: watchBatchMaxRevs in
// watcher_group.go, in all versions.
const mostRevisions = 1000

// confirmed returns the revision up to which the server has sent all events of the first key. It is
// the key for which the server sends notifications. A response with events names the revision up to
// which etcd has looked for events, so it has all of them unless it is full. The result is zero if
// resp does not tell the revision.
func (s *stream) confirmed(resp *pb.WatchResponse) int64 {
	switch {
	case resp.Created:
		return 0
	case resp.WatchId == clientv3.InvalidWatchID && s.answersEarly:
		return 0
	case resp.WatchId != clientv3.InvalidWatchID && resp.WatchId != firstWatch:
		return 0
	case len(resp.Events) >= mostRevisions:
		return resp.Events[len(resp.Events)-1].Kv.ModRevision
	}
	return resp.Header.Revision
}

// advance records a revision that the server has named.
func (s *stream) advance(revision int64) {
	if revision <= s.reached.Load() {
		return
	}
	s.reached.Store(revision)
	s.advanced.Send()
}

// verify reads the store's revision every few minutes until ctx ends. It returns an error if it
// cannot read the revision, or if the stream does not reach that revision in time: see
// awaitRevision. If only a login takes long, verify tries again a few minutes later. It returns nil
// when ctx ends. This detects a member whose disk hangs. Such a member answers pings and sends
// progress notifications with its old revision. It cannot answer a linearizable read, because it
// has not applied the revisions of the other members. Behind a proxy the read may reach another
// member than the stream, so verify compares the revisions. When the stream has reached the
// revision, verify lets the client come back to its preferred endpoint.
func (m *Manager) verify(ctx context.Context, s *stream) error {
	for {
		if wait.For(ctx, wait.Vary(m.timing.check, 0.2)) != nil {
			return nil
		}

		head, err := m.get(ctx, m.configKey(), clientv3.WithCountOnly())
		switch {
		case errors.Is(err, errLoggingIn):
			continue
		case err != nil:
			return err
		}

		s.probe()
		if err := m.awaitRevision(ctx, s, head.Header.Revision); err != nil {
			return err
		}
		m.client.comeBack(ctx, m.configKey())
	}
}

// awaitRevision waits until the stream has reached a revision or ctx ends, and returns nil. After
// timing.probeAnswer it returns an error that wraps errBehind. If the server answers no probes, as
// behind etcd's grpc-proxy, only the next notification says how far the stream has come. Then
// awaitRevision waits for timing.quiet in all.
func (m *Manager) awaitRevision(ctx context.Context, s *stream, revision int64) error {
	limit := m.timing.probeAnswer
	timer := time.NewTimer(limit)
	defer timer.Stop()

	for s.reached.Load() < revision {
		select {
		case <-ctx.Done():
			return nil
		case <-s.advanced:
		case <-timer.C:
			if rest := m.timing.quiet - limit; rest > 0 && !s.answers.Load() {
				timer.Reset(rest)
				limit += rest
				continue
			}
			return &storeError{"behind", fmt.Sprintf("etcd %s: the watch is at revision %d, the store was at %d %s ago",
				strings.Join(m.cfg.Endpoints, ","), s.reached.Load(), revision, limit), errBehind}
		}
	}
	return nil
}
