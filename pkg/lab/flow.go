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

	"flanneld/pkg/prefix"
)

// Flow is a steady stream of small UDP packets from one pod to another, which
// sends each one back.
type Flow struct {
	near    net.Conn
	far     *net.UDPConn
	stop    context.CancelFunc
	members sync.WaitGroup

	mu       sync.Mutex
	answered []bool    // of what was sent, by sequence number
	last     time.Time // of the last answer
	stopped  time.Time // zero while it goes on
	gap      time.Duration
}

// FlowStats says what became of a flow's packets.
type FlowStats struct {
	Sent, Answered int
	Lost           []int         // sequence numbers, counted from 0
	Gap            time.Duration // the longest time without an answer
}

// StartFlow sends rate packets per second to the other pod until the flow is
// stopped.
func (p *Pod) StartFlow(ctx context.Context, to *Pod, f prefix.Family, rate int) (*Flow, error) {
	if rate < 1 {
		return nil, fmt.Errorf("start flow: %d packets per second", rate)
	}
	fl := &Flow{}
	err := to.Do(ctx, func() (err error) {
		fl.far, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(to.Addr(f), 0)))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("start flow at %s: %w", to.name, err)
	}
	if fl.near, err = p.Dial(ctx, "udp", fl.far.LocalAddr().String()); err != nil {
		fl.far.Close()
		return nil, fmt.Errorf("start flow: %w", err)
	}
	sending, stop := context.WithCancel(context.WithoutCancel(ctx))
	fl.stop, fl.last = stop, time.Now()
	fl.members.Go(func() { fl.send(sending, time.Second/time.Duration(rate)) })
	fl.members.Go(fl.reflect)
	fl.members.Go(fl.receive)
	return fl, nil
}

func (f *Flow) send(ctx context.Context, period time.Duration) {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for seq := uint64(0); ; seq++ {
		f.mu.Lock()
		f.answered = append(f.answered, false)
		f.mu.Unlock()
		// What cannot be sent is lost, and counted by the missing answer.
		_, _ = f.near.Write(binary.BigEndian.AppendUint64(nil, seq))
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (f *Flow) reflect() {
	buf := make([]byte, 64)
	for {
		n, from, err := f.far.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = f.far.WriteToUDPAddrPort(buf[:n], from) // else lost, as above
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
		if err != nil || n != 8 { // an ICMP error of a lost packet
			continue
		}
		f.mu.Lock()
		if seq := binary.BigEndian.Uint64(buf); seq < uint64(len(f.answered)) {
			f.answered[seq] = true
			now := time.Now()
			f.gap, f.last = max(f.gap, now.Sub(f.last)), now
		}
		f.mu.Unlock()
	}
}

// Stats says how the flow does so far. Packets on their way count as lost.
func (f *Flow) Stats() FlowStats {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if !f.stopped.IsZero() { // nobody asked since
		now = f.stopped
	}
	s := FlowStats{Sent: len(f.answered), Gap: max(f.gap, now.Sub(f.last))}
	for seq, ok := range f.answered {
		if ok {
			s.Answered++
		} else {
			s.Lost = append(s.Lost, seq)
		}
	}
	return s
}

// Stop ends the flow, gives the last packets three seconds to come back, as they
// may need on a machine that is emulated and busy, and returns what became of all.
func (f *Flow) Stop() FlowStats {
	const grace, period = 3 * time.Second, 5 * time.Millisecond
	f.stop()
	f.mu.Lock()
	f.stopped = time.Now()
	f.mu.Unlock()
	patience := time.NewTimer(grace)
	defer patience.Stop()
	tick := time.NewTicker(period)
	defer tick.Stop()
	for waiting := true; waiting; {
		select {
		case <-tick.C:
			waiting = len(f.Stats().Lost) > 0
		case <-patience.C:
			waiting = false
		}
	}
	s := f.Stats()
	f.near.Close()
	f.far.Close()
	f.members.Wait()
	return s
}
