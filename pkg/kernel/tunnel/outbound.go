// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/pkg/kernel/tunnel/internal/packet"
)

// outbound moves packets from the device to peers. Only one goroutine at a time may use
// it.
type outbound struct {
	Config
	sockets sockets
	log     klog.Logger
	in      []byte // result of the last read
	scratch []byte // buffer for ICMP errors and fragments
	device  *deviceWriter
	batch   batch

	errorLimit     *rate.Limiter // limit of ICMP errors, except those about sizes
	sizeErrorLimit *rate.Limiter // limit of ICMP errors about sizes, which connections wait for

	// single contains the peers to which the kernel has recently accepted only single
	// datagrams, and the time until which that is assumed.
	single       map[netip.Addr]time.Time
	singleLogged bool // the log has a line about such a peer

	// The last destination, because most packets have the same as the one before.
	routes *routes
	dst    netip.Addr
	public netip.Addr
	known  bool
}

// batch is a send under construction: packets to one peer, one after the other. All have
// the same size, except that the last one may be shorter.
type batch struct {
	buf     []byte
	n       int // bytes of the packets in buf
	size    int // size of the first packet in bytes
	to      netip.AddrPort
	socket  *socket
	control segmentSize
}

func (b *batch) count() int { return (b.n + b.size - 1) / b.size }

// The rate of ICMP errors is limited, as in routers.
const (
	icmpErrorRate  = 1000 // per second
	icmpErrorBurst = 100
)

func newLimiter() *rate.Limiter { return rate.NewLimiter(icmpErrorRate, icmpErrorBurst) }

func newOutbound(c Config, s sockets, log klog.Logger) *outbound {
	return &outbound{
		Config: c, sockets: s, log: log, in: make([]byte, packet.OffloadLen+maxPacket), scratch: make([]byte, maxPacket),
		device: newDeviceWriter(c.Device), batch: batch{buf: make([]byte, maxPacket), control: newSegmentSize()}, single: map[netip.Addr]time.Time{},
		errorLimit: newLimiter(), sizeErrorLimit: newLimiter(),
	}
}

// read implements direction.
func (o *outbound) read(fd uintptr) error {
	n, err := read(fd, o.in)
	if err == nil {
		o.take(o.in[:n])
	}
	return err
}

// ready implements direction.
func (o *outbound) ready() bool {
	for _, s := range o.sockets {
		if s != nil && !s.hasRoom() {
			return false
		}
	}
	return true
}

func (o *outbound) take(b []byte) {
	if !o.add(b) {
		o.flush() // a dropped packet must not delay the batch
	}
}

// add adds the packets of one read to the batch, or drops them and reports false.
func (o *outbound) add(b []byte) bool {
	if len(b) < packet.OffloadLen {
		return o.Counters.drop(Malformed)
	}

	offload := packet.DecodeOffload(b)
	b = b[packet.OffloadLen:]
	h, ok := packet.Parse(b)
	if !ok {
		return o.Counters.drop(Malformed)
	}

	b = b[:h.Total]
	s := o.sockets[index(h.IPv6)]
	switch {
	case s == nil:
		return o.Counters.drop(OtherFamily)

	case !o.route(h.Dst):
		return o.refuse(NoRoute, packet.Unreachable, b, h, 0)
	case !packet.Forwardable(h.Src): // with route_localnet the kernel forwards loopback sources
		return o.Counters.drop(WrongSource)
	case !packet.DecrementTTL(b):
		return o.refuse(HopsExceeded, packet.TimeExceeded, b, h, 0)
	}

	to := netip.AddrPortFrom(o.public, s.local.Port())
	if offload.Super() {
		segments, ok := offload.Split(b, h)
		if !ok {
			return o.Counters.drop(Malformed)
		}
		for i := range segments.Count() {
			segments.Write(o.room(s, to, segments.Len(i)), i)
		}
		return true
	}
	if !offload.Complete(b) {
		return o.Counters.drop(Malformed)
	}
	copy(o.room(s, to, len(b)), b)
	return true
}

// route sets public to the address of the peer whose subnet contains dst.
func (o *outbound) route(dst netip.Addr) bool {
	if now := o.Table.current.Load(); now != o.routes || dst != o.dst {
		o.routes = now
		o.dst = dst
		o.public, o.known = now.subnets.Lookup(dst)
	}
	return o.known
}

// room appends a packet of n bytes to the batch, which the caller must write to the result. If the batch
// is for another peer or cannot take the packet, it is sent first.
func (o *outbound) room(s *socket, to netip.AddrPort, n int) []byte {
	b := &o.batch
	// A packet that is shorter than the first one must be the last one.
	if b.n > 0 && (b.n%b.size != 0 || b.to != to || n > b.size || b.n+n > maxPayload || b.count() == maxDatagrams) {
		o.flush()
	}
	if b.n == 0 {
		b.size = n
		b.to = to
		b.socket = s
	}

	start := b.n
	b.n += n
	return b.buf[start:b.n]
}

