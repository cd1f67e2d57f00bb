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

	"flanneld/pkg/oneline"
)

const (
	// maxDatagrams is how many datagrams of one size a send may hold
	// (UDP_MAX_SEGMENTS of kernels before 6.9).
	maxDatagrams = 64
	maxPayload   = 65535 - 40 - 8 // bytes of a send, whatever the family
	// What a socket may hold, in bytes. A host whose CPUs are busy comes to what it has
	// received milliseconds later, and what has no room until then is lost, a super-packet
	// at a time; what waits to be sent only adds to delay.
	receiveBuffer, sendBuffer = 8 << 20, 4 << 20
)

// socket carries packets in datagrams, one in each, to and from peers. It
// sends and receives many at a time if the kernel can do that.
type socket struct {
	conn     *net.UDPConn
	raw      syscall.RawConn // of conn
	sender   *sender
	room     []unix.PollFd    // what was asked last about room in conn
	look     func(fd uintptr) // asks
	probe    int              // a socket that asks the kernel for the routes that conn's datagrams take
	local    netip.AddrPort
	overhead int  // bytes that a datagram adds to a packet
	segments bool // UDP_SEGMENT works
}

func openSocket(ctx context.Context, local netip.AddrPort, plain bool) (*socket, error) {
	s := &socket{local: local, overhead: Overhead(local.Addr().Is6())}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		cerr := c.Control(func(fd uintptr) { err = s.prepare(int(fd), plain) })
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
	s.sender, s.room = newSender(s.raw), make([]unix.PollFd, 1)
	s.look = func(fd uintptr) {
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

// Overhead returns how many bytes a datagram between addresses of a family
// adds to the packet in it.
func Overhead(ipv6 bool) int {
	if ipv6 {
		return 40 + 8
	}
	return 20 + 8
}

// family is what differs between the families in a socket.
type family struct {
	network    string
	domain     int
	level, mtu int    // of options, and the one that tells the MTU of a route
	whole      [2]int // the option that forbids fragmentation, and its value
}

func (s *socket) family() family {
	if s.local.Addr().Is6() {
		// Unlike IPV6_MTU_DISCOVER this one may be another for a single datagram.
		return family{"udp6", unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_MTU, [2]int{unix.IPV6_DONTFRAG, 1}}
	}
	return family{"udp4", unix.AF_INET, unix.IPPROTO_IP, unix.IP_MTU, [2]int{unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO}}
}

// prepare sets what makes the socket fast, as far as the kernel has it, and has no
// datagram fragmented on its way, unless asked to: who sends more than fits is told.
func (s *socket) prepare(fd int, plain bool) error {
	for _, o := range []struct{ force, ask, size int }{
		{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, receiveBuffer}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, sendBuffer},
	} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.force, o.size) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, o.ask, o.size)
		}
	}
	if !plain {
		_, err := unix.GetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT) // Linux 4.18
		s.segments = err == nil
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1) // Linux 5.0
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RXQ_OVFL, 1)
	f := s.family()
	if err := unix.SetsockoptInt(fd, f.level, f.whole[0], f.whole[1]); err != nil {
		return fmt.Errorf("forbid fragmentation: %w", err)
	}
	return nil
}

// hasRoom reports whether half of what may wait in the socket to be sent, or more, is
// free: that is enough for several sends. Whoever sends may ask.
func (s *socket) hasRoom() bool {
	s.room[0].Revents = 0
	_ = s.raw.Control(s.look)
	return s.room[0].Revents&unix.POLLOUT != 0
}

// mtuTo returns the biggest packet in bytes that the way to a peer carries, as
// far as the kernel knows.
func (s *socket) mtuTo(to netip.AddrPort) (int, error) {
	if err := unix.Connect(s.probe, sockaddr(to)); err != nil {
		return 0, err
	}
	f := s.family()
	mtu, err := unix.GetsockoptInt(s.probe, f.level, f.mtu)
	return mtu - s.overhead, err
}

// below returns the biggest packet in bytes, below size, that a link of a usual kind
// carries: for ways about which the kernel does not tell. Who goes down so comes to
// what fits in a few steps.
func (s *socket) below(size int) int {
	// RFC 1191, 7.1, and what is the least on IPv6.
	for _, mtu := range [...]int{32000, 17914, 8166, 4352, 2002, 1492, 1280, 1006, 508, 296, 68} {
		if packet := mtu - s.overhead; packet < size {
			return packet
		}
	}
	return 0
}

