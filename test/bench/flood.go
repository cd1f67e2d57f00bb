package main

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"flanneld/pkg/lab"
	"flanneld/pkg/oneline"
)

// small is the size of the packets of a flood in bytes, IP header included.
const small = 200

// flood sends small UDP packets as fast as the sender's kernel takes them, and
// returns how many arrive a second. The kernel gets them one by one, or
// gathered, for it to cut (UDP_SEGMENT).
func (r *runner) flood(ctx context.Context, b *bed, from, to *lab.Namespace, addr netip.Addr, gathered bool) (c carried, err error) {
	if err := b.settle(ctx); err != nil {
		return c, err
	}
	listen := func(n *lab.Namespace, address string) (conn net.PacketConn, err error) {
		err = n.Do(ctx, func() (err error) {
			conn, err = new(net.ListenConfig).ListenPacket(ctx, "udp4", address)
			return err
		})
		return conn, err
	}
	in, err := listen(to, netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		return c, err
	}
	defer in.Close()
	out, err := listen(from, ":0")
	if err != nil {
		return c, err
	}
	defer out.Close()
	_ = in.(*net.UDPConn).SetReadBuffer(4 << 20)

	var received atomic.Int64
	go drain(ipv4.NewPacketConn(in), &received)
	d := 3 * time.Second
	if r.quick {
		d = time.Second
	}
	before, err := r.daemonCPU(b)
	if err != nil {
		return c, err
	}
	start := time.Now()
	if err := out.SetWriteDeadline(start.Add(d)); err != nil {
		return c, err
	}
	messages, err := floodOf(out.(*net.UDPConn), in.LocalAddr(), gathered)
	if err != nil {
		return c, err
	}
	sender := ipv4.NewPacketConn(out)
	for err == nil && time.Since(start) < d {
		_, err = sender.WriteBatch(messages, 0)
	}
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return c, err
	}
	took, n := time.Since(start).Seconds(), float64(received.Load())
	after, err := r.daemonCPU(b)
	if err != nil {
		return c, err
	}
	c.pps, c.cpuPerMpkt = n/took, (after-before).Seconds()/(n/1e6)
	return c, nil
}

// floodOf returns what out sends again and again.
func floodOf(out *net.UDPConn, to net.Addr, gathered bool) ([]ipv4.Message, error) {
	const payload, most = small - 28, 64
	messages, size := make([]ipv4.Message, most), payload
	if gathered {
		messages, size = messages[:1], payload*most
		raw, err := out.SyscallConn()
		if err != nil {
			return nil, err
		}
		cerr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, payload) })
		if err := oneline.Join(cerr, err); err != nil {
			return nil, err
		}
	}
	for i := range messages {
		messages[i] = ipv4.Message{Buffers: [][]byte{make([]byte, size)}, Addr: to}
	}
	return messages, nil
}

// drain counts what arrives until conn is closed.
func drain(conn *ipv4.PacketConn, received *atomic.Int64) {
	messages := make([]ipv4.Message, 64)
	for i := range messages {
		messages[i].Buffers = [][]byte{make([]byte, 2048)}
	}
	for {
		n, err := conn.ReadBatch(messages, 0)
		if err != nil {
			return
		}
		received.Add(int64(n))
	}
}
