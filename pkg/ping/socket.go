// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// Socket sends echo requests of one family on chosen paths, and receives all answers. It is
// for callers that wait for the answers of many hosts at a time. One goroutine may call Send
// while another one calls Receive.
type Socket struct {
	kind    icmpKind
	receive *net.IPConn
	senders map[sender]*net.IPConn
}

// sender contains the properties of a Path for which Send needs a separate socket.
type sender struct {
	device string
	whole  bool
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
	// the route or an MTU that a router has reported.
	Whole bool
}

// sendTimeout limits how long Send waits for a device that sends no packets.
const sendTimeout = time.Second

// OpenSocket opens a socket for family f, which the caller must close.
func OpenSocket(ctx context.Context, f prefix.Family) (*Socket, error) {
	kind := kindOf(f)
	conn, err := Options{}.listen(ctx, kind)
	if err != nil {
		return nil, err
	}
	return &Socket{kind: kind, receive: conn.(*net.IPConn), senders: map[sender]*net.IPConn{}}, nil
}

// Send sends an echo request with the given id. It returns EMSGSIZE, wrapped, if the packet is too big.
func (s *Socket) Send(ctx context.Context, to netip.Addr, path Path, id uint32) error {
	key := sender{path.Device, path.Whole}
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
	_, _, err := conn.WriteMsgIP(s.kind.echo(id, size), source, &net.IPAddr{IP: to.AsSlice()})
	if err != nil && !errors.Is(err, unix.EMSGSIZE) { // open another socket next time, because the name may belong to another device now
		_ = conn.Close()
		delete(s.senders, key)
	}
	return err
}

// openSender opens a socket that is bound to a device. Over IPv6 a device that is chosen for a
// single packet is not sufficient, because the kernel prefers the best route. The bound socket would
// not get answers that arrive on other devices, so it only sends.
func (s *Socket) openSender(ctx context.Context, of sender) (*net.IPConn, error) {
	lc := &net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) {
			if err = s.kind.filter(int(fd)); err == nil && of.device != "" { // the filter admits no message types
				err = unix.BindToDevice(int(fd), of.device)
			}
			if err == nil && of.whole {
				err = s.kind.discoverMode(int(fd), unix.IP_PMTUDISC_PROBE)
			}
		})
		return oneline.Join(cerr, err)
	}}
	conn, err := lc.ListenPacket(ctx, s.kind.network, s.kind.any)
	if err != nil {
		return nil, err
	}
	return conn.(*net.IPConn), nil
}

// Answer is the answer to an echo request.
type Answer struct {
	ID   uint32     // of the request
	From netip.Addr // host that has replied, or router that has reported the error
	Err  error      // ErrTooBig or ErrUnreachable, wrapped, if a router has reported that; nil for a reply
}

// Receive waits for an answer. It returns an error after Close.
func (s *Socket) Receive() (Answer, error) {
	buf := make([]byte, leastBuffer) // the beginning of a longer answer is sufficient
	for {
		size, addr, err := s.receive.ReadFromIP(buf)
		if err != nil {
			return Answer{}, err
		}
		id, ok, failure := s.kind.parse(buf[:size])
		if from, valid := netip.AddrFromSlice(addr.IP); ok && valid {
			return Answer{id, from.Unmap(), failure}, nil
		}
	}
}

// Close closes the socket. Receive then returns an error.
func (s *Socket) Close() error {
	errs := []error{s.receive.Close()}
	for _, sender := range s.senders {
		errs = append(errs, sender.Close())
	}
	return oneline.Join(errs...)
}
