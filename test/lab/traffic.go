// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// connection has the end near at the pod that opened it.
type connection struct{ near, far net.Conn }

func (c connection) Close() {
	c.near.Close()
	c.far.Close()
}

func (p *Pod) connectTo(ctx context.Context, to *Pod, f prefix.Family) (c connection, err error) {
	l, err := to.Listen(ctx, "tcp", netip.AddrPortFrom(to.Addr(f), 0).String())
	if err != nil {
		return c, err
	}
	defer l.Close()

	// On the first failure gctx ends, which closes the listener and so also ends Accept.
	g, gctx := errgroup.WithContext(ctx)
	defer context.AfterFunc(gctx, func() { l.Close() })()
	g.Go(func() (err error) {
		c.far, err = l.Accept()
		return err
	})
	g.Go(func() (err error) {
		c.near, err = p.Dial(gctx, "tcp", l.Addr().String())
		return err
	})

	if err := g.Wait(); err != nil {
		for _, end := range []net.Conn{c.near, c.far} {
			if end != nil {
				end.Close()
			}
		}
		return c, cause(ctx, err)
	}
	return c, nil
}

// cause returns why ctx has ended, of which err is then only a consequence, and otherwise err.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// Connect opens a TCP connection to the other pod, sends data in both directions, and closes it. It
// returns the source address that the other pod saw.
func (p *Pod) Connect(ctx context.Context, to *Pod, f prefix.Family) (seen netip.Addr, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("connect %s to %s: %w", p.name, to.name, err)
		}
	}()

	c, err := p.connectTo(ctx, to, f)
	if err != nil {
		return seen, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, c.Close)()

	for _, way := range []connection{c, {near: c.far, far: c.near}} {
		if _, err := way.near.Write([]byte("hello")); err != nil {
			return seen, cause(ctx, err)
		}
		if _, err := io.ReadFull(way.far, make([]byte, len("hello"))); err != nil {
			return seen, cause(ctx, err)
		}
	}

	remote, err := netip.ParseAddrPort(c.far.RemoteAddr().String())
	return remote.Addr().Unmap(), err
}

// Throughput sends data over TCP to the other pod for the time d, and returns the received bits per
// second. It waits up to five seconds for the first data even if d is shorter: on a busy machine,
// or after a lost packet, they may arrive late.
func (p *Pod) Throughput(ctx context.Context, to *Pod, f prefix.Family, d time.Duration) (bps float64, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("measure throughput of %s to %s: %w", p.name, to.name, err)
		}
	}()

	const patience = 5 * time.Second // time to wait for the first data

	c, err := p.connectTo(ctx, to, f)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, c.Close)()

	start := time.Now()
	received := int64(0)
	if err := c.far.SetReadDeadline(start.Add(max(d, patience))); err != nil {
		return 0, err
	}

	var g errgroup.Group
	g.Go(func() error {
		chunk := make([]byte, 1<<17)
		for {
			if _, err := c.near.Write(chunk); err != nil {
				return ignoreTimeout(err)
			}
		}
	})

	g.Go(func() error {
		buf := make([]byte, 1<<17)
		n, err := c.far.Read(buf)
		received = int64(n)
		if err == nil {
			err = c.far.SetReadDeadline(start.Add(d))
		}
		if err == nil {
			// The structs hide the ReadFrom of io.Discard, which has a smaller buffer.
			more, failed := io.Copy(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c.far})
			received += more
			err = failed
		}
		return errors.Join(ignoreTimeout(err), c.near.SetWriteDeadline(time.Now()))
	})

	if err := g.Wait(); err != nil {
		return 0, cause(ctx, err)
	}
	if received == 0 {
		return 0, fmt.Errorf("nothing arrived within %v", max(d, patience))
	}
	return float64(received) * 8 / time.Since(start).Seconds(), nil
}

// ignoreTimeout is for the end of a measurement.
func ignoreTimeout(err error) error {
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		return nil
	}
	return err
}
