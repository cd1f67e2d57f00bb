// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/tunnel/internal/packet"
)

// inbound moves packets from the datagrams of one socket to the device. Only one
// goroutine at a time may use it.
type inbound struct {
	Config
	socket *socket
	// buf contains an offload header, the packets that the merger has gathered, and the
	// datagrams of the last receive.
	buf      []byte
	receiver *receiver
	device   *deviceWriter
	merger   packet.Merger
	merged   bool // the merger contains packets
	failures int  // number of receives that failed in a row

	// The last sender and source, because most packets have the same as the one before.
	routes  *routes
	from    netip.AddrPort
	refused bool       // packets from this sender are dropped
	reason  Reason     // why packets are dropped
	src     netip.Addr // invalid if no packet of this sender was checked
	allowed bool       // the sender may use src
}

func newInbound(c Config, s *socket) *inbound {
	return &inbound{
		Config: c, socket: s, buf: make([]byte, packet.OffloadLen+2*maxPacket), receiver: newReceiver(), device: newDeviceWriter(c.Device),
		merger: packet.Merger{TCP: c.Device.tcp, UDP: c.Device.udp},
	}
}

// maxFailures is the number of receives in a row that may fail before the tunnel ends.
const maxFailures = 100

// read implements direction.
func (i *inbound) read(fd uintptr) error {
	at := i.nextOffset()
	before := i.receiver.lost
	n, size, from, err := i.receiver.receive(fd, i.buf[at:at+maxPacket])
	switch {
	case err == nil:
		i.failures = 0
		if lost := i.receiver.lost - before; lost > 0 {
			i.Counters.dropped[SocketFull].Add(uint64(lost))
		}
		i.take(at, n, size, from)
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR), i.failures == maxFailures:
		return err
	default: // an earlier datagram has probably caused the error
		i.failures++
	}
	return nil
}

// ready implements direction. Writing to the device never waits.
func (*inbound) ready() bool { return true }

// nextOffset returns the offset in buf for the next receive: behind the gathered packets if the next
// datagrams may continue a super-packet that the sender had to split, and otherwise at the start.
func (i *inbound) nextOffset() int {
	if i.merged {
		if end, grows := i.merger.End(); grows && end+maxPacket <= len(i.buf) {
			return end
		}
		i.flush()
	}
	return packet.OffloadLen
}

// take handles the result of one receive: n bytes of buf from offset at on, see receiver.receive.
func (i *inbound) take(at, n, size int, from netip.AddrPort) {
	if now := i.Table.current.Load(); now != i.routes || from != i.from {
		i.flush() // datagram does not check packets that the merger adds, so they must be of one sender
		i.routes = now
		i.from = from
		i.src = netip.Addr{}
		i.reason, i.refused = i.refusal(from)
	}
	if size == 0 {
		size = max(n, 1)
	}

	end := at + n
	taken := false
	for ; at+size < end; at += size {
		taken = i.datagram(at, at+size) || taken
	}
	taken = i.datagram(at, end) || taken
	if !taken {
		i.flush() // a dropped packet must not delay the gathered ones
	}
}

// refusal reports whether to drop datagrams from an address and port, and why.
func (i *inbound) refusal(from netip.AddrPort) (Reason, bool) {
	if i.Check == CheckOff {
		return 0, false
	}
	if _, known := i.routes.publics[from.Addr()]; !known {
		return UnknownPeer, true
	}

	// Peers send from the port that they listen on. A pod on a peer's host has the same address because
	// of masquerading, but another port.
	return WrongPort, from.Port() != i.socket.local.Port()
}

// datagram gathers the packet that is in buf from offset at to end, or drops it and reports false.
func (i *inbound) datagram(at, end int) bool {
	if i.refused {
		return i.Counters.drop(i.reason)
	}
	if i.merged && i.merger.Add(at, end) {
		return true
	}

	b := i.buf[at:end]
	h, ok := packet.Parse(b)
	switch {
	case !ok:
		return i.Counters.drop(Malformed)
	case !packet.CheckHeader(b, h):
		return i.Counters.drop(WrongChecksum)
	case h.IPv6 != i.socket.local.Addr().Is6():
		return i.Counters.drop(OtherFamily)
	case !i.sourceAllowed(h.Src):
		return i.Counters.drop(WrongSource)
	case !packet.Forwardable(h.Dst):
		return i.Counters.drop(WrongDestination)
	case h.TTL <= 1:
		return i.Counters.drop(HopsExceeded)
	}

	i.flush()
	i.merger.Begin(i.buf, at, at+h.Total, h)
	i.merged = true
	return true
}

func (i *inbound) sourceAllowed(src netip.Addr) bool {
	if src != i.src {
		i.src = src
		i.allowed = packet.Forwardable(src) && (i.Check == CheckOff || i.belongsToSender(src))
	}
	return i.allowed
}

func (i *inbound) belongsToSender(src netip.Addr) bool {
	public, found := i.routes.subnets.Lookup(src)
	if found {
		return public == i.from.Addr()
	}

	// The device accepts packets with this host's own addresses, so a peer could impersonate the host
	// by the address on which it receives datagrams.
	return i.Check != CheckStrict && src != i.socket.local.Addr() &&
		!slices.ContainsFunc(i.Networks, func(n netip.Prefix) bool { return n.Contains(src) })
}

// flush implements direction. It writes the gathered packets to the device.
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
