// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// chunk is the maximum number of messages in one datagram. For each message the kernel
	// may return an error that takes about 830 bytes of the receive buffer. The smallest
	// default buffer has room for 256 such errors.
	chunk = 200
	// replyTimeout limits the wait for a reply. The kernel never replies to a message
	// that it cannot parse.
	replyTimeout = 5 * time.Second
	// dumpTries limits how often an interrupted dump is repeated.
	dumpTries = 8

	bufferSize = 4 << 20
)

var errInterrupted = errors.New("dump interrupted by concurrent changes")

// socket is a request socket of NETLINK_ROUTE. It belongs to the network
// namespace in which it was opened. Its methods may be called concurrently.
type socket struct {
	mu      sync.Mutex
	fd      int
	seq     uint32
	buffers *Buffers
	out     []byte // send buffer
}

func openSocket(b *Buffers) (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink socket: %w", err)
	}
	s := &socket{fd: fd, buffers: b}
	if err := s.configure(); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("set up rtnetlink socket: %w", err)
	}
	return s, nil
}

func (s *socket) configure() error {
	if err := unix.Bind(s.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	tv := unix.NsecToTimeval(int64(replyTimeout))
	if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return err
	}

	// Without strict checking the kernel ignores the filter of a dump, and the answer
	// would have to be filtered here.
	if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		return fmt.Errorf("strict checking (needs Linux 4.20): %w", err)
	}

	// The other options are optional: a larger buffer, and errors that are shorter and
	// contain a text.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bufferSize)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	return nil
}

func (s *socket) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	fd := s.fd
	s.fd = -1 // another file may soon have the number
	return unix.Close(fd)
}

func (s *socket) control(f func(fd int) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return f(s.fd)
}

// port returns the netlink address of the socket, which is in the announcements of its changes.
func (s *socket) port() (uint32, error) {
	var port uint32
	err := s.control(func(fd int) error {
		sa, err := unix.Getsockname(fd)
		if nl, ok := sa.(*unix.SockaddrNetlink); ok {
			port = nl.Pid
		}
		return err
	})
	return port, err
}

// send sends n messages, which build appends, and returns the errors by index. A failure does not stop
// the messages after it. If ctx ends, the messages that were not yet sent fail.
func (s *socket) send(ctx context.Context, n int, build func(i int, m *message)) map[int]error {
	return s.sendGroups(ctx, n, 1, build)
}

// sendGroups is like send for n groups of size messages each. The messages of a group are in one
// datagram, so that the kernel receives all of them or none.
func (s *socket) sendGroups(ctx context.Context, n, size int, build func(i int, m *message)) map[int]error {
	s.mu.Lock()
	defer s.mu.Unlock()

	failed := map[int]error{}
	n *= size
	perDatagram := chunk - chunk%size
	for start := 0; start < n; start += perDatagram {
		end := min(start+perDatagram, n)
		if err := ctx.Err(); err != nil {
			failAll(failed, start, n, err)
			return failed
		}
		if err := s.sendChunk(start, end, build, failed); err != nil {
			failAll(failed, start, end, err)
		}
	}
	return failed
}

func failAll(failed map[int]error, from, to int, err error) {
	for i := from; i < to; i++ {
		if failed[i] == nil {
			failed[i] = err
		}
	}
}

// sendChunk sends the messages start to end-1 in one datagram, and adds the errors of messages to
// failed. Its own error is about the datagram.
func (s *socket) sendChunk(start, end int, build func(i int, m *message), failed map[int]error) error {
	// The kernel repeats the sequence number in an error. Only the last message is acknowledged.
	m := message{buf: s.out[:0]}
	first := s.seq + 1
	for i := start; i < end; i++ {
		s.seq++
		build(i, &m)
		if i == end-1 {
			m.setFlags(unix.NLM_F_ACK)
		}
		m.finish(s.seq)
	}
	s.out = m.buf
	if err := s.write(m.buf); err != nil {
		return err
	}

	last := s.seq
	return s.receive(func(h header, payload []byte) (done bool, err error) {
		if h.Type != unix.NLMSG_ERROR || h.Seq-first >= uint32(end-start) { // a late reply to an earlier request
			return false, nil
		}
		if err := replyError(h, payload); err != nil {
			failed[start+int(h.Seq-first)] = err
		}
		return h.Seq == last, nil
	})
}

// dump calls each with every message of the answer. It repeats a dump that was interrupted, and calls
// reset before every attempt, because the last one has called each already.
func (s *socket) dump(ctx context.Context, build func(m *message), reset func(), each func(typ uint16, payload []byte)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range dumpTries {
		if err := ctx.Err(); err != nil {
			return err
		}
		reset()
		err := s.request(unix.NLM_F_DUMP, build, each)
		if !errors.Is(err, errInterrupted) {
			return err
		}
	}
	return errInterrupted
}

