// SPDX-License-Identifier: Apache-2.0

// Package traffic finds out to which addresses a device sends large packets. It looks at samples, so that
// its cost does not depend on the number of peers, and hardly on the rate of packets.
package traffic

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/pkg/wait"
)

// ErrNoSocket means that this process cannot listen to any device, for example because it does not have
// CAP_NET_RAW, or because its service manager forbids AF_PACKET.
var ErrNoSocket = errors.New("cannot open a packet socket")

const (
	// countFor is the time at the begin of a sample in which packets are only counted. most limits the number of
	// packets that the device has in a sample: the sample of a device with more packets is shorter, but not
	// shorter than leastTime.
	countFor, leastTime = 20 * time.Millisecond, 100 * time.Millisecond
	most                = 2000
	// readEvery is the time between two reads of packets. buffer is the size in bytes of the kernel's buffer,
	// which keeps some dozens of packets between two reads. So a sample has packets of several moments.
	// mostAtOnce limits the packets of one read, because a read would not end while a fast sender sends more.
	readEvery  = 50 * time.Millisecond
	buffer     = 32 << 10
	mostAtOnce = 128
	// header is the number of bytes that the kernel copies from the beginning of a packet, because the addresses
	// are in this part.
	header = 40
)

// Sample listens to a device, and returns the destinations of the packets that this host sends through it. It
// looks only for packets that have more bytes than the parameter larger, because smaller ones pass everywhere.
// It ignores ICMP, because probes of hosts and their answers are ICMP. The parameter during is the time for
// which Sample listens. It listens for less time if the device is fast, because the device needs a little more
// time for each packet while Sample listens. If ctx ends, Sample returns the error of ctx. It needs CAP_NET_RAW.
func Sample(ctx context.Context, device string, larger int, during time.Duration) ([]netip.Addr, error) {
	begin := time.Now()
	s, err := listen(device)
	if err != nil {
		return nil, err
	}
	defer func() { _ = s.Close() }()
	if err := wait.For(ctx, countFor); err != nil {
		return nil, err
	}
	n, err := s.only(larger)
	if err != nil {
		return nil, fmt.Errorf("listen to link %s: %w", device, err)
	}
	return s.destinations(ctx, begin.Add(listenFor(n, during))), ctx.Err()
}

// listenFor returns the duration of a sample of a device that has had n packets within countFor. It is at
// most during, and at least leastTime unless during is shorter.
func listenFor(n uint32, during time.Duration) time.Duration {
	if n == 0 {
		return during
	}
	return min(during, max(leastTime, most*countFor/time.Duration(n)))
}

// socket receives packets of a device.
type socket struct {
	*os.File
	raw syscall.RawConn
}

// listen returns a socket that counts the packets of a device. The caller closes it.
func listen(device string) (*socket, error) {
	// Without a protocol it receives nothing until it is bound to the device.
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoSocket, err)
	}
	s := &socket{File: os.NewFile(uintptr(fd), device)}
	if s.raw, err = s.SyscallConn(); err == nil {
		err = s.control(func(fd int) error { return bind(fd, device) })
	}
	if err != nil {
		return nil, oneline.Join(fmt.Errorf("listen to link %s: %w", device, err), s.Close())
	}
	return s, nil
}

// control calls f with the descriptor of the socket.
func (s *socket) control(f func(fd int) error) error {
	var err error
	cerr := s.raw.Control(func(fd uintptr) { err = f(int(fd)) })
	return oneline.Join(cerr, err)
}

func bind(fd int, device string) error {
	name, err := unix.NewIfreq(device)
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, name); err != nil {
		return err
	}
	if err := attach(fd, []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 1}}); err != nil {
		return err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer); err != nil {
		return err
	}
	return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: int(name.Uint32())})
}

func attach(fd int, program []unix.SockFilter) error {
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
}

// only limits the socket to the packets that Sample looks for, and discards earlier ones. It returns the
// number of packets of the device since listen.
func (s *socket) only(larger int) (n uint32, err error) {
	err = s.control(func(fd int) error {
		if err := attach(fd, filter(larger)); err != nil {
			return err
		}
		read(fd, map[netip.Addr]struct{}{})
		count, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if err == nil {
			n = count.Packets
		}
		return err
	})
	return n, err
}

// destinations returns the destinations of the packets that the socket receives until end, or until ctx ends:
// each one once, in any order.
func (s *socket) destinations(ctx context.Context, end time.Time) []netip.Addr {
	_ = s.SetReadDeadline(end)
	defer context.AfterFunc(ctx, func() { _ = s.SetReadDeadline(time.Unix(1, 0)) })()
	found := map[netip.Addr]struct{}{}
	var err error
	for err == nil {
		err = s.raw.Read(func(fd uintptr) (done bool) { return read(int(fd), found) })
		if err == nil {
			err = wait.For(ctx, readEvery)
		}
	}
	_ = s.control(func(fd int) error { read(fd, found); return nil })
	return slices.Collect(maps.Keys(found))
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// filter returns the program by which the kernel chooses packets (BPF). It runs on the IP header.
func filter(larger int) []unix.SockFilter {
	const (
		packetType         = uint32(0xfffff000) + 4 // SKF_AD_OFF + SKF_AD_PKTTYPE
		version4, version6 = 0x40, 0x60
		protocol4, next6   = 9, 6 // offsets of the protocol
	)
	loadByte := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: at}
	}
	// jump skips instructions: the number in then if the value is k, and otherwise the number in or.
	jump := func(k uint32, then, or uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jt: then, Jf: or}
	}
	return []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_LEN},
		{Code: unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K, K: uint32(larger), Jf: 11},
		loadByte(packetType),
		jump(unix.PACKET_OUTGOING, 0, 9),
		loadByte(0),
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: 0xf0},
		jump(version4, 0, 2),
		loadByte(protocol4),
		jump(unix.IPPROTO_ICMP, 4, 3),
		jump(version6, 0, 3),
		loadByte(next6),
		jump(unix.IPPROTO_ICMPV6, 1, 0),
		{Code: unix.BPF_RET | unix.BPF_K, K: header},
		{Code: unix.BPF_RET | unix.BPF_K},
	}
}

// read takes at most mostAtOnce packets that the socket has received, and adds their destinations to found. It
// returns false if there are no packets. An error, such as that of a device that goes down, counts as a packet
// without a destination.
func read(fd int, found map[netip.Addr]struct{}) (some bool) {
	var b [header]byte
	for range mostAtOnce {
		n, err := unix.Read(fd, b[:])
		if err != nil {
			return some || !errors.Is(err, unix.EAGAIN)
		}
		some = true
		if a, ok := destination(b[:n]); ok {
			found[a] = struct{}{}
		}
	}
	return some
}

// destination returns the destination of a packet that begins with b. ok is false if b is too short, or not IP.
func destination(b []byte) (a netip.Addr, ok bool) {
	const destination4, destination6 = 16, 24
	switch {
	case len(b) >= destination4+4 && b[0]>>4 == 4:
		return netip.AddrFromSlice(b[destination4 : destination4+4])
	case len(b) >= destination6+16 && b[0]>>4 == 6:
		return netip.AddrFromSlice(b[destination6 : destination6+16])
	}
	return netip.Addr{}, false
}
