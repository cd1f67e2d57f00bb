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

	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// small is the size of the packets of a flood in bytes, including the IP and UDP headers.
const small = 200

// flood sends small UDP packets as fast as the sender's kernel accepts them. It measures
// how many arrive per second, and the CPU time of the daemons. The
// sender passes them to the kernel as single packets or, if gathered is true, as large
// buffers that the kernel splits (UDP_SEGMENT).
func (r *runner) flood(ctx context.Context, b *bed, from, to *lab.Namespace, addr netip.Addr, gathered bool) (c carried) {
	b.quiesce(ctx)
	var in, out *net.UDPConn
	inside(ctx, to, func() { in = must.Get(net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))) })
	defer in.Close()
	_ = in.SetReadBuffer(4 << 20)
	inside(ctx, from, func() { out = must.Get(net.DialUDP("udp4", nil, in.LocalAddr().(*net.UDPAddr))) })
	defer out.Close()

	const payload, most = small - 28, 64
	leaving := must.Get(out.SyscallConn())
	load := newPackets(most, payload)
	if gathered {
		load = newPackets(1, payload*most)
		var err error
		cerr := leaving.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, payload) })
		must.Do(errors.Join(cerr, err))
	}

	var received atomic.Int64
	arriving := must.Get(in.SyscallConn())
	go drain(arriving, &received)
	start := time.Now()
	d := r.flowTime()
	must.Do(out.SetWriteDeadline(start.Add(d)))
	used := b.carriersSpend(func() {
		for time.Since(start) < d {
			if _, err := load.call(leaving.Write, unix.SYS_SENDMMSG); !errors.Is(err, os.ErrDeadlineExceeded) {
				must.Do(err)
			}
		}
	})
	n := float64(received.Load())
	if n == 0 {
		must.Fail("no packet arrived")
	}
	c.pps, c.cpuPerMpkt = n/time.Since(start).Seconds(), used.Seconds()/(n/1e6)
	return c
}

func drain(in syscall.RawConn, received *atomic.Int64) {
	room := newPackets(64, 2048)
	for {
		n, err := room.call(in.Read, unix.SYS_RECVMMSG)
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
