package tunnel

import (
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"flanneld/pkg/tunnel/packet"
)

// outbound takes packets from the device to peers. One goroutine at a time has it.
type outbound struct {
	*Tunnel
	in     []byte // what was read
	spare  []byte // for answers and fragments
	device *deviceWriter
	batch  batch
	// single are peers that lately took only one datagram at a time, and until when
	// that is believed.
	single map[netip.Addr]time.Time
	told   bool // that there is one

	// The last destination, as most packets go to the same as the one before.
	routes *routes
	dst    netip.Addr
	public netip.Addr
	known  bool
}

// batch is a send in the making: packets to one peer, one behind the other,
// all of one size but the last, which may be shorter.
type batch struct {
	buf     []byte
	n       int // bytes
	size    int // of the first packet
	count   int
	full    bool // nothing may follow
	to      netip.AddrPort
	socket  *socket
	control segmentSize
}

const maxPacket = 65535 // bytes of an IP packet without jumbogram option

func newOutbound(t *Tunnel) *outbound {
	return &outbound{
		Tunnel: t, in: make([]byte, packet.OffloadLen+maxPacket), spare: make([]byte, maxPacket),
		device: newDeviceWriter(t.Device), batch: batch{buf: make([]byte, maxPacket), control: newSegmentSize()}, single: map[netip.Addr]time.Time{},
	}
}

// read implements carrier.
func (o *outbound) read(fd uintptr) error {
	n, err := read(fd, o.in)
	if err == nil {
		o.take(o.in[:n])
	}
	return err
}

// ready implements carrier: what one read brings has room in each socket.
func (o *outbound) ready() bool {
	for _, s := range o.sockets {
		if s != nil && !s.hasRoom() {
			return false
		}
	}
	return true
}

// take handles what one read has brought.
func (o *outbound) take(b []byte) {
	if !o.add(b) {
		o.flush() // what is dropped holds up nothing
	}
}

// add reports whether it has added what one read has brought to the batch.
func (o *outbound) add(b []byte) bool {
	if len(b) < packet.OffloadLen {
		o.Counters.drop(Malformed)
		return false
	}
	offload := packet.DecodeOffload(b)
	b = b[packet.OffloadLen:]
	h, fault := packet.Parse(b)
	if fault != packet.Sound {
		o.faulty(fault)
		return false
	}
	b = b[:h.Total]
	s := o.sockets[index(h.IPv6)]
	switch {
	case s == nil:
		o.Counters.drop(OtherFamily)
		return false
	case !o.route(h.Dst):
		o.Counters.drop(NoRoute)
		o.complain(packet.Unreachable, b, h, 0)
		return false
	case !packet.Forwardable(h.Src): // with route_localnet the kernel forwards loopback sources
		o.Counters.drop(WrongSource)
		return false
	case !packet.DecrementTTL(b):
		o.Counters.drop(HopsExceeded)
		o.complain(packet.TimeExceeded, b, h, 0)
		return false
	}
	to := netip.AddrPortFrom(o.public, s.local.Port())
	if offload.Super() {
		segments, ok := offload.Split(b, h)
		if !ok {
			o.Counters.drop(Malformed)
			return false
		}
		o.addAll(s, to, segments)
		return true
	}
	if !offload.Complete(b) {
		o.Counters.drop(Malformed)
		return false
	}
	copy(o.room(s, to, len(b)), b)
	return true
}

// route looks up the peer that has dst.
func (o *outbound) route(dst netip.Addr) bool {
	if now := o.Table.now.Load(); now != o.routes || dst != o.dst {
		o.routes, o.dst = now, dst
		o.public, o.known = now.subnets.Lookup(dst)
	}
	return o.known
}

// addAll adds the packets of a super-packet.
func (o *outbound) addAll(s *socket, to netip.AddrPort, all packet.Segments) {
	for i := range all.Count() {
		all.Write(o.room(s, to, all.Len(i)), i)
	}
}

