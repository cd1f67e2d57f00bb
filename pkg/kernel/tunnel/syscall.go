// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The descriptors of a tunnel do not block. So read, and the calls that device.go and
// socket.go pass to an fdWriter or make to receive, use RawSyscall, which does not tell the
// runtime. Otherwise the runtime would start another thread to watch over each call, which
// takes more CPU time than copying the packets. worker handles the consequences for other
// goroutines.

func read(fd uintptr, b []byte) (int, error) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// fdWriter makes one kind of system call that writes to a descriptor, without allocating
// memory. Only one goroutine at a time may use it.
type fdWriter struct {
	conn    syscall.RawConn
	call    func(fd uintptr) unix.Errno
	attempt func(fd uintptr) bool
	err     error // error of the last call
}

func newFDWriter(conn syscall.RawConn, call func(fd uintptr) unix.Errno) *fdWriter {
	w := &fdWriter{conn: conn, call: call}
	w.attempt = w.try
	return w
}

// write waits in the runtime while the descriptor has no room.
func (w *fdWriter) write() error {
	if err := w.conn.Write(w.attempt); err != nil {
		return err
	}
	return w.err
}

// try reports false if the descriptor has no room.
func (w *fdWriter) try(fd uintptr) bool {
	errno := w.call(fd)
	for errno == unix.EINTR {
		errno = w.call(fd)
	}
	if errno == unix.EAGAIN {
		return false
	}
	w.err = nil
	if errno != 0 {
		w.err = errno
	}
	return true
}
