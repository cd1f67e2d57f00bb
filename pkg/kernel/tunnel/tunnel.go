// SPDX-License-Identifier: Apache-2.0

// Package tunnel moves IP packets between a TUN device and peers. Like flannel's udp
// backend it sends each packet in a UDP datagram of its own, which contains nothing else.
//
// If the kernel supports offloads, one system call moves many packets: the device
// exchanges super-packets, and a send or receive handles many datagrams. The packets on
// the network are the same with and without offloads.
//
//   - tunnel.go opens and closes a Tunnel, which has one worker (worker.go) for each
//     direction: outbound.go from the device, inbound.go from each socket.
//   - device.go, socket.go and syscall.go access the kernel.
//   - config.go has the settings of a Tunnel, which both directions use.
//   - table.go maps addresses to peers, and counters.go counts packets and drops.
//   - package packet parses, splits and merges the packets, without any I/O.
package tunnel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

// Tunnel is an open tunnel.
type Tunnel struct {
	Config
	sockets sockets
	log     klog.Logger
	started bool // Start has succeeded
	closing atomic.Bool
	running sync.WaitGroup
	ended   context.Context // ends with the error of the first direction that fails, or at Close
	end     context.CancelCauseFunc
}

// Open opens a tunnel. It moves no packets before Start. Open must be called on a thread
// in the network namespace of the tunnel. It returns an error if an address of Local does
// not exist or its port is in use.
func Open(ctx context.Context, c Config) (*Tunnel, error) {
	t := &Tunnel{Config: c, log: klog.FromContext(ctx)}
	t.ended, t.end = context.WithCancelCause(context.WithoutCancel(ctx))
	for _, local := range c.Local {
		s, err := openSocket(ctx, local)
		if err != nil {
			return nil, oneline.Join(err, t.sockets.forEach((*socket).close), t.sockets.forEach((*socket).release))
		}
		t.sockets[index(local.Addr().Is6())] = s
	}
	return t, nil
}

// Start makes the tunnel move packets, until Close or an error: see Done and Err. After
// Start has succeeded, further calls have no effect.
func (t *Tunnel) Start() error {
	if t.started {
		return nil
	}
	if err := t.Device.file.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("read from TUN device %s: %w", t.Device.name, err)
	}

	workers := []*worker{newWorker(newOutbound(t.Config, t.sockets, t.log), t.Device.raw, &t.closing, "read from TUN device "+t.Device.name)}
	for _, s := range t.sockets {
		if s != nil {
			workers = append(workers, newWorker(newInbound(t.Config, s), s.raw, &t.closing, "receive on UDP "+s.local.String()))
		}
	}
	connect(workers)
	t.started = true
	for _, w := range workers {
		t.running.Go(func() {
			err := w.run()
			if t.closing.Load() {
				err = nil
			}
			t.end(err)
		})
	}
	return nil
}

// Done returns a channel that is closed when a direction has failed, or when Close has
// ended the tunnel.
func (t *Tunnel) Done() <-chan struct{} { return t.ended.Done() }

// Err returns the error of the direction that has failed, also after Close. It returns
// nil while the tunnel runs, and if only Close has ended it.
func (t *Tunnel) Err() error {
	if err := context.Cause(t.ended); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// Close ends the tunnel and waits for its end. Unread packets stay in the device for
// the next tunnel. Close must be called exactly once, also if Start or the tunnel has
// failed.
func (t *Tunnel) Close() error {
	t.closing.Store(true)
	err := t.Device.file.SetReadDeadline(time.Unix(1, 0))
	if errors.Is(err, os.ErrClosed) {
		err = nil
	}
	errs := []error{err, t.sockets.forEach((*socket).close)}
	t.running.Wait()
	t.end(nil)
	return oneline.Join(append(errs, t.sockets.forEach((*socket).release))...)
}
