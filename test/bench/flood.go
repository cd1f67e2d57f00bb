// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/oneline"
	"github.com/flanneld/flanneld/test/lab"
)

// small is the size of the packets of a flood in bytes, including the IP and UDP headers.
const small = 200

// flood sends small UDP packets as fast as the sender's kernel accepts them. It measures
// how many are sent and how many arrive per second, and the CPU time of the daemons. The
// sender passes them to the kernel as single packets or, if gathered is true, as large
// buffers that the kernel splits (UDP_SEGMENT).
func (r *runner) flood(ctx context.Context, b *bed, from, to *lab.Namespace, addr netip.Addr, gathered bool) (c carried, err error) {
	if err := b.quiesce(ctx); err != nil {
		return c, err
	}
	var in, out *net.UDPConn
	err = to.Do(ctx, func() (err error) {
		in, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
		return err
	})
	if err != nil {
		return c, err
	}
	defer in.Close()
	_ = in.SetReadBuffer(4 << 20)
	err = from.Do(ctx, func() (err error) {
		out, err = net.DialUDP("udp4", nil, in.LocalAddr().(*net.UDPAddr))
		return err
	})
	if err != nil {
		return c, err
	}
	defer out.Close()

	var received atomic.Int64
	arriving, err := in.SyscallConn()
	if err != nil {
		return c, err
	}
	go drain(arriving, &received)
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
	leaving, err := out.SyscallConn()
	if err != nil {
		return c, err
	}
	load, each, err := floodOf(leaving, gathered)
	if err != nil {
		return c, err
	}
	sent := 0
	for err == nil && time.Since(start) < d {
		var n int
		n, err = load.send(leaving)
		sent += n * each
	}
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return c, err
	}
	took := time.Since(start).Seconds()
	n := float64(received.Load())
	if n == 0 {
		return c, errors.New("no packet arrived")
	}

	after, err := r.daemonCPU(b)
	if err != nil {
		return c, err
	}
	c.pps, c.sent, c.cpuPerMpkt = n/took, float64(sent)/took, (after-before).Seconds()/(n/1e6)
	return c, nil
}

// floodOf returns the buffers that are sent again and again, and how many packets each of
// them contains. If gathered is true, it makes the kernel split the buffers that are sent
// through out.
func floodOf(out syscall.RawConn, gathered bool) (load *packets, each int, err error) {
	const payload, most = small - 28, 64
	if !gathered {
		return newPackets(most, payload), 1, nil
	}
	cerr := out.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, payload) })
	return newPackets(1, payload*most), most, oneline.Join(cerr, err)
}

// drain adds the arriving packets to received until in is closed.
func drain(in syscall.RawConn, received *atomic.Int64) {
	room := newPackets(64, 2048)
	for {
		n, err := room.receive(in)
		if err != nil {
			return
		}
		received.Add(int64(n))
	}
}

// packets contains buffers that one system call passes to or from the kernel.
// golang.org/x/net has the same but parses the address of each packet. On a machine that
// sends, carries and receives with the same CPUs, that would distort the result.
type packets struct{ headers []mmsghdr }

// mmsghdr is the struct of sendmmsg(2).
type mmsghdr struct {
	unix.Msghdr
	_ uint32 // number of bytes that the kernel has sent or received
}

func newPackets(count, size int) *packets {
	p := &packets{make([]mmsghdr, count)}
	for i := range p.headers {
		part := &unix.Iovec{Base: &make([]byte, size)[0]}
		part.SetLen(size)
		p.headers[i].Iov = part
		p.headers[i].SetIovlen(1)
	}
	return p
}

func (p *packets) send(to syscall.RawConn) (n int, err error) {
	return p.call(to.Write, unix.SYS_SENDMMSG)
}

func (p *packets) receive(from syscall.RawConn) (n int, err error) {
	return p.call(from.Read, unix.SYS_RECVMMSG)
}

// call makes the system call with that number through run, which waits until the kernel
// accepts or has at least one packet. n is the number of buffers that were sent or
// received.
func (p *packets) call(run func(func(fd uintptr) bool) error, number uintptr) (n int, err error) {
	var done uintptr
	var errno syscall.Errno
	err = run(func(fd uintptr) bool {
		done, _, errno = unix.Syscall6(number, fd, uintptr(unsafe.Pointer(&p.headers[0])), uintptr(len(p.headers)), unix.MSG_DONTWAIT, 0, 0)
		return errno != unix.EAGAIN
	})
	if err == nil && errno != 0 {
		err = os.NewSyscallError("move packets", errno)
	}
	return int(done), err
}
