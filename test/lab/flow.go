// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Flow is a steady stream of small UDP packets from one pod to another. The receiver
// sends each packet back.
type Flow struct {
	near    *net.UDPConn
	far     *net.UDPConn
	stop    context.CancelFunc
	members sync.WaitGroup

	mu      sync.Mutex
	packets []packet  // all packets that were sent; the index is the sequence number
	last    time.Time // when the last packet came back, or when the flow began
	stopped time.Time // zero while the flow runs
	gap     time.Duration
	err     error // last error, as in FlowStats
}

type packet struct {
	sent     time.Time
	answered bool
}

// FlowStats counts the packets of a flow. Begin and End are zero if no packet is lost.
type FlowStats struct {
	Sent, Answered int
	Lost           []int         // sequence numbers, counted from 0
	Begin, End     time.Time     // when the first and the last lost packet were sent
	Gap            time.Duration // longest time without a packet that comes back
	Err            error         // last error of sending or returning a packet, or from an ICMP message
}

// StartFlow sends rate packets per second to the other pod until Flow.Stop. It sends the
// first one before it returns. The end of ctx does not end the flow.
func (p *Pod) StartFlow(ctx context.Context, to *Pod, f prefix.Family, rate int) (*Flow, error) {
	if rate < 1 {
		return nil, fmt.Errorf("start flow: %d packets per second", rate)
	}

	fl := &Flow{}
	var err error
	fl.far, err = inside(ctx, to.Namespace, func() (*net.UDPConn, error) {
		return net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(to.Addr(f), 0)))
	})
	if err != nil {
		return nil, fmt.Errorf("start flow at %s: %w", to.name, err)
	}

	near, err := p.Dial(ctx, "udp", fl.far.LocalAddr().String())
	if err != nil {
		fl.far.Close()
		return nil, fmt.Errorf("start flow: %w", err)
	}
	fl.near = near.(*net.UDPConn)

	for _, conn := range []*net.UDPConn{fl.near, fl.far} {
		if err := keepAll(conn); err != nil {
			fl.near.Close()
			fl.far.Close()
			return nil, fmt.Errorf("start flow: %w", err)
		}
	}

	sending, stop := context.WithCancel(context.WithoutCancel(ctx))
	fl.stop = stop
	fl.last = time.Now()

	fl.sendNext()
	fl.members.Go(func() { fl.send(sending, time.Second/time.Duration(rate)) })
	fl.members.Go(fl.reflect)
	fl.members.Go(fl.receive)
	return fl, nil
}

// keepAll gives a socket a receive buffer for the packets of some seconds. Otherwise the test itself
// would lose packets on a busy machine.
func keepAll(conn *net.UDPConn) error {
	const buffer = 16 << 20
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}

	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer)
	})
	if err != nil {
		return err
	}
	if failed != nil {
		return fmt.Errorf("set the receive buffer: %w", failed)
	}
	return nil
}

func (f *Flow) send(ctx context.Context, period time.Duration) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			f.sendNext()
		case <-ctx.Done():
			return
		}
	}
}

func (f *Flow) sendNext() {
	f.mu.Lock()
	seq := uint64(len(f.packets))
	f.packets = append(f.packets, packet{sent: time.Now()})
	f.mu.Unlock()

	// A packet that cannot be sent counts as lost, because it does not come back.
	if _, err := f.near.Write(binary.BigEndian.AppendUint64(nil, seq)); err != nil {
		f.fail(err)
	}
}

func (f *Flow) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *Flow) reflect() {
	buf := make([]byte, 64)
	for {
		n, from, err := f.far.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, err = f.far.WriteToUDPAddrPort(buf[:n], from) // a failed write counts as a lost packet
		}
		if err != nil {
			f.fail(err)
		}
	}
}

func (f *Flow) receive() {
	buf := make([]byte, 64)
	for {
		n, err := f.near.Read(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // an ICMP error about a lost packet
			f.fail(err)
		}
		if err != nil || n != 8 {
			continue
		}

		f.mu.Lock()
		if seq := binary.BigEndian.Uint64(buf); seq < uint64(len(f.packets)) {
			f.packets[seq].answered = true
			now := time.Now()
			f.gap = max(f.gap, now.Sub(f.last))
			f.last = now
		}
		f.mu.Unlock()
	}
}

// Stats returns the counts so far. A packet that has not come back yet counts as lost.
func (f *Flow) Stats() FlowStats {
	f.mu.Lock()
	defer f.mu.Unlock()

	now := time.Now()
	if !f.stopped.IsZero() { // after Stop, time does not count for the gap
		now = f.stopped
	}

	s := FlowStats{Sent: len(f.packets), Gap: max(f.gap, now.Sub(f.last)), Err: f.err}
	for seq, p := range f.packets {
		if p.answered {
			s.Answered++
			continue
		}

		if len(s.Lost) == 0 {
			s.Begin = p.sent
		}
		s.End = p.sent
		s.Lost = append(s.Lost, seq)
	}
	return s
}

// Stop ends the flow and returns its counts. Before that it waits up to three seconds for
// packets that have not come back, because on an emulated or busy machine they may take
// that long. A second call only returns the counts.
func (f *Flow) Stop() FlowStats {
	const grace, period = 3 * time.Second, 5 * time.Millisecond
	f.stop()

	f.mu.Lock()
	if f.stopped.IsZero() {
		f.stopped = time.Now()
	}
	end := f.stopped.Add(grace)
	f.mu.Unlock()

	for len(f.Stats().Lost) > 0 && time.Now().Before(end) {
		<-time.After(period)
	}
	s := f.Stats()
	f.near.Close()
	f.far.Close()
	f.members.Wait()
	return s
}
