// SPDX-License-Identifier: Apache-2.0

package pathmtu

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/ping"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// echoes sends echo requests, and gives each answer to the one who waits for it.
type echoes struct {
	receiving sync.WaitGroup

	mu      sync.Mutex
	sockets map[prefix.Family]*ping.Socket
	failed  map[prefix.Family]bool // logged
	waiting map[uint32]request
}

type request struct {
	to       netip.Addr
	answered chan<- struct{}
}

func newEchoes() *echoes {
	return &echoes{sockets: map[prefix.Family]*ping.Socket{}, failed: map[prefix.Family]bool{}, waiting: map[uint32]request{}}
}

// echo sends a packet and reports whether its answer has come within patience, and after which time. A
// packet that cannot be sent gets no answer.
func (e *echoes) echo(ctx context.Context, p Path, size int, patience time.Duration) (rtt time.Duration, ok bool) {
	id, answered, sent := rand.Uint32(), make(chan struct{}, 1), time.Now()
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.waiting, id)
	}()
	if !e.send(ctx, p, size, id, request{p.To, answered}) {
		return 0, false
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-answered:
		return time.Since(sent), true
	case <-timer.C:
	case <-ctx.Done():
	}
	return 0, false
}

func (e *echoes) send(ctx context.Context, p Path, size int, id uint32, r request) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	f := prefix.FamilyOf(p.To)
	s := e.sockets[f]
	if s == nil {
		var err error
		if s, err = ping.OpenSocket(context.WithoutCancel(ctx), f); err != nil {
			if !e.failed[f] {
				e.failed[f] = true
				klog.FromContext(ctx).Error(err, "cannot probe the MTU of paths: routes keep the MTU that they have")
			}
			return false
		}
		e.sockets[f] = s
		e.receiving.Go(func() { e.receive(s) })
	}
	e.waiting[id] = r
	return s.Send(ctx, p.To, ping.Path{Device: p.Device, From: p.From, Size: size, Whole: true}, id) == nil
}

// receive handles answers until the socket is closed.
func (e *echoes) receive(s *ping.Socket) {
	for {
		id, from, err := s.Receive()
		if err != nil {
			return
		}
		e.mu.Lock()
		// Over IPv6 the answer may come from another address of the host: that of the request may be an
		// anycast address of the pods' bridge. The random id tells which request it is for.
		if r, ok := e.waiting[id]; ok && (r.to == from || r.to.Is6()) {
			delete(e.waiting, id)
			r.answered <- struct{}{}
		}
		e.mu.Unlock()
	}
}

func (e *echoes) close() {
	e.mu.Lock()
	for _, s := range e.sockets {
		_ = s.Close()
	}
	e.mu.Unlock()
	e.receiving.Wait()
}
