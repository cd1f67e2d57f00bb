// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// Socket sends echo requests of one family on chosen paths, and receives all answers. It is
// for callers that wait for the answers of many hosts at a time. Its methods may be called
// concurrently.
type Socket struct {
	kind icmpKind
	conn *net.IPConn
}

// Path is the way of an echo request.
type Path struct {
	// Device is the device through which the request leaves. The kernel uses the route
	// through it, even if another route to the destination is better. The answer takes the
	// route that the destination has.
	Device string
	From   netip.Addr // source address; an address of this host, on any device
}

// OpenSocket opens a socket for family f.
func OpenSocket(ctx context.Context, f prefix.Family) (*Socket, error) {
	kind := kindOf(f)
	conn, err := Options{}.listen(ctx, kind)
	if err != nil {
		return nil, err
	}
	return &Socket{kind, conn.(*net.IPConn)}, nil
}

// Send sends an echo request with the given id.
func (s *Socket) Send(to netip.Addr, path Path, id uint32) error {
	device, err := net.InterfaceByName(path.Device)
	if err != nil {
		return fmt.Errorf("look up link %s: %w", path.Device, err)
	}
	var control []byte
	if to.Is4() {
		control = unix.PktInfo4(&unix.Inet4Pktinfo{Ifindex: int32(device.Index), Spec_dst: path.From.As4()})
	} else {
		control = unix.PktInfo6(&unix.Inet6Pktinfo{Ifindex: uint32(device.Index), Addr: path.From.As16()})
	}
	const size = 64 // of the ICMP message
	_, _, err = s.conn.WriteMsgIP(s.kind.echo(id, size), control, &net.IPAddr{IP: to.AsSlice()})
	return err
}

// Receive waits for an answer. It returns the id of the request and the address that has
// answered. It returns an error after Close.
func (s *Socket) Receive() (id uint32, from netip.Addr, err error) {
	buf := make([]byte, 1<<16)
	for {
		size, addr, err := s.conn.ReadFromIP(buf)
		if err != nil {
			return 0, netip.Addr{}, err
		}
		if size < icmpHeader || buf[0] != s.kind.reply {
			continue
		}
		from, ok := netip.AddrFromSlice(addr.IP)
		if ok {
			return binary.BigEndian.Uint32(buf[4:]), from.Unmap(), nil
		}
	}
}

// Close closes the socket.
func (s *Socket) Close() error { return s.conn.Close() }
