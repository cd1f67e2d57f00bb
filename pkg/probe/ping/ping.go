// SPDX-License-Identifier: Apache-2.0

// Package ping sends ICMP echo requests of a given size, over IPv4 and IPv6. It needs
// CAP_NET_RAW.
package ping

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// ErrTooBig means that a packet with "don't fragment" set exceeds the MTU of the sender's
// link, or the MTU that a router reported.
var ErrTooBig = errors.New("packet too big")

// UnreachableError means that the host At reported the destination as unreachable, with that code of ICMP.
type UnreachableError struct {
	At   netip.Addr
	Code byte
}

// Error implements error.
func (e UnreachableError) Error() string { return fmt.Sprintf("unreachable: code %d", e.Code) }

// ExpiredError means that a host had to forward the packet, but its hop limit was used up.
type ExpiredError struct{ At netip.Addr }

// Error names the host.
func (e ExpiredError) Error() string { return "hop limit used up at " + e.At.String() }

// icmpKind contains the ICMP constants that differ between IPv4 and IPv6 (RFC 792,
// RFC 4443), and the socket options.
type icmpKind struct {
	network, any        string
	header              int // length of the IP header in bytes
	request, reply      byte
	unreachable, tooBig byte
	expired             byte // time exceeded
	level, discover     int  // level and number of the socket option IP_MTU_DISCOVER or IPV6_MTU_DISCOVER
	hops                int  // number of the socket option IP_TTL or IPV6_UNICAST_HOPS
	filter              func(fd int, types ...byte) error
}

var kinds = map[prefix.Family]icmpKind{
	prefix.IPv4: {
		network: "ip4:icmp", any: "0.0.0.0", header: 20,
		request: 8, reply: 0, unreachable: 3, tooBig: 3, expired: 11,
		level: unix.IPPROTO_IP, discover: unix.IP_MTU_DISCOVER, hops: unix.IP_TTL,
		filter: filter4,
	},
	prefix.IPv6: {
		network: "ip6:ipv6-icmp", any: "::", header: 40,
		request: 128, reply: 129, unreachable: 1, tooBig: 2, expired: 3,
		level: unix.IPPROTO_IPV6, discover: unix.IPV6_MTU_DISCOVER, hops: unix.IPV6_UNICAST_HOPS,
		filter: filter6,
	},
}

// filter4 makes a socket receive only ICMP messages of these types.
func filter4(fd int, types ...byte) error {
	blocked := ^uint32(0)
	for _, t := range types {
		blocked &^= 1 << t
	}
	return unix.SetsockoptInt(fd, unix.SOL_RAW, unix.ICMP_FILTER, int(int32(blocked)))
}

// filter6 is filter4 for ICMPv6.
func filter6(fd int, types ...byte) error {
	var f unix.ICMPv6Filter
	for i := range f.Data {
		f.Data[i] = ^uint32(0)
	}
	for _, t := range types {
		f.Data[t/32] &^= 1 << (t % 32)
	}
	return unix.SetsockoptICMPv6Filter(fd, unix.IPPROTO_ICMPV6, unix.ICMPV6_FILTER, &f)
}

// errNoAnswer means that the time for an answer is over.
var errNoAnswer = errors.New("no answer")

// lastRead limits how long Ping still waits after the timeout. It is short: the answer may have arrived while this
// process waited for a CPU.
const lastRead = 10 * time.Millisecond

const icmpHeader = 8

// leastBuffer is the size in bytes of the smallest buffer for answers. The kernel cuts off the part of an
// answer that does not fit, and parse needs only the beginning.
const leastBuffer = 1500

// SetHops sets the hop limit of packets of a socket of family f.
func SetHops(fd int, f prefix.Family, hops int) error { return kinds[f].setHops(fd, hops) }

func (k icmpKind) setHops(fd, hops int) error { return unix.SetsockoptInt(fd, k.level, k.hops, hops) }

// discoverMode sets how a socket treats packets that are larger than the MTU of their path. mode is a
// value of IP_MTU_DISCOVER, which IPv6 has as well.
func (k icmpKind) discoverMode(fd, mode int) error {
	if err := unix.SetsockoptInt(fd, k.level, k.discover, mode); err != nil {
		return err
	}
	if k.level != unix.IPPROTO_IPV6 || mode != unix.IP_PMTUDISC_PROBE {
		return nil
	}
	return unix.SetsockoptInt(fd, k.level, unix.IPV6_DONTFRAG, 1)
}

// echo returns an ICMP echo request of size bytes, without an IP header. id is in its identifier and
// sequence number. For ICMPv6 the kernel fills in the checksum.
func (k icmpKind) echo(id uint32, size int, note Note) []byte {
	b := make([]byte, size)
	b[0] = k.request
	binary.BigEndian.PutUint32(b[4:], id)
	note.put(b[icmpHeader:])
	sum := uint32(0)
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(b[2:], ^uint16(sum))
	return b
}

// parse returns the id of the request that the ICMP message b, which has no IP header, answers. b is the
// reply, or an ICMP error of the host from that quotes the request: then err is ErrTooBig, wrapped, an
// UnreachableError or an ExpiredError. ok is false for other messages.
func (k icmpKind) parse(b []byte, from netip.Addr) (id uint32, ok bool, err error) {
	if len(b) < icmpHeader {
		return 0, false, nil
	}
	if b[0] == k.reply {
		return binary.BigEndian.Uint32(b[4:]), true, nil
	}

	quoted := b[icmpHeader:]
	if b[0] != k.unreachable && b[0] != k.tooBig && b[0] != k.expired || len(quoted) < k.header+icmpHeader {
		return 0, false, nil
	}

	id = binary.BigEndian.Uint32(quoted[k.header+4:])
	if b[0] == k.expired {
		return id, true, ExpiredError{from}
	}
	const fragmentationNeeded = 4 // IPv4 reports "too big" as this code of "unreachable"
	if b[0] == k.tooBig && (k.tooBig != k.unreachable || b[1] == fragmentationNeeded) {
		return id, true, fmt.Errorf("%w: a router reported an MTU of %d", ErrTooBig, binary.BigEndian.Uint16(b[6:]))
	}
	return id, true, UnreachableError{from, b[1]}
}
