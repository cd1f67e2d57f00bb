// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// socket sends echo requests of one family on chosen paths, and receives all answers. It is safe for concurrent
// use, but only one goroutine may call receive.
type socket struct {
	kind  icmpKind
	conn  net.PacketConn // receives
	heard func(from netip.Addr, n Note)

	mu      sync.Mutex
	senders map[sender]*net.IPConn
}

// sender contains the properties of a Path for which send needs a separate socket.
type sender struct {
	device string
	mode   int // see discoverMode
	hops   int // see Path.Hops
}

// Path is the way of an echo request.
type Path struct {
	// Device is the device through which the request leaves. The kernel uses the route
	// through it, even if another route to the destination is better. If Device is empty,
	// the kernel uses the best route. The destination chooses the route of the answer.
	Device string
	From   netip.Addr // source address; an address of this host, on any device; if zero, the kernel chooses
	Size   int        // size of the IP packet with its headers, in bytes; a size that is too small counts as the smallest one
	// Whole forbids fragmentation. Then only the MTU of the device limits the size, and not the MTU of
	// the route or an MTU that a router has reported: a pod with CAP_NET_RAW can forge such a report.
	Whole bool
	// Split permits routers to fragment the packet. If neither is set, the kernel decides.
	Split bool
	Hops  int  // hop limit; 0 means the default
	Note  Note // sent along, unless the packet is too small for it
}

// mode returns how the kernel treats the size of packets.
func (p Path) mode() int {
	switch {
	case p.Whole:
		return unix.IP_PMTUDISC_PROBE
	case p.Split:
		return unix.IP_PMTUDISC_DONT
	}
	return unix.IP_PMTUDISC_WANT
}

// sendTimeout limits how long send waits for a device that sends no packets.
const sendTimeout = time.Second

// openSocket opens a socket for family f, which the caller must close. heard is Pinger.Heard.
func openSocket(ctx context.Context, f prefix.Family, heard func(netip.Addr, Note)) (*socket, error) {
	kind := kinds[f]
	conn, err := kind.open(ctx, func(fd int) error {
		// Without a filter each socket would also receive the requests of all peers.
		if heard == nil {
			return kind.filter(fd, kind.reply, kind.unreachable, kind.tooBig, kind.expired)
		}
		if err := kind.admitNotes(fd); err != nil {
			return err
		}
		return kind.filter(fd, kind.reply, kind.unreachable, kind.tooBig, kind.expired, kind.request)
	})
	if err != nil {
		return nil, err
	}
	return &socket{kind: kind, conn: conn, heard: heard, senders: map[sender]*net.IPConn{}}, nil
}

// open opens a socket with the options that set sets.
func (k icmpKind) open(ctx context.Context, set func(fd int) error) (net.PacketConn, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = set(int(fd)) })
		return oneline.Join(cerr, err)
	}}
	return lc.ListenPacket(ctx, k.network, k.any)
}

// send sends an echo request with the given id. It returns EMSGSIZE, wrapped, if the packet is too big.
func (s *socket) send(ctx context.Context, to netip.Addr, path Path, id uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := sender{path.Device, path.mode(), path.Hops}
	conn := s.senders[key]
	if conn == nil {
		var err error
		if conn, err = s.openSender(ctx, key); err != nil {
			return fmt.Errorf("bind to link %s: %w", path.Device, err)
		}
		s.senders[key] = conn
	}

	var source []byte
	switch {
	case !path.From.IsValid():
	case to.Is4():
		source = unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: path.From.As4()})
	default:
		source = unix.PktInfo6(&unix.Inet6Pktinfo{Addr: path.From.As16()})
	}

	size := max(path.Size-s.kind.header, icmpHeader)
	_ = conn.SetWriteDeadline(time.Now().Add(sendTimeout))
	_, _, err := conn.WriteMsgIP(s.kind.echo(id, size, path.Note), source, &net.IPAddr{IP: to.AsSlice()})
	if err != nil && !errors.Is(err, unix.EMSGSIZE) { // open another socket next time, because the name may belong to another device now
		_ = conn.Close()
		delete(s.senders, key)
	}
	return err
}

// openSender opens a socket that is bound to a device. Over IPv6 a device that is chosen for a
// single packet is not sufficient, because the kernel prefers the best route. The bound socket would
// not get answers that arrive on other devices, so it only sends.
func (s *socket) openSender(ctx context.Context, of sender) (*net.IPConn, error) {
	conn, err := s.kind.open(ctx, func(fd int) error {
		err := s.kind.filter(fd) // admits no message types
		if err == nil && of.device != "" {
			err = unix.BindToDevice(fd, of.device)
		}
		if err == nil && of.hops != 0 {
			err = s.kind.setHops(fd, of.hops)
		}
		if err != nil {
			return err
		}
		return s.kind.discoverMode(fd, of.mode)
	})
	if err != nil {
		return nil, err
	}
	return conn.(*net.IPConn), nil
}

// receive calls answer with each answer, until the socket is closed or fails: with the id of the request, the host that has
// answered, and the error of parse.
func (s *socket) receive(answer func(id uint32, from netip.Addr, err error)) {
	buf := make([]byte, leastBuffer) // the beginning of a longer answer is sufficient
	for {
		size, addr, err := s.conn.ReadFrom(buf)
		if err != nil {
			return
		}

		from, valid := netip.AddrFromSlice(addr.(*net.IPAddr).IP)
		if !valid {
			continue
		}
		from = from.Unmap()

		if id, ok, failure := s.kind.parse(buf[:size], from); ok {
			answer(id, from, failure)
			continue
		}
		if note, ok := s.kind.noteOf(buf[:size]); ok && s.heard != nil {
			s.heard(from, note)
		}
	}
}

// close closes the socket. receive then returns.
func (s *socket) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	errs := []error{s.conn.Close()}
	for _, sender := range s.senders {
		errs = append(errs, sender.Close())
	}
	return oneline.Join(errs...)
}