// close ends sending and receiving, even what goes on at the moment. release
// follows when nobody uses the socket any more.
func (s *socket) close() error { return s.conn.Close() }

func (s *socket) release() error { return unix.Close(s.probe) }

// newControl returns a control message with size bytes, which are zero.
func newControl(level, typ int32, size int) []byte {
	b := make([]byte, unix.CmsgSpace(size))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level, h.Type = level, typ
	h.SetLen(unix.CmsgLen(size))
	return b
}

// mayFragment is the control message that lets an IPv6 datagram be fragmented.
var mayFragment = newControl(unix.IPPROTO_IPV6, unix.IPV6_DONTFRAG, 4)

// segmentSize is the control message that has the kernel cut a send into
// datagrams.
type segmentSize []byte

func newSegmentSize() segmentSize { return newControl(unix.IPPROTO_UDP, unix.UDP_SEGMENT, 2) }

func (c segmentSize) set(n int) { binary.NativeEndian.PutUint16(c[unix.CmsgLen(0):], uint16(n)) }

// receiver receives without allocating anything.
type receiver struct {
	header unix.Msghdr
	part   unix.Iovec
	from   unix.RawSockaddrInet6 // or what is in its place for IPv4, which is shorter
	oob    []byte
	lost   uint32 // receives that the socket had no room for so far
}

func newReceiver() *receiver {
	r := &receiver{oob: make([]byte, 2*unix.CmsgSpace(4))}
	r.header.Name, r.header.Iov, r.header.Control = (*byte)(unsafe.Pointer(&r.from)), &r.part, &r.oob[0]
	r.header.SetIovlen(1)
	return r
}

// receive returns what one receive on fd brings to b: n bytes from an address and port,
// cut into datagrams of size bytes, or one datagram if that is 0.
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
	port := (*[2]byte)(unsafe.Pointer(&r.from.Port)) // both families have it at the same place
	return int(got), r.told(r.oob[:r.header.Controllen]), netip.AddrPortFrom(addr, binary.BigEndian.Uint16(port[:])), nil
}

// sender sends without allocating anything. One goroutine at a time has it.
type sender struct {
	*outlet
	header unix.Msghdr
	part   unix.Iovec
	to     unix.RawSockaddrInet6 // or what is in its place for IPv4, which is shorter
}

func newSender(conn syscall.RawConn) *sender {
	s := &sender{}
	s.header.Name, s.header.Iov = (*byte)(unsafe.Pointer(&s.to)), &s.part
	s.header.SetIovlen(1)
	s.outlet = newOutlet(conn, func(fd uintptr) unix.Errno {
		_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&s.header)), 0)
		return errno
	})
	return s
}

// send sends b, which control says more about, to a peer.
func (s *sender) send(b, control []byte, to netip.AddrPort) error {
	s.part.Base = unsafe.SliceData(b)
	s.part.SetLen(len(b))
	s.header.Control = unsafe.SliceData(control)
	s.header.SetControllen(len(control))
	var port *uint16
	if to.Addr().Is6() {
		s.to = unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: to.Addr().As16()}
		s.header.Namelen, port = unix.SizeofSockaddrInet6, &s.to.Port
	} else {
		v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(&s.to))
		*v4 = unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: to.Addr().As4()}
		s.header.Namelen, port = unix.SizeofSockaddrInet4, &v4.Port
	}
	binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(port))[:], to.Port())
	return s.write()
}

// told takes in what the kernel says of a receive. It returns the size of the datagrams
// that this gathered, 0 if it is one alone.
func (r *receiver) told(oob []byte) (size int) {
	for len(oob) >= unix.CmsgLen(0) {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&oob[0]))
		n := int(h.Len)
		if n < unix.CmsgLen(0) || n > len(oob) {
			break
		}
		if n >= unix.CmsgLen(4) {
			v := binary.NativeEndian.Uint32(oob[unix.CmsgLen(0):])
			switch {
			case h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO:
				size = int(v)
			case h.Level == unix.SOL_SOCKET && h.Type == unix.SO_RXQ_OVFL:
				r.lost = v
			}
		}
		oob = oob[min(len(oob), unix.CmsgSpace(n-unix.CmsgLen(0))):]
	}
	return size
}
