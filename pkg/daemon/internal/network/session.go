// SPDX-License-Identifier: Apache-2.0

package network

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/daemon/internal/lastknown"
	"github.com/flanneld/flanneld/pkg/probe/paths"
	"github.com/flanneld/flanneld/subnet"
)

// statusTimeout limits the time that a report or a probe waits for the lease loop.
const statusTimeout = 2 * time.Second

// lastLook limits the time for inspecting a session that is about to end.
const lastLook = 200 * time.Millisecond

// session is the part of a network that depends on configuration, interface and lease.
type session struct {
	begin  atomic.Pointer[lastknown.State] // state at the begin, or after a change that kept the session; its Peers are empty, see ledger
	mtu    int                             // of backend.Network.MTU, in bytes; the path to a peer may be narrower
	be     backend.Backend
	ledger *subnet.Ledger
	syncer *backend.Syncer

	compared  chan struct{}                      // closed after the first complete pass
	pause     time.Duration                      // before this host's lease is published
	reclaim   <-chan struct{}                    // see backend.Reclaimer; nil never receives
	publisher backend.Publisher                  // nil if the backend's network does not implement it
	republish <-chan struct{}                    // see backend.Publisher; nil never receives
	behind    bool                               // the backend has announced new data on republish, and it is not published yet
	rules     wait.Signal                        // sent when the traffic rules may have to change: begin has changed, or the retirement has ended
	prober    *paths.Prober                      // nil without --probe
	left      atomic.Pointer[backend.Inspection] // last state of the session, when it has ended for the next session; otherwise nil
	cancel    context.CancelFunc
	done      chan struct{}
}

// stop ends the session and waits for its end. It may be called twice.
func (s *session) stop() {
	s.cancel()
	<-s.done
}

// inspect returns the present state of the session, or its last state if it has ended for
// another session: the kernel stays unchanged until the next session has started. objects
// selects whether the state includes the kernel objects of each peer.
func (s *session) inspect(ctx context.Context, objects bool) (backend.Inspection, error) {
	if in := s.left.Load(); in != nil {
		return *in, nil
	}
	in, err := s.syncer.Inspect(ctx, objects)
	if left := s.left.Load(); err != nil && left != nil { // it has ended in the meantime
		return *left, nil
	}
	return in, err
}

// own returns this host's lease in begin. republish changes its data, but a renewal does not change its end.
func (s *session) own() subnet.Lease { return s.begin.Load().Own }

// leave ends the session and stores its last state for inspect.
func (s *session) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lastLook)
	defer cancel()
	in, _ := s.inspect(ctx, true)
	s.left.Store(&in)
	s.stop()
}

// turnOfHost, multiplied by the number of hosts, is the time over which all hosts spread their
// writes after a change of the configuration, because etcd passes each write on to all hosts.
const turnOfHost = 10 * time.Millisecond

// turn returns the time to wait before a request that all hosts make after the same change. The time is
// random, at most turnOfHost for each peer.
func (p *parts) turn(s *session) time.Duration {
	return p.random(time.Duration(len(s.syncer.Peers().Peers)) * turnOfHost)
}
