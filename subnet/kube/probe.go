// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// probe finds out whether a silent watch is stale. An API server whose cache has stopped, or is far
// behind, continues to serve watches, but sends no events. So the probe reads the own Node, which
// kubelet writes every few minutes, and which the server reads from the store. A watch that does not
// reach the last change of that Node is stale. A healthy watch is never silent for long, so the
// probe costs nothing then: the server sends a bookmark every minute, if its etcd reports progress.
type probe struct {
	m        *Manager
	cache    *nodeCache
	due      *time.Timer // fires if the watch is silent for too long
	got      chan *ownNode
	required int64 // the revision that the watch has to reach
}

func newProbe(m *Manager, cache *nodeCache) *probe {
	p := &probe{m: m, cache: cache, got: make(chan *ownNode)}
	p.due = time.NewTimer(p.silence())
	return p
}

// silence returns the time for which a watch may be silent. It is random, because the watches of all
// nodes become silent at the same time.
func (p *probe) silence() time.Duration { return p.m.timing.silence + rand.N(p.m.timing.silence) }

// applyEvent records that the watch has brought an event.
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

// fire must be called when due has fired. It returns an error if the watch is stale.
func (p *probe) fire(ctx context.Context, wg *sync.WaitGroup) error {
	if p.cache.revision < p.required {
		return p.m.client.stale(p.cache.revision, p.required)
	}
	wg.Go(func() {
		s, err := p.m.readNode(ctx, p.cache.own, 0)
		if err != nil {
			s = &ownNode{} // nothing is known, and the silence continues
		}
		select {
		case p.got <- s:
		case <-ctx.Done():
		}
	})
	return nil
}

// applyAnswer records the own Node as it is in the store.
func (p *probe) applyAnswer(s *ownNode) {
	p.required = s.version
	if p.cache.revision < p.required {
		p.due.Reset(p.m.timing.late)
	} else {
		p.due.Reset(p.silence())
	}
}

// stale returns the error of a watch that is stale.
func (c *client) stale(have, want int64) error {
	return &apiError{
		host: c.host, kind: "stale", cause: errStale,
		message: fmt.Sprintf("its watch is behind: it has come to resource version %d, and the own Node has %d", have, want),
	}
}

// errStale means that a watch does not reach the state of the store.
var errStale = errors.New("watch is stale")
