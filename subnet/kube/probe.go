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

// probe finds out whether a watch that is silent has gone blind. An API server whose
// cache has stopped, or is far behind, goes on serving watches, and says nothing in
// them. The own Node tells: kubelet writes it every few minutes, and the server
// reads it from the store. A watch that does not get as far as its last change is
// blind. A healthy one is never silent for long, so that the probe costs nothing
// then: the server sends a bookmark every minute, if its etcd tells it of progress.
type probe struct {
	m    *Manager
	v    *view
	due  *time.Timer // since the last event
	got  chan *self
	owed int64 // the revision that the watch has to reach
}

func newProbe(m *Manager, v *view) *probe {
	p := &probe{m: m, v: v, got: make(chan *self)}
	p.due = time.NewTimer(p.silence())
	return p
}

// silence is how long a watch may say nothing. Those of all nodes become silent at the
// same time.
func (p *probe) silence() time.Duration { return p.m.timing.silence + rand.N(p.m.timing.silence) }

// heard takes in that there was an event.
func (p *probe) heard(ctx context.Context) {
	if p.v.revision < p.owed {
		return
	}
	p.due.Reset(p.silence())
	if p.v.blind {
		p.v.blind = false
		p.m.report(ctx, watching, nil)
	}
}

// fire is what to do when due has fired. It returns an error if the watch is blind.
func (p *probe) fire(ctx context.Context, wg *sync.WaitGroup) error {
	if p.v.revision < p.owed {
		return p.m.client.stale(p.v.revision, p.owed)
	}
	wg.Go(func() {
		s, err := p.m.read(ctx, p.v.own, 0)
		if err != nil {
			s = &self{} // nothing is known, and the silence goes on
		}
		select {
		case p.got <- s:
		case <-ctx.Done():
		}
	})
	return nil
}

// take takes in the own Node as it is in the store.
func (p *probe) take(s *self) {
	p.owed = s.version
	if p.v.revision < p.owed {
		p.due.Reset(p.m.timing.late)
	} else {
		p.due.Reset(p.silence())
	}
}

// stale returns what is wrong with a watch that is blind.
func (c *client) stale(have, want int64) error {
	return &apiError{
		host: c.host, kind: "stale", cause: errStale,
		message: fmt.Sprintf("its watch is behind: it has come to resource version %d, and the own Node has %d", have, want),
	}
}

// errStale says that a watch does not get to what the store has.
var errStale = errors.New("watch is stale")