// flush implements direction. It sends the batch.
func (o *outbound) flush() {
	b := &o.batch
	if b.n == 0 {
		return
	}
	if err := o.send(); err == nil {
		o.Counters.sent.Add(uint64(b.count()))
	} else {
		o.sendEach(err)
	}
	b.n = 0
}

// singlePeriod is the time during which a peer gets single datagrams, before the tunnel
// tries several at a time again.
const singlePeriod = 10 * time.Second

// errNoSegments means that the kernel accepts only one datagram at a time, in general or for this peer.
var errNoSegments = errors.New("no segmentation")

func (o *outbound) send() error {
	b := &o.batch
	var control []byte
	if b.count() > 1 {
		if !b.socket.segments || o.isSingle(b.to.Addr()) {
			return errNoSegments
		}
		b.control.set(b.size)
		control = b.control
	}
	return b.socket.sender.send(b.buf[:b.n], control, b.to)
}

func (o *outbound) isSingle(public netip.Addr) bool {
	if time.Now().Before(o.single[public]) {
		return true
	}
	delete(o.single, public)
	return false
}

// sendEach sends the packets of the batch one by one, because together they have failed with err.
func (o *outbound) sendEach(err error) {
	b := &o.batch
	if errors.Is(err, unix.EIO) { // IPsec, or a device on the path that does not compute checksums
		o.single[b.to.Addr()] = time.Now().Add(singlePeriod)
		if !o.singleLogged {
			o.singleLogged = true
			o.log.Info("the way to a peer takes datagrams only one by one (IPsec, or a network card that computes no checksums)", "peer", b.to.Addr())
		}
	}
	for at := 0; at < b.n; at += b.size {
		o.sendOne(b.buf[at:min(at+b.size, b.n)])
	}
}

func (o *outbound) sendOne(p []byte) {
	b := &o.batch
	var control []byte
	if b.to.Addr().Is6() && len(p) <= packet.MinMTU6 { // no ICMP error can make a sender send less than this: RFC 2473, 7.1
		control = mayFragment
	}

	err := b.socket.sender.send(p, control, b.to)
	switch {
	case err == nil:
		o.Counters.sent.Add(1)
	case errors.Is(err, unix.EMSGSIZE):
		o.tooBig(p)
	default:
		o.Counters.drop(SendFailed)
	}
}

// tooBig does what a router does with a packet that is too large for the path: it fragments the packet
// or, if that is forbidden, drops it and returns an ICMP error to the sender.
func (o *outbound) tooBig(p []byte) {
	b := &o.batch
	h, _ := packet.Parse(p)
	mtu, err := b.socket.mtuTo(b.to)
	if err != nil {
		o.Counters.drop(SendFailed)
		return
	}
	if mtu >= len(p) { // a routing rule by port, such as "ip rule add sport", which mtuTo cannot see
		mtu = b.socket.nextLowerMTU(len(p))
	}

	done, err := o.sendFragments(p, h, mtu)
	for done && errors.Is(err, unix.EMSGSIZE) {
		if mtu = b.socket.nextLowerMTU(mtu); mtu == 0 {
			break // even the smallest size does not pass
		}
		done, err = o.sendFragments(p, h, mtu)
	}

	switch {
	case !done:
		o.refuse(TooBig, packet.TooBig, p, h, mtu)
	case err == nil:
		o.Counters.sent.Add(1)
	default:
		o.Counters.drop(SendFailed)
	}
}

// sendFragments returns false if p must not be fragmented or mtu is too small. It stops at the first
// fragment that cannot be sent.
func (o *outbound) sendFragments(p []byte, h packet.Header, mtu int) (done bool, err error) {
	b := &o.batch
	done = packet.Fragment(o.scratch, p, h, mtu, func(f []byte) {
		if err == nil {
			err = b.socket.sender.send(f, nil, b.to)
		}
	})
	return done, err
}

// refuse drops p, and then sends an ICMP error about it. The order matters: a program that receives the error
// and reads the counters must find the drop in them.
func (o *outbound) refuse(r Reason, e packet.ICMPError, p []byte, h packet.Header, mtu int) (passed bool) {
	passed = o.Counters.drop(r)
	o.sendICMPError(e, p, h, mtu)
	return passed
}

// sendICMPError writes an ICMP error about p to the device, from which p came.
func (o *outbound) sendICMPError(e packet.ICMPError, p []byte, h packet.Header, mtu int) {
	// A program that sends many packets to unused addresses must not suppress the errors that path MTU
	// discovery needs.
	limit := o.errorLimit
	if e == packet.TooBig {
		limit = o.sizeErrorLimit
	}

	for _, own := range o.Own {
		if own.Is6() != h.IPv6 || !limit.Allow() {
			continue
		}
		reply := e.Write(o.scratch[packet.OffloadLen:], p, h, own, mtu)
		if reply == nil { // there must be none about p
			return
		}
		clear(o.scratch[:packet.OffloadLen])
		_ = o.device.packet(o.scratch[:packet.OffloadLen+len(reply)])
	}
}
