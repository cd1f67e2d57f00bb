// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The descriptors of a tunnel do not block. So this file makes system calls without
// telling the runtime, which would otherwise start another thread to watch over each
// call. That takes more CPU time than copying the packets. lane handles the consequences
// for other goroutines.

// read reads from fd to b.
func read(fd uintptr, b []byte) (int, error) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// outlet makes system calls of one kind that write to a descriptor, without allocating
// memory. Only one goroutine at a time may use it.
type outlet struct {
	conn    syscall.RawConn
	call    func(fd uintptr) unix.Errno
	attempt func(fd uintptr) bool
	err     error // error of the last call
}

func newOutlet(conn syscall.RawConn, call func(fd uintptr) unix.Errno) *outlet {
	o := &outlet{conn: conn, call: call}
	o.attempt = o.try
	return o
}

// write makes the call. While the descriptor has no room the runtime waits.
func (o *outlet) write() error {
	if err := o.conn.Write(o.attempt); err != nil {
		return err
	}
	return o.err
}

// try makes the call and reports whether it is done.
func (o *outlet) try(fd uintptr) bool {
	errno := o.call(fd)
	for errno == unix.EINTR {
		errno = o.call(fd)
	}
	if errno == unix.EAGAIN {
		return false
	}
	o.err = nil
	if errno != 0 {
		o.err = errno
	}
	return true
}
