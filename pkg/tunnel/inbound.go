package tunnel

import (
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"flanneld/pkg/tunnel/packet"
)

// inbound takes packets from the datagrams of one socket to the device. One
// goroutine at a time has it.
type inbound struct {
	*Tunnel
	socket *socket
	// buf has room for an offload header and then what was received: something to
	// be added to, and what may be added.
	buf      []byte
	receiver *receiver
	device   *deviceWriter
	merger   packet.Merger
	merged   bool // the merger has something
	failures int  // of receives, in a row

	anybody bool // may send anything
	foreign bool // sources are taken

	// The last sender and source: most packets have the same as the one before.
	routes  *routes
	from    netip.AddrPort
	refused bool       // nothing is taken from there
	reason  Reason     // why
	src     netip.Addr // invalid if no packet from there was looked at
	allowed bool       // src may come from there
}

func newInbound(t *Tunnel, s *socket) *inbound {
	return &inbound{
		Tunnel: t, socket: s, buf: make([]byte, packet.OffloadLen+2*maxPacket), receiver: newReceiver(), device: newDeviceWriter(t.Device),
		merger:  packet.Merger{TCP: t.Device.tcp, UDP: t.Device.udp},
		anybody: t.Check == CheckOff, foreign: t.Check != CheckStrict,
	}
}

// enough is how many receives may fail in a row before the socket is given up.
const enough = 100

// read implements carrier.
func (i *inbound) read(fd uintptr) error {
	at, before := i.next(), i.receiver.lost
	n, size, from, err := i.receiver.receive(fd, i.buf[at:at+maxPacket])
	switch {
	case err == nil:
		i.failures = 0
		if lost := i.receiver.lost - before; lost > 0 {
			i.Counters.dropped[SocketFull].Add(uint64(lost))
		}
		i.take(at, n, size, from)
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR), i.failures == enough:
		return err
	default: // what an earlier datagram brought about, most likely
		i.failures++
	}
	return nil
}

// ready implements carrier: the device never makes anybody wait.
func (*inbound) ready() bool { return true }

// next returns where in buf to receive: behind what the merger has if more may
// be added to that, as the rest of a super-packet that its sender had to cut.
func (i *inbound) next() int {
	if i.merged {
		if end, grows := i.merger.End(); grows && end+maxPacket <= len(i.buf) {
			return end
		}
		i.flush()
	}
	return packet.OffloadLen
}

// take handles what one receive has brought to buf: n bytes from at on, cut into
// datagrams of size bytes, or one datagram if that is 0.
func (i *inbound) take(at, n, size int, from netip.AddrPort) {
	if now := i.Table.now.Load(); now != i.routes || from != i.from {
		i.flush() // what was gathered is of one sender: whatever carries it on may come
		i.routes, i.from, i.src = now, from, netip.Addr{}
		i.reason, i.refused = i.refuses(from)
	}
	if size == 0 {
		size = max(n, 1)
	}
	end, taken := at+n, false
	for ; at+size < end; at += size {
		taken = i.datagram(at, at+size) || taken
	}
	if taken = i.datagram(at, end) || taken; !taken {
		i.flush() // what is dropped holds up nothing
	}
}

// refuses reports whether datagrams from there are dropped, and why. Peers send from the
// port that they listen on. A pod on a peer's host that sends from another port shares only
// the address, by masquerading.
func (i *inbound) refuses(from netip.AddrPort) (Reason, bool) {
	if i.anybody {
		return 0, false
	}
	if _, known := i.routes.publics.Lookup(from.Addr()); !known {
		return UnknownPeer, true
	}
	return WrongPort, from.Port() != i.socket.local.Port()
}

// datagram handles one datagram, which lies in buf from at to end. It reports whether
// that goes to the device.
func (i *inbound) datagram(at, end int) bool {
	if i.refused {
		i.Counters.drop(i.reason)
		return false
	}
	if i.merged && i.merger.Add(at, end) {
		return true
	}
	b := i.buf[at:end]
	h, fault := packet.Parse(b)
	if fault == packet.Sound {
		fault = packet.CheckHeader(b, h)
	}
	switch {
	case fault != packet.Sound:
		i.faulty(fault)
		return false
	case h.IPv6 != i.socket.local.Addr().Is6():
		i.Counters.drop(OtherFamily)
		return false
	case !i.mayCome(h.Src):
		i.Counters.drop(WrongSource)
		return false
	case !packet.Forwardable(h.Dst):
		i.Counters.drop(WrongDestination)
		return false
	case h.TTL <= 1:
		i.Counters.drop(HopsExceeded)
		return false
	}
	i.flush()
	i.merger.Begin(i.buf, at, at+h.Total, h)
	i.merged = true
	return true
}

// mayCome reports whether a packet from src may be in a datagram from the present sender.
func (i *inbound) mayCome(src netip.Addr) bool {
	if src != i.src {
		i.src, i.allowed = src, packet.Forwardable(src) && (i.anybody || i.belongs(src))
	}
	return i.allowed
}

// belongs reports whether the present sender may send packets from src. It may not use the
// address that datagrams arrive at: the device accepts packets from this host's own addresses.
func (i *inbound) belongs(src netip.Addr) bool {
	public, found := i.routes.subnets.Lookup(src)
	if found {
		return public == i.from.Addr()
	}
	return i.foreign && src != i.socket.local.Addr() && !i.inNetworks(src)
}

// flush implements carrier: it hands what was gathered to the device.
func (i *inbound) flush() {
	if !i.merged {
		return
	}
	i.merged = false
	b, count := i.merger.Finish()
	packet.DecrementTTL(b[packet.OffloadLen:])
	if err := i.device.packet(b); err != nil {
		i.Counters.dropped[DeviceFailed].Add(uint64(count))
		return
	}
	i.Counters.received.Add(uint64(count))
}
