// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// ErrNoSocket means that this process cannot open a socket for echo requests.
var ErrNoSocket = errors.New("open a socket for echo requests")

// Pinger sends all echo requests of a family from one socket, and gives each answer to the caller that
// waits for it. If each request had a socket of its own, every socket would receive the answers to all
// requests. A Pinger is safe for concurrent use.
type Pinger struct {
	// Heard is called with each note that another host sends to this one, in the families in which the Pinger
	// has sent a request. It may be nil, and must not be changed after the first request.
	Heard func(from netip.Addr, n Note)

	receiving sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	sockets map[prefix.Family]*socket
	waiting map[uint32]request // by id
}

type request struct {
	to     netip.Addr
	answer chan<- error
}

// NewPinger returns a Pinger. It opens its sockets when it needs them. The caller must Close it.
func NewPinger() *Pinger {
	return &Pinger{sockets: map[prefix.Family]*socket{}, waiting: map[uint32]request{}}
}

// Ping sends one echo request and returns the time to its reply. It returns ErrTooBig, wrapped, an UnreachableError
// or an ExpiredError, if this host or a router reports that, and ErrNoSocket, wrapped, if it cannot open the socket of
// the family. It returns another error without a reply in time, when ctx ends, and after Close.
func (p *Pinger) Ping(ctx context.Context, to netip.Addr, path Path, timeout time.Duration) (time.Duration, error) {
	s, err := p.socket(ctx, prefix.FamilyOf(to))
	if err != nil {
		return 0, err
	}
	id := rand.Uint32()
	answer := make(chan error, 1)
	p.mu.Lock()
	p.waiting[id] = request{to, answer}
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.waiting, id)
	}()

	sent := time.Now()
	if err := s.send(ctx, to, path, id); err != nil {
		if errors.Is(err, unix.EMSGSIZE) {
			return 0, fmt.Errorf("%w: %d bytes", ErrTooBig, path.Size)
		}
		return 0, err
	}
	if err := await(ctx, answer, timeout-time.Since(sent)); err != nil {
		return 0, err
	}
	return time.Since(sent), nil
}

// await waits for an answer and returns it, or errNoAnswer after the timeout. It waits for lastRead more,
// because the answer may have arrived while this process waited for a CPU.
func await(ctx context.Context, answer <-chan error, timeout time.Duration) error {
	for _, limit := range []time.Duration{timeout, lastRead} {
		select {
		case err := <-answer:
			return err
		case <-time.After(limit):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return errNoAnswer
}

// socket returns the socket of a family. It opens the socket if there is none.
func (p *Pinger) socket(ctx context.Context, f prefix.Family) (*socket, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.sockets[f]; s != nil {
		return s, nil
	}
	if p.closed {
		return nil, net.ErrClosed
	}

	s, err := openSocket(ctx, f, p.Heard)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoSocket, err)
	}
	p.sockets[f] = s
	p.receiving.Go(func() {
		s.receive(p.answer)

		// After a failure the next request opens another socket.
		p.mu.Lock()
		if p.sockets[f] == s {
			delete(p.sockets, f)
		}
		p.mu.Unlock()
		_ = s.close()
	})
	return s, nil
}

// answer gives an answer to the caller that waits for it. Over IPv4 a reply must come from the destination
// of the request. Over IPv6 it may come from another address of the host, because the destination may be an
// anycast address of the pods' bridge. So only the random id shows to which request the reply belongs.
func (p *Pinger) answer(id uint32, from netip.Addr, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r, ok := p.waiting[id]
	if !ok || err == nil && r.to.Is4() && r.to != from {
		return
	}
	r.answer <- err
	delete(p.waiting, id)
}

// Close closes the sockets. Calls of Ping that wait for an answer still return only after their timeout, or
// when their context ends.
func (p *Pinger) Close() error {
	p.mu.Lock()
	p.closed = true
	sockets := slices.Collect(maps.Values(p.sockets))
	clear(p.sockets)
	p.mu.Unlock()

	var errs []error
	for _, s := range sockets { // without the lock, because a request may be on its way out
		errs = append(errs, s.close())
	}
	p.receiving.Wait()
	return oneline.Join(errs...)
}
