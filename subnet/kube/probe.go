// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// probe finds out whether a silent watch is stale. An API server whose cache has stopped, or is far
// behind, continues to serve watches, but sends no events. So the probe reads this host's Node, which
// kubelet writes every few minutes, and which the server reads from the store. A watch that does
// not reach the last change of that Node is stale. The server sends a bookmark every minute, if its
// etcd reports progress. So a healthy watch is never silent for long, and the probe reads nothing.
type probe struct {
	m        *Manager
	cache    *nodeCache
	due      *time.Timer // fires if the watch is silent for too long
	got      chan *ownNode
	required int64 // the revision that the watch has to reach, of the last change of this host's Node; 0: none yet
}

func newProbe(m *Manager, cache *nodeCache) *probe {
	p := &probe{m: m, cache: cache, got: make(chan *ownNode)}
	p.due = time.NewTimer(p.silence())
	return p
}

// silence returns the time for which a watch may be silent before it is probed. It is random,
// because the watches of all nodes become silent at the same time.
func (p *probe) silence() time.Duration {
	return p.m.timing.silence + p.m.client.random(p.m.timing.silence)
}

// applyEvent records that the watch has brought an event. It does nothing while the watch has not
// reached the required revision. After that the watch is not stale any more, and applyEvent reports
// the end of the outage.
func (p *probe) applyEvent(ctx context.Context) {
	if p.cache.revision < p.required {
		return
	}
	p.due.Reset(p.silence())
	if p.cache.stale {
		p.cache.stale = false
		p.m.report(ctx, watching, nil)
	}
}

// fire must be called when due has fired. If the watch has not reached the required revision, fire
// returns an error, because the watch is stale. If it has, fire starts a goroutine that reads this
// host's Node and sends it on p.got.
func (p *probe) fire(ctx context.Context, wg *sync.WaitGroup) error {
	if p.cache.revision < p.required {
		return p.m.client.stale(p.cache.revision, p.required)
	}

	wg.Go(func() {
		s, err := p.m.readNode(ctx, p.cache.own, 0)
		if err != nil {
			s = &ownNode{} // the store's state is not known, so the watch does not count as stale
		}
		select {
		case p.got <- s:
		case <-ctx.Done():
		}
	})
	return nil
}

// applyAnswer takes this host's Node that was sent on p.got. If the watch has not reached the last
// change of the Node, it has timing.late to reach it.
func (p *probe) applyAnswer(s *ownNode) {
	p.required = s.version
	if p.cache.revision < p.required {
		p.due.Reset(p.m.timing.late)
	} else {
		p.due.Reset(p.silence())
	}
}

// stale returns the error of a watch that is stale: an apiError that wraps errStale. have and want
// are revisions.
func (c *client) stale(have, want int64) error {
	return &apiError{
		host: c.host, kind: "stale", cause: errStale,
		message: fmt.Sprintf("its watch is behind: it has come to resource version %d, and this host's Node has %d", have, want),
	}
}

// errStale means that a watch is behind the store. The probe has read this host's Node from the store, and
// within timing.late after that the watch has not reached the last change of that Node. kubelet makes
// most of these changes.
var errStale = errors.New("watch is stale")