// ask sends a request that has a single answer. It returns the kernel's error, or calls answer.
func (s *socket) ask(build func(m *message), answer func(typ uint16, payload []byte)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.request(0, build, answer)
}

// request sends one message, and calls each with the answers: several for a dump, otherwise one.
func (s *socket) request(flags uint16, build func(m *message), each func(typ uint16, payload []byte)) error {
	var m message
	s.seq++
	build(&m)
	m.setFlags(flags)
	m.finish(s.seq)
	if err := s.write(m.buf); err != nil {
		return err
	}

	interrupted := false
	err := s.receive(func(h header, payload []byte) (done bool, err error) {
		if h.Seq != s.seq {
			return false, nil
		}

		interrupted = interrupted || h.Flags&unix.NLM_F_DUMP_INTR != 0
		switch h.Type {
		case unix.NLMSG_ERROR:
			return true, replyError(h, payload)
		case unix.NLMSG_DONE:
			if len(payload) >= 4 {
				err = errnoOf(payload)
			}
			return true, err
		}
		each(h.Type, payload)
		return flags&unix.NLM_F_DUMP == 0, nil
	})
	if err == nil && interrupted {
		return errInterrupted
	}
	return err
}

func (s *socket) write(b []byte) error {
	for {
		err := unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// header has the fields of struct nlmsghdr that are needed.
type header struct {
	Len   uint32
	Type  uint16
	Flags uint16
	Seq   uint32
}

// receive reads datagrams from the kernel, and calls each with every message. It returns after the
// datagram with a message that is the last one (done), or at the first error.
func (s *socket) receive(each func(h header, payload []byte) (done bool, err error)) error {
	buf := s.buffers.get()
	defer s.buffers.put(buf)
	for done := false; !done; {
		n, err := s.read(buf)
		if err != nil {
			return err
		}

		for b := (*buf)[:n]; len(b) >= unix.NLMSG_HDRLEN; {
			h, payload, rest, err := cut(b)
			if err != nil {
				return err
			}
			last, err := each(h, payload)
			if err != nil {
				return err
			}
			done = done || last
			b = rest
		}
	}
	return nil
}

// cut cuts the first message off a datagram, which has at least the header of one.
func cut(b []byte) (h header, payload, rest []byte, err error) {
	h = header{
		Len:   binary.NativeEndian.Uint32(b),
		Type:  binary.NativeEndian.Uint16(b[4:]),
		Flags: binary.NativeEndian.Uint16(b[6:]),
		Seq:   binary.NativeEndian.Uint32(b[8:]),
	}
	if h.Len < unix.NLMSG_HDRLEN || uint64(h.Len) > uint64(len(b)) {
		return h, nil, nil, fmt.Errorf("rtnetlink message of %d bytes in a datagram of %d", h.Len, len(b))
	}
	return h, b[unix.NLMSG_HDRLEN:h.Len], b[min(align(int(h.Len)), len(b)):], nil
}

// read reads one datagram. If buf is too small, the next try succeeds.
func (s *socket) read(buf *[]byte) (int, error) {
	for {
		n, _, flags, from, err := unix.Recvmsg(s.fd, *buf, nil, unix.MSG_TRUNC)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return 0, fmt.Errorf("no reply from the kernel within %s", replyTimeout)
		case err != nil:
			return 0, fmt.Errorf("read rtnetlink reply: %w", err)
		}
		if flags&unix.MSG_TRUNC != 0 {
			*buf = make([]byte, n)
			return 0, fmt.Errorf("rtnetlink reply of %d bytes was cut", n)
		}
		if nl, ok := from.(*unix.SockaddrNetlink); !ok || nl.Pid != 0 {
			continue // not from the kernel
		}
		return n, nil
	}
}

// replyError decodes an NLMSG_ERROR message. It returns nil for an acknowledgement.
func replyError(h header, payload []byte) error {
	if len(payload) < 4+unix.NLMSG_HDRLEN {
		return errors.New("short rtnetlink error message")
	}

	err := errnoOf(payload)
	if err == nil || h.Flags&unix.NLM_F_ACK_TLVS == 0 {
		return err
	}

	// The kernel's explanation comes after the request, or after its header if that is capped.
	skip := 4 + unix.NLMSG_HDRLEN
	if h.Flags&unix.NLM_F_CAPPED == 0 {
		request := binary.NativeEndian.Uint32(payload[4:])
		if uint64(request) > uint64(len(payload)) {
			return err
		}
		skip = min(4+align(int(request)), len(payload))
	}

	for a := range attributes(payload[skip:]) {
		if a.typ == unix.NLMSGERR_ATTR_MSG {
			return fmt.Errorf("%w (%s)", err, unix.ByteSliceToString(a.data))
		}
	}
	return err
}

func errnoOf(payload []byte) error {
	if code := int32(binary.NativeEndian.Uint32(payload)); code != 0 {
		return syscall.Errno(-code)
	}
	return nil
}
