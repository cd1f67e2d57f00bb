// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
)

const (
	// maxDatagrams is the maximum number of datagrams of one size in a send
	// (UDP_MAX_SEGMENTS in linux/udp.h of kernels before 6.9).
	maxDatagrams = 64
	maxPayload   = 65535 - 40 - 8 // maximum bytes of a send, for both families
	// Sizes of a socket's buffers in bytes. A busy host may read its receive buffer
	// milliseconds late. Until then each super-packet for which there is no room is lost as
	// a whole. A larger send buffer would only add delay.
	receiveBuffer, sendBuffer = 8 << 20, 4 << 20
)

// socket sends and receives packets, one in each datagram. It handles many datagrams at a
// time if the kernel supports that.
type socket struct {
	conn     *net.UDPConn
	raw      syscall.RawConn // of conn
	sender   *sender
	room     []unix.PollFd    // argument and result of pollRoom
	pollRoom func(fd uintptr) // asks the kernel whether conn has room
	probe    int              // a socket for asking the kernel about the routes of conn's datagrams
	local    netip.AddrPort
	overhead int  // bytes that a datagram adds to a packet
	segments bool // the kernel supports UDP_SEGMENT
}

// sockets are the sockets of a tunnel by family: IPv4, IPv6; nil if there is none.
type sockets [2]*socket

func index(ipv6 bool) int {
	if ipv6 {
		return 1
	}
	return 0
}

func (all sockets) forEach(f func(*socket) error) error {
	var errs []error
	for _, s := range all {
		if s != nil {
			errs = append(errs, f(s))
		}
	}
	return oneline.Join(errs...)
}

func openSocket(ctx context.Context, local netip.AddrPort) (*socket, error) {
	s := &socket{local: local, overhead: Overhead(local.Addr().Is6())}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = s.prepare(int(fd)) })
		return oneline.Join(cerr, err)
	}}

	f := s.family()
	conn, err := lc.ListenPacket(ctx, f.network, local.String())
	if err != nil {
		return nil, fmt.Errorf("listen on UDP %s: %w", local, err)
	}
	s.conn = conn.(*net.UDPConn)
	if s.raw, err = s.conn.SyscallConn(); err != nil {
		return nil, oneline.Join(err, conn.Close())
	}
	s.sender = newSender(s.raw)
	s.room = make([]unix.PollFd, 1)
	s.pollRoom = func(fd uintptr) {
		s.room[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLOUT}
		_, _ = unix.Poll(s.room, 0)
	}

	s.probe, err = unix.Socket(f.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, oneline.Join(fmt.Errorf("open socket: %w", err), conn.Close())
	}

	// Routes may depend on the source address.
	if err := unix.Bind(s.probe, sockaddr(netip.AddrPortFrom(local.Addr(), 0))); err != nil {
		return nil, oneline.Join(fmt.Errorf("bind socket to %s: %w", local.Addr(), err), s.close(), s.release())
	}
	return s, nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is6() {
		return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

// Overhead returns the number of bytes that a datagram adds to the packet in it.
func Overhead(ipv6 bool) int {
	return map[bool]int{false: 20 + 8, true: 40 + 8}[ipv6]
}

type family struct {
	network      string
	domain       int
	level, mtu   int    // level of options, and the option that returns the MTU of a route
	dontFragment [2]int // option that forbids fragmentation, and its value
}

func (s *socket) family() family {
	if s.local.Addr().Is6() {
		// Unlike IPV6_MTU_DISCOVER, this option can have another value for a single
		// datagram.
		return family{"udp6", unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_MTU, [2]int{unix.IPV6_DONTFRAG, 1}}
	}
	return family{"udp4", unix.AF_INET, unix.IPPROTO_IP, unix.IP_MTU, [2]int{unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO}}
}

// prepare sets the options of the socket, as far as the kernel supports them.
func (s *socket) prepare(fd int) error {
	for _, o := range []struct{ force, ask, size int }{
		{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, receiveBuffer}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, sendBuffer},
	} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.force, o.size) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.ask, o.size)
		}
	}
	_, err := unix.GetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT) // Linux 4.18
	s.segments = err == nil
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1) // Linux 5.0

	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RXQ_OVFL, 1) // report drops

	// So that a send of a packet that is too large returns an error.
	f := s.family()
	if err := unix.SetsockoptInt(fd, f.level, f.dontFragment[0], f.dontFragment[1]); err != nil {
		return fmt.Errorf("forbid fragmentation: %w", err)
	}
	return nil
}

// hasRoom reports whether half of the send buffer is free, which is sufficient for several sends. Only
// one goroutine at a time may call it.
func (s *socket) hasRoom() bool {
	s.room[0].Revents = 0
	_ = s.raw.Control(s.pollRoom)
	return s.room[0].Revents&unix.POLLOUT != 0
}

// mtuTo returns the size in bytes of the largest packet whose datagram fits the path to a peer, as far
// as the kernel knows.
func (s *socket) mtuTo(to netip.AddrPort) (int, error) {
	if err := unix.Connect(s.probe, sockaddr(to)); err != nil {
		return 0, err
	}
	f := s.family()
	mtu, err := unix.GetsockoptInt(s.probe, f.level, f.mtu)
	return mtu - s.overhead, err
}

