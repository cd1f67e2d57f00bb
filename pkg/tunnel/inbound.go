package tunnel

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"flanneld/pkg/tunnel/packet"
)

// inbound takes packets from the datagrams of one socket to the device. One
// goroutine has it.
type inbound struct {
	*Tunnel
	socket *socket
	buf    []byte // room for an offload header, and then what was received
	oob    []byte
	merger packet.Merger
	merged bool // the merger has something

	anybody bool // may send anything
	foreign bool // sources are taken

	// The last source: most packets have the same as the one before.
	routes  *routes
	public  netip.Addr
	known   bool // public is a peer's
	src     netip.Addr
	allowed bool // src may come from there
}

func newInbound(t *Tunnel, s *socket) *inbound {
	return &inbound{
		Tunnel: t, socket: s, buf: make([]byte, packet.OffloadLen+maxPacket), oob: make([]byte, unix.CmsgSpace(4)),
		merger:  packet.Merger{TCP: t.Device.tcp, UDP: t.Device.udp},
		anybody: t.Check == CheckOff, foreign: t.Check != CheckStrict,
	}
}

// enough is how many receives may fail in a row before the socket is given up.
const enough = 100

// run receives until the tunnel is closed.
func (i *inbound) run() error {
	failed := 0
	for {
		n, noob, _, from, err := i.socket.conn.ReadMsgUDPAddrPort(i.buf[packet.OffloadLen:], i.oob)
		switch {
		case err == nil:
			failed = 0
			i.take(n, receivedSize(i.oob[:noob]), from.Addr())
		case errors.Is(err, net.ErrClosed) || failed == enough:
			return fmt.Errorf("receive on UDP %s: %w", i.socket.local, err)
		default: // what an earlier datagram brought about, most likely
			failed++
		}
	}
}

// take handles what one receive has brought: n bytes, cut into datagrams of
// size bytes, or one datagram if that is 0.
func (i *inbound) take(n, size int, from netip.Addr) {
	now := i.Table.now.Load()
	if now != i.routes || from != i.public {
		i.routes, i.public, i.src = now, from, netip.Addr{}
		_, i.known = now.publics.Lookup(from)
	}
	if size == 0 {
		size = max(n, 1)
	}
	at, end := packet.OffloadLen, packet.OffloadLen+n
	for ; at+size < end; at += size {
		i.datagram(at, at+size)
	}
	i.datagram(at, end)
	i.write()
}

// datagram handles one datagram, which lies in buf from at to end.
func (i *inbound) datagram(at, end int) {
	if !i.known && !i.anybody {
		i.Counters.drop(UnknownPeer)
		return
	}
	b := i.buf[at:end]
	h, fault := packet.Parse(b)
	if fault == packet.Sound {
		fault = packet.CheckHeader(b, h)
	}
	switch {
	case fault != packet.Sound:
		i.faulty(fault)
		return
	case h.IPv6 != i.socket.local.Addr().Is6():
		i.Counters.drop(OtherFamily)
		return
	case !i.mayCome(h.Src):
		i.Counters.drop(WrongSource)
		return
	case !packet.DecrementTTL(b):
		i.Counters.drop(HopsExceeded)
		return
	}
	end = at + h.Total
	if i.merged && i.merger.Add(at, end) {
		return
	}
	i.write()
	i.merger.Begin(i.buf, at, end, h)
	i.merged = true
}

// mayCome reports whether a packet from src may be in a datagram from the
// present sender.
func (i *inbound) mayCome(src netip.Addr) bool {
	if i.anybody {
		return true
	}
	if src != i.src {
		i.src = src
		public, found := i.routes.subnets.Lookup(src)
		i.allowed = found && public == i.public || !found && i.foreign && !i.inNetworks(src)
	}
	return i.allowed
}

// write hands what was gathered to the device.
func (i *inbound) write() {
	if !i.merged {
		return
	}
	i.merged = false
	b, count := i.merger.Finish()
	if _, err := i.Device.file.Write(b); err != nil {
		i.Counters.dropped[DeviceFailed].Add(uint64(count))
		return
	}
	i.Counters.received.Add(uint64(count))
}
