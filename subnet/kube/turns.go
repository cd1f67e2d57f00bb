// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/wait"
)

// turns delays lists of all Nodes while the API server is busy.
//
// When all hosts boot at the same moment, the server needs minutes for their lists. Meanwhile it
// queues and refuses requests, including the small ones with which other hosts take their leases.
// So a host does not list directly after a small request that was slow or refused. It waits for a
// random time that grows with the number of Nodes, and reads its own Node again. If the server
// answers that quickly, the host lists. A host that boots alone does not wait, because the server
// has answered its first read of its Node quickly.
//
// If the server is always slow, a host stops waiting after the time in most.
type turns struct {
	m     *Manager
	begun time.Time     // when the host began to wait; zero if it does not
	most  time.Duration // how long the host waits at most
	ended time.Time     // when the last pause ended
}

const (
	slowFor = 10 * time.Second // age up to which a slow request shows that the server is busy

	// These are multiples of timing.spread for each Node.
	minFactor = 10  // maximum of the first pause
	maxFactor = 20  // maximum of later pauses
	sumFactor = 100 // maximum of all pauses together, see turns.most
)

// errBusy means that the API server has no time for a list of all Nodes.
var errBusy = errors.New("the API server is busy")

// check returns errBusy if the host has to wait before it lists all Nodes, otherwise nil.
func (t *turns) check() error {
	slow := time.Unix(0, t.m.client.slow.Load())
	if !slow.After(t.ended) || time.Since(slow) > slowFor || !t.begun.IsZero() && time.Since(t.begun) > t.most {
		return nil
	}
	return errBusy
}

// wait waits before the next small request. err is the reason: errBusy, or the error of the last
// request. wait returns the error of ctx if ctx ends first.
func (t *turns) wait(ctx context.Context, err error) error {
	err = wait.For(ctx, max(apiErrorOf(err).retryAfter, t.m.timing.backoffMin)+t.pause(ctx, err))
	t.ended = time.Now()
	return err
}

// pause returns how long to wait in addition to the time that the server has requested. It is zero
// if the number of Nodes is not known and cannot be requested.
func (t *turns) pause(ctx context.Context, err error) time.Duration {
	n := int(t.m.nodes.Load())
	if n == 0 {
		if errors.Is(err, context.DeadlineExceeded) {
			return 0 // the server may hang, and a request for the count would hang too
		}
		if n, err = t.m.count(ctx); err != nil { // the server is too busy even for that
			return 0
		}
	}

	each := time.Duration(n) * t.m.timing.spread
	longest := maxFactor * each
	if t.begun.IsZero() {
		longest = minFactor * each
		t.begun = time.Now()
		t.most = sumFactor * each
		klog.FromContext(ctx).Info("the API server is busy, waiting before all nodes are listed", "nodes", n, "most", t.most)
	}

	return t.m.client.random(longest)
}

// count requests the number of Nodes from the API server, and stores it in m.nodes.
func (m *Manager) count(ctx context.Context) (n int, err error) {
	l, err := m.readNodes(ctx, query{metadata: true, limit: 1}, func(string, *ownNode) { n++ })
	if err != nil {
		return 0, fmt.Errorf("count nodes: %w", err)
	}
	n += l.Remaining
	m.nodes.Store(int64(n))
	return n, nil
}