// nextLowerMTU returns the next smaller size of packets on a common kind of link, or 0. It is for a path
// whose MTU the kernel does not know: a suitable size is found in few steps.
func (s *socket) nextLowerMTU(size int) int {
	// RFC 1191, 7.1, and the minimum of IPv6.
	for _, mtu := range [...]int{32000, 17914, 8166, 4352, 2002, 1492, 1280, 1006, 508, 296, 68} {
		if packet := mtu - s.overhead; packet < size {
			return packet
		}
	}
	return 0
}

// close ends sending and receiving, including calls in progress. release must follow when
// no goroutine uses the socket any more.
func (s *socket) close() error { return s.conn.Close() }

func (s *socket) release() error { return unix.Close(s.probe) }

// newControl returns a control message whose data are size zero bytes.
func newControl(level, typ int32, size int) []byte {
	b := make([]byte, unix.CmsgSpace(size))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level = level
	h.Type = typ
	h.SetLen(unix.CmsgLen(size))
	return b
}

// mayFragment is the control message that allows the fragmentation of an IPv6 datagram.
var mayFragment = newControl(unix.IPPROTO_IPV6, unix.IPV6_DONTFRAG, 4)

// segmentSize is the control message that makes the kernel split a send into datagrams.
type segmentSize []byte

func newSegmentSize() segmentSize { return newControl(unix.IPPROTO_UDP, unix.UDP_SEGMENT, 2) }

func (c segmentSize) set(n int) { binary.NativeEndian.PutUint16(c[unix.CmsgLen(0):], uint16(n)) }

// receiver receives without allocating memory.
type receiver struct {
	header unix.Msghdr
	part   unix.Iovec
	from   unix.RawSockaddrInet6 // for IPv4 a RawSockaddrInet4 is in its place, which is shorter
	oob    []byte
	lost   uint32 // number of drops so far because the socket had no room; combined datagrams count once
}

func newReceiver() *receiver {
	r := &receiver{oob: make([]byte, 2*unix.CmsgSpace(4))}
	r.header.Name = (*byte)(unsafe.Pointer(&r.from))
	r.header.Iov = &r.part
	r.header.Control = &r.oob[0]
	r.header.SetIovlen(1)
	return r
}

// receive receives n bytes into b: datagrams of size bytes, of which the last may be shorter. If size is
// 0, they are one datagram. If nothing has arrived, the error is EAGAIN.
func (r *receiver) receive(fd uintptr, b []byte) (n, size int, from netip.AddrPort, err error) {
	r.part.Base = &b[0]
	r.part.SetLen(len(b))
	r.header.Namelen = unix.SizeofSockaddrInet6
	r.header.SetControllen(len(r.oob))
	got, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&r.header)), 0)
	if errno != 0 {
		return 0, 0, netip.AddrPort{}, errno
	}

	addr := netip.AddrFrom16(r.from.Addr)
	if r.from.Family == unix.AF_INET {
		addr = netip.AddrFrom4((*unix.RawSockaddrInet4)(unsafe.Pointer(&r.from)).Addr)
	}
	port := (*[2]byte)(unsafe.Pointer(&r.from.Port)) // both families have it in the same place
	return int(got), r.parseControl(r.oob[:r.header.Controllen]), netip.AddrPortFrom(addr, binary.BigEndian.Uint16(port[:])), nil
}

// sender sends without allocating memory. Only one goroutine at a time may use it.
type sender struct {
	*fdWriter
	header unix.Msghdr
	part   unix.Iovec
	to     unix.RawSockaddrInet6 // for IPv4 a RawSockaddrInet4 is in its place, which is shorter
}

func newSender(conn syscall.RawConn) *sender {
	s := &sender{}
	s.header.Name = (*byte)(unsafe.Pointer(&s.to))
	s.header.Iov = &s.part
	s.header.SetIovlen(1)
	s.fdWriter = newFDWriter(conn, func(fd uintptr) unix.Errno {
		_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&s.header)), 0)
		return errno
	})
	return s
}

func (s *sender) send(b, control []byte, to netip.AddrPort) error {
	s.part.Base = unsafe.SliceData(b)
	s.part.SetLen(len(b))
	s.header.Control = unsafe.SliceData(control)
	s.header.SetControllen(len(control))

	var port *uint16
	if to.Addr().Is6() {
		s.to = unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: to.Addr().As16()}
		s.header.Namelen = unix.SizeofSockaddrInet6
		port = &s.to.Port
	} else {
		v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(&s.to))
		*v4 = unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: to.Addr().As4()}
		s.header.Namelen = unix.SizeofSockaddrInet4
		port = &v4.Port
	}
	binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(port))[:], to.Port())
	return s.write()
}

// parseControl returns the size of the datagrams that the kernel has combined, or 0, and sets lost.
func (r *receiver) parseControl(oob []byte) (size int) {
	for len(oob) >= unix.CmsgLen(0) {
		h, data, rest, err := unix.ParseOneSocketControlMessage(oob)
		if err != nil {
			break
		}
		if len(data) >= 4 {
			v := binary.NativeEndian.Uint32(data)
			switch {
			case h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO:
				size = int(v)
			case h.Level == unix.SOL_SOCKET && h.Type == unix.SO_RXQ_OVFL:
				r.lost = v
			}
		}
		oob = rest
	}
	return size
}
