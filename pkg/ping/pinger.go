// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// Pinger is Ping for callers that send many requests, which must not be fragmented. It has one socket
// for each family. With a socket for each request, each of them would receive the answers to all. It is
// safe for concurrent use.
type Pinger struct {
	receiving sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	sockets map[prefix.Family]net.PacketConn
	waiting map[uint32]chan<- error // by the id of the request
}

// NewPinger returns a Pinger. It opens its sockets when it needs them. The caller must Close it.
func NewPinger() *Pinger {
	return &Pinger{sockets: map[prefix.Family]net.PacketConn{}, waiting: map[uint32]chan<- error{}}
}

// Ping sends one echo request of size bytes and returns the time to its reply, or an error as Ping
// without a Pinger does.
func (p *Pinger) Ping(ctx context.Context, dst netip.Addr, size int, timeout time.Duration) (time.Duration, error) {
	kind := kindOf(prefix.FamilyOf(dst))
	conn, err := p.socket(ctx, prefix.FamilyOf(dst))
	if err != nil {
		return 0, err
	}
	id, answer := rand.Uint32(), make(chan error, 1)
	p.mu.Lock()
	p.waiting[id] = answer
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.waiting, id)
	}()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	sent := time.Now()
	if _, err := conn.WriteTo(kind.echo(id, max(size-kind.header, icmpHeader)), &net.IPAddr{IP: dst.AsSlice()}); err != nil {
		if errors.Is(err, unix.EMSGSIZE) {
			return 0, fmt.Errorf("%w: %d bytes", ErrTooBig, size)
		}
		return 0, err
	}
	select {
	case err := <-answer:
		return time.Since(sent), err
	case <-timer.C:
		return 0, errNoAnswer
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// socket returns the socket of a family.
func (p *Pinger) socket(ctx context.Context, f prefix.Family) (net.PacketConn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if conn := p.sockets[f]; conn != nil {
		return conn, nil
	}
	if p.closed {
		return nil, net.ErrClosed
	}
	conn, err := Options{DontFragment: true}.listen(ctx, kindOf(f))
	if err != nil {
		return nil, err
	}
	p.sockets[f] = conn
	p.receiving.Go(func() { p.receive(conn, f) })
	return conn, nil
}

// receive passes the answers to the callers that wait for them, until the socket is closed.
func (p *Pinger) receive(conn net.PacketConn, f prefix.Family) {
	kind := kindOf(f)
	buf := make([]byte, leastBuffer) // of a longer answer the beginning is sufficient
	for {
		size, _, err := conn.ReadFrom(buf)
		if err != nil { // it is closed, or of no use any more: the next request opens another one
			p.mu.Lock()
			if p.sockets[f] == conn {
				delete(p.sockets, f)
			}
			p.mu.Unlock()
			_ = conn.Close()
			return
		}
		id, ok, err := kind.parse(buf[:size])
		if !ok {
			continue
		}
		p.mu.Lock()
		if answer := p.waiting[id]; answer != nil {
			answer <- err
			delete(p.waiting, id)
		}
		p.mu.Unlock()
	}
}

// Close closes the sockets. Callers of Ping wait until their time is over.
func (p *Pinger) Close() error {
	p.mu.Lock()
	p.closed = true
	var errs []error
	for _, conn := range p.sockets {
		errs = append(errs, conn.Close())
	}
	p.mu.Unlock()
	p.receiving.Wait()
	return oneline.Join(errs...)
}