// room returns where to write a packet of n bytes to a peer. What cannot be in
// one send with it goes out before.
func (o *outbound) room(s *socket, to netip.AddrPort, n int) []byte {
	b := &o.batch
	if b.count > 0 && (b.full || b.to != to || n > b.size || b.n+n > maxPayload || b.count == maxDatagrams) {
		o.flush()
	}
	if b.count == 0 {
		b.size, b.to, b.socket = n, to, s
	}
	start := b.n
	b.n += n
	b.count++
	b.full = n < b.size
	return b.buf[start:b.n]
}

// flush implements carrier: it sends what there is.
func (o *outbound) flush() {
	b := &o.batch
	if b.count == 0 {
		return
	}
	if err := o.send(); err == nil {
		o.Counters.sent.Add(uint64(b.count))
	} else {
		o.sendEach(err)
	}
	b.n, b.count, b.full = 0, 0, false
}

// believed is how long a peer gets datagrams one by one before it is tried again.
const believed = 10 * time.Second

// errNoSegments means that the kernel takes only one datagram at a time.
var errNoSegments = errors.New("no segmentation")

func (o *outbound) send() error {
	b := &o.batch
	var control []byte
	if b.count > 1 {
		if !b.socket.segments || o.isSingle(b.to.Addr()) {
			return errNoSegments
		}
		b.control.set(b.size)
		control = b.control
	}
	return b.socket.sender.send(b.buf[:b.n], control, b.to)
}

func (o *outbound) isSingle(public netip.Addr) bool {
	until, ok := o.single[public]
	if !ok {
		return false
	}
	if time.Now().Before(until) {
		return true
	}
	delete(o.single, public)
	return false
}

// sendEach sends packet by packet what could not be sent at once, because of
// err.
func (o *outbound) sendEach(err error) {
	b := &o.batch
	if errors.Is(err, unix.EIO) { // IPsec, or a device that computes no checksums: on the way to this peer
		o.single[b.to.Addr()] = time.Now().Add(believed)
		if !o.told {
			o.told = true
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
	if b.to.Addr().Is6() && len(p) <= packet.MinMTU6 { // who sends that cannot be told to send less: RFC 2473, 7.1
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

// tooBig deals with a packet that the way to its peer does not carry, as a
// router would.
func (o *outbound) tooBig(p []byte) {
	b := &o.batch
	h, _ := packet.Parse(p)
	mtu, err := b.socket.mtuTo(b.to)
	if err != nil {
		o.Counters.drop(SendFailed)
		return
	}
	if mtu >= len(p) { // a rule by port, which the question does not have, as "ip rule add sport"
		mtu = b.socket.below(len(p))
	}
	done, err := o.sendFragments(p, h, mtu)
	for done && errors.Is(err, unix.EMSGSIZE) {
		if mtu = b.socket.below(mtu); mtu == 0 {
			break // nothing passes
		}
		done, err = o.sendFragments(p, h, mtu)
	}
	switch {
	case !done:
		o.Counters.drop(TooBig)
		o.complain(packet.TooBig, p, h, mtu)
	case err == nil:
		o.Counters.sent.Add(1)
	default:
		o.Counters.drop(SendFailed)
	}
}

// sendFragments sends p in fragments of at most mtu bytes. It reports false if that
// cannot be.
func (o *outbound) sendFragments(p []byte, h packet.Header, mtu int) (done bool, err error) {
	b := &o.batch
	done = packet.Fragment(o.spare, p, h, mtu, func(f []byte) {
		if err == nil {
			err = b.socket.sender.send(f, nil, b.to)
		}
	})
	return done, err
}

// complain tells the sender of p, which came from the device, what becomes of
// it, but not more often than routers do. Who sends where nobody is keeps nobody else
// from being told what size fits.
func (o *outbound) complain(c packet.Complaint, p []byte, h packet.Header, mtu int) {
	limit := o.replies
	if c == packet.TooBig {
		limit = o.sizes
	}
	for _, own := range o.Own {
		if own.Is6() != h.IPv6 || !limit.Allow() {
			continue
		}
		reply := c.Complain(o.spare[packet.OffloadLen:], p, h, own, mtu)
		if reply == nil {
			return
		}
		clear(o.spare[:packet.OffloadLen])
		_ = o.device.packet(o.spare[:packet.OffloadLen+len(reply)])
	}
}
