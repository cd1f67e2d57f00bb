// Package tunnel carries IP packets between a TUN device and peers, one packet
// in each UDP datagram and nothing else in it, as flannel's udp backend does.
// Where the kernel has the offloads, packets cross its border by the dozen: as
// super-packets on the side of the device, and as sends and receives of many
// datagrams on the side of the network. Nothing of that shows on the wire.
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

	"flanneld/pkg/oneline"
	"flanneld/pkg/tunnel/packet"
)

// SourceCheck says whose packets are taken from datagrams.
type SourceCheck string

// The source checks.
const (
	// CheckStrict takes packets from the public addresses of peers, with a
	// source in that peer's subnet.
	CheckStrict SourceCheck = "strict"
	// CheckNetwork also takes those with a source outside the networks: what
	// enters the network at a peer may keep its source.
	CheckNetwork SourceCheck = "network"
	// CheckOff takes everything from everybody.
	CheckOff SourceCheck = "off"
)

// Config is what a tunnel works with. All fields are required, unless zero
// means something.
type Config struct {
	// Device is read from and written to, and stays open when the tunnel ends.
	// Only one tunnel at a time may have it.
	Device *Device
	// Local are the addresses to send from and listen on, at most one for each
	// address family. Peers listen on the same port.
	Local []netip.AddrPort
	// Own are this host's addresses in the network, one for each family.
	Own []netip.Addr
	// Networks are the prefixes in which all peers' subnets lie.
	Networks []netip.Prefix
	Check    SourceCheck // empty means CheckNetwork
	Table    *Table
	Counters *Counters
	// Plain does without the offloads of sockets: for tests, and for kernels
	// and network cards that get them wrong.
	Plain bool
}

// Tunnel is an open tunnel.
type Tunnel struct {
	Config
	sockets [2]*socket    // by family: IPv4, IPv6; nil where there is none
	replies *rate.Limiter // of other messages about what cannot be carried
	sizes   *rate.Limiter // of messages that say what size fits, which connections wait for
	log     klog.Logger
	closing atomic.Bool
	running sync.WaitGroup
	done    chan struct{}
	fail    sync.Once
	err     error // set before done is closed
}

// ICMP messages about what cannot be carried are limited, as routers do.
const (
	replyRate  = 1000 // a second
	replyBurst = 100
)

func newLimiter() *rate.Limiter { return rate.NewLimiter(replyRate, replyBurst) }

// Open opens a tunnel, which carries nothing until Start. It must be called on
// a thread in the network namespace that is meant.
func Open(ctx context.Context, c Config) (*Tunnel, error) {
	t := &Tunnel{Config: c, replies: newLimiter(), sizes: newLimiter(), log: klog.FromContext(ctx), done: make(chan struct{})}
	for _, local := range c.Local {
		s, err := openSocket(ctx, local, c.Plain)
		if err != nil {
			return nil, oneline.Join(err, t.each((*socket).close), t.each((*socket).release))
		}
		t.sockets[index(local.Addr().Is6())] = s
	}
	return t, nil
}

// Start has the tunnel carry packets. It is called once at most.
func (t *Tunnel) Start() error {
	if err := t.Device.file.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("read from TUN device %s: %w", t.Device.name, err)
	}
	lanes := []*lane{newLane(newOutbound(t), t.Device.raw, &t.closing, "read from TUN device "+t.Device.name)}
	for _, s := range t.sockets {
		if s != nil {
			lanes = append(lanes, newLane(newInbound(t, s), s.raw, &t.closing, "receive on UDP "+s.local.String()))
		}
	}
	join(lanes)
	for _, l := range lanes {
		t.running.Go(func() { t.end(l.run()) })
	}
	return nil
}

func index(ipv6 bool) int {
	if ipv6 {
		return 1
	}
	return 0
}

// end notes why one of the directions has ended.
func (t *Tunnel) end(err error) {
	t.fail.Do(func() {
		if !t.closing.Load() {
			t.err = err
		}
		close(t.done)
	})
}

// Done is closed when the tunnel carries nothing any more, or not in both
// directions.
func (t *Tunnel) Done() <-chan struct{} { return t.done }

// Err returns why the tunnel has ended, nil if it was closed or goes on.
func (t *Tunnel) Err() error {
	select {
	case <-t.done:
		return t.err
	default:
		return nil
	}
}

// Close ends the tunnel and waits for that. What is on its way from the device
// stays there, for the next one.
func (t *Tunnel) Close() error {
	t.closing.Store(true)
	err := t.Device.file.SetReadDeadline(time.Unix(1, 0))
	if errors.Is(err, os.ErrClosed) {
		err = nil
	}
	errs := []error{err, t.each((*socket).close)}
	t.running.Wait()
	t.end(nil)
	return oneline.Join(append(errs, t.each((*socket).release))...)
}

// each calls f for every socket.
func (t *Tunnel) each(f func(*socket) error) error {
	var errs []error
	for _, s := range t.sockets {
		if s != nil {
			errs = append(errs, f(s))
		}
	}
	return oneline.Join(errs...)
}

// inNetworks reports whether a lies in one of the networks.
func (t *Tunnel) inNetworks(a netip.Addr) bool {
	return slices.ContainsFunc(t.Networks, func(n netip.Prefix) bool { return n.Contains(a) })
}

// faulty counts a packet that cannot be read.
func (t *Tunnel) faulty(f packet.Fault) {
	if f == packet.BadChecksum {
		t.Counters.drop(WrongChecksum)
		return
	}
	t.Counters.drop(Malformed)
}
