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
//   - table.go maps addresses to peers, and counters.go counts packets and drops.
//   - package packet parses, splits and merges the packets, without any I/O.
package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/tunnel/packet"
)

// SourceCheck selects which source addresses a packet from a peer may have.
type SourceCheck string

// The source checks.
const (
	// CheckStrict accepts a packet only if its datagram comes from the public address
	// of a peer, and its source is in the subnet of a peer with that public address.
	CheckStrict SourceCheck = "strict"
	// CheckNetwork also accepts sources outside of the networks from any peer, because
	// packets that enter the network at a peer may keep their source.
	CheckNetwork SourceCheck = "network"
	// CheckOff accepts any source from any sender.
	CheckOff SourceCheck = "off"
)

// Config configures a tunnel. All fields except Check and NoSocketOffloads are required.
type Config struct {
	// Device is the TUN device. It stays open when the tunnel ends. Only one tunnel at a
	// time may use it.
	Device *Device
	// Local contains the addresses to send from and listen on, at most one per address
	// family. Peers must listen on the same port.
	Local []netip.AddrPort
	// Own contains this host's addresses in the network, one per family. They are the
	// sources of ICMP errors.
	Own []netip.Addr
	// Networks contains the prefixes in which the subnets of all peers are.
	Networks []netip.Prefix
	Check    SourceCheck // empty means CheckNetwork
	Table    *Table
	Counters *Counters
	// NoSocketOffloads disables the offloads of sockets, for tests and for kernels and
	// network cards whose offloads are broken.
	NoSocketOffloads bool
}

// Tunnel is an open tunnel.
type Tunnel struct {
	Config
	sockets        [2]*socket    // by family: IPv4, IPv6; nil if there is none
	errorLimit     *rate.Limiter // limit of ICMP errors, except those about sizes
	sizeErrorLimit *rate.Limiter // limit of ICMP errors about sizes, which connections wait for
	log            klog.Logger
	started        bool // Start has succeeded
	closing        atomic.Bool
	running        sync.WaitGroup
	done           chan struct{}
	fail           sync.Once
	err            error // set before done is closed
}

// The rate of ICMP errors is limited, as in routers.
const (
	icmpErrorRate  = 1000 // per second
	icmpErrorBurst = 100
)

func newLimiter() *rate.Limiter { return rate.NewLimiter(icmpErrorRate, icmpErrorBurst) }

// Open opens a tunnel. It moves no packets before Start. Open must be called on a thread
// in the network namespace of the tunnel. It returns an error if an address of Local does
// not exist or its port is in use.
func Open(ctx context.Context, c Config) (*Tunnel, error) {
	t := &Tunnel{Config: c, errorLimit: newLimiter(), sizeErrorLimit: newLimiter(), log: klog.FromContext(ctx), done: make(chan struct{})}
	for _, local := range c.Local {
		s, err := openSocket(ctx, local, c.NoSocketOffloads)
		if err != nil {
			return nil, oneline.Join(err, t.forEachSocket((*socket).close), t.forEachSocket((*socket).release))
		}
		t.sockets[index(local.Addr().Is6())] = s
	}
	return t, nil
}

// Start makes the tunnel move packets, until Close or an error: see Done and Err. After it
// has succeeded, further calls have no effect.
func (t *Tunnel) Start() error {
	if t.started {
		return nil
	}
	if err := t.Device.file.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("read from TUN device %s: %w", t.Device.name, err)
	}
	workers := []*worker{newWorker(newOutbound(t), t.Device.raw, &t.closing, "read from TUN device "+t.Device.name)}
	for _, s := range t.sockets {
		if s != nil {
			workers = append(workers, newWorker(newInbound(t, s), s.raw, &t.closing, "receive on UDP "+s.local.String()))
		}
	}
	connect(workers)
	t.started = true
	for _, w := range workers {
		t.running.Go(func() { t.end(w.run()) })
	}
	return nil
}

func index(ipv6 bool) int {
	if ipv6 {
		return 1
	}
	return 0
}

// end records err if it is the first error with which a direction has ended, and closes
// done. It ignores err while Close runs.
func (t *Tunnel) end(err error) {
	t.fail.Do(func() {
		if !t.closing.Load() {
			t.err = err
		}
		close(t.done)
	})
}

// Done returns a channel that is closed when a direction has failed, or when Close has
// ended the tunnel.
func (t *Tunnel) Done() <-chan struct{} { return t.done }

// Err returns the error of the direction that has failed, also after Close. It returns
// nil while the tunnel runs, and if only Close has ended it.
func (t *Tunnel) Err() error {
	select {
	case <-t.done:
		return t.err
	default:
		return nil
	}
}

// Close ends the tunnel and waits for its end. Unread packets stay in the device for
// the next tunnel. Close must be called exactly once, also after an error.
func (t *Tunnel) Close() error {
	t.closing.Store(true)
	err := t.Device.file.SetReadDeadline(time.Unix(1, 0))
	if errors.Is(err, os.ErrClosed) {
		err = nil
	}
	errs := []error{err, t.forEachSocket((*socket).close)}
	t.running.Wait()
	t.end(nil)
	return oneline.Join(append(errs, t.forEachSocket((*socket).release))...)
}

// forEachSocket calls f for every socket.
func (t *Tunnel) forEachSocket(f func(*socket) error) error {
	var errs []error
	for _, s := range t.sockets {
		if s != nil {
			errs = append(errs, f(s))
		}
	}
	return oneline.Join(errs...)
}

// inNetworks reports whether one of the networks contains a.
func (t *Tunnel) inNetworks(a netip.Addr) bool {
	return slices.ContainsFunc(t.Networks, func(n netip.Prefix) bool { return n.Contains(a) })
}

// countFault counts a packet with an unusable header.
func (t *Tunnel) countFault(f packet.Fault) {
	if f == packet.BadChecksum {
		t.Counters.drop(WrongChecksum)
		return
	}
	t.Counters.drop(Malformed)
}
