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
	// chunk is how many messages go into one datagram. Each may come back as
	// an error of some 830 bytes of receive buffer; the smallest default
	// buffer holds 256 of them.
	chunk = 200
	// replyTimeout ends the wait for a reply that the kernel will never send,
	// as after a message that it could not parse.
	replyTimeout = 5 * time.Second
	// dumpTries bounds how often an interrupted dump is asked for again.
	dumpTries = 8

	bufferSize = 4 << 20
)

var errInterrupted = errors.New("dump interrupted by concurrent changes")

// socket is a request socket of NETLINK_ROUTE. It belongs to the network
// namespace in which it was opened. Its methods may be called concurrently.
type socket struct {
	mu  sync.Mutex
	fd  int
	seq uint32
	buf []byte // of what is received
	out []byte // of what is sent
}

func openSocket() (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink socket: %w", err)
	}
	s := &socket{fd: fd, buf: make([]byte, 64<<10)}
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
	// Without strict checking the kernel ignores dump filters, so that a
	// short answer would have to be told from a long one here.
	if err := unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		return fmt.Errorf("strict checking (needs Linux 4.20): %w", err)
	}
	// The rest only helps: larger buffers, shorter and more talkative errors.
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bufferSize)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	_ = unix.SetsockoptInt(s.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	return nil
}

func (s *socket) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	fd := s.fd
	s.fd = -1 // the number may soon be that of another file
	return unix.Close(fd)
}

// control calls f with the socket's descriptor.
func (s *socket) control(f func(fd int) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return f(s.fd)
}

// port is the socket's address: the kernel names it as the cause of what was
// asked for through it.
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

// send transmits messages built by build, one for each i below n, and returns
// the error of each that failed. Failures do not stop the rest.
func (s *socket) send(ctx context.Context, n int, build func(i int, m *message)) map[int]error {
	return s.sendGroups(ctx, n, 1, build)
}

// sendGroups is send for n groups of messages, each of that size. The kernel carries out a
// group as a whole, or nothing of it.
func (s *socket) sendGroups(ctx context.Context, n, size int, build func(i int, m *message)) map[int]error {
	s.mu.Lock()
	defer s.mu.Unlock()
	failed := map[int]error{}
	n, whole := n*size, chunk-chunk%size
	for start := 0; start < n; start += whole {
		end := min(start+whole, n)
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

// sendChunk sends one datagram. Every message has a sequence number of its
// own, by which the kernel names it in an error; only the last asks for an
// acknowledgement.
func (s *socket) sendChunk(start, end int, build func(i int, m *message), failed map[int]error) error {
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
	for {
		done := false
		err := s.receive(func(h header, payload []byte) error {
			if h.Type != unix.NLMSG_ERROR || h.Seq-first >= uint32(end-start) { // a late reply to an earlier request
				return nil
			}
			if err := replyError(h, payload); err != nil {
				failed[start+int(h.Seq-first)] = err
			}
			done = done || h.Seq == last
			return nil
		})
		if err != nil || done {
			return err
		}
	}
}

// dump sends the request that build makes and calls each for every message of
// the answer. A dump that was interrupted is asked for again; reset is called
// before each attempt.
func (s *socket) dump(ctx context.Context, build func(m *message), reset func(), each func(typ uint16, payload []byte)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range dumpTries {
		if err := ctx.Err(); err != nil {
			return err
		}
		reset()
		err := s.dumpOnce(build, each)
		if !errors.Is(err, errInterrupted) {
			return err
		}
	}
	return errInterrupted
}

func (s *socket) dumpOnce(build func(m *message), each func(typ uint16, payload []byte)) error {
	var m message
	s.seq++
	build(&m)
	m.setFlags(unix.NLM_F_DUMP)
	m.finish(s.seq)
	if err := s.write(m.buf); err != nil {
		return err
	}
	interrupted, done := false, false
	for !done {
		err := s.receive(func(h header, payload []byte) error {
			if h.Seq != s.seq {
				return nil
			}
			interrupted = interrupted || h.Flags&unix.NLM_F_DUMP_INTR != 0
			switch h.Type {
			case unix.NLMSG_ERROR:
				done = true
				return replyError(h, payload)
			case unix.NLMSG_DONE:
				done = true
				if len(payload) >= 4 {
					return errnoOf(payload)
				}
			default:
				each(h.Type, payload)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if interrupted {
		return errInterrupted
	}
	return nil
}

// ask sends one request that has one answer.
func (s *socket) ask(build func(m *message), answer func(typ uint16, payload []byte)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var m message
	s.seq++
	build(&m)
	m.finish(s.seq)
	if err := s.write(m.buf); err != nil {
		return err
	}
	for {
		done := false
		err := s.receive(func(h header, payload []byte) error {
			if h.Seq != s.seq {
				return nil
			}
			done = true
			if h.Type == unix.NLMSG_ERROR {
				return replyError(h, payload)
			}
			answer(h.Type, payload)
			return nil
		})
		if err != nil || done {
			return err
		}
	}
}

func (s *socket) write(b []byte) error {
	for {
		err := unix.Sendto(s.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// header is struct nlmsghdr.
type header struct {
	Len   uint32
	Type  uint16
	Flags uint16
	Seq   uint32
}

// receive reads one datagram from the kernel and calls each for every
// message in it, until one returns an error.
func (s *socket) receive(each func(h header, payload []byte) error) error {
	n, err := s.read()
	if err != nil {
		return err
	}
	b := s.buf[:n]
	for len(b) >= unix.NLMSG_HDRLEN {
		h := header{
			Len:   binary.NativeEndian.Uint32(b),
			Type:  binary.NativeEndian.Uint16(b[4:]),
			Flags: binary.NativeEndian.Uint16(b[6:]),
			Seq:   binary.NativeEndian.Uint32(b[8:]),
		}
		if h.Len < unix.NLMSG_HDRLEN || uint64(h.Len) > uint64(len(b)) {
			return fmt.Errorf("rtnetlink message of %d bytes in a datagram of %d", h.Len, len(b))
		}
		if err := each(h, b[unix.NLMSG_HDRLEN:h.Len]); err != nil {
			return err
		}
		b = b[min(align(int(h.Len)), len(b)):]
	}
	return nil
}

func (s *socket) read() (int, error) {
	for {
		n, _, flags, from, err := unix.Recvmsg(s.fd, s.buf, nil, unix.MSG_TRUNC)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return 0, fmt.Errorf("no reply from the kernel within %s", replyTimeout)
		case err != nil:
			return 0, fmt.Errorf("read rtnetlink reply: %w", err)
		}
		if flags&unix.MSG_TRUNC != 0 {
			s.buf = make([]byte, n)
			return 0, fmt.Errorf("rtnetlink reply of %d bytes was cut", n)
		}
		if nl, ok := from.(*unix.SockaddrNetlink); !ok || nl.Pid != 0 {
			continue // not from the kernel
		}
		return n, nil
	}
}

// replyError returns the error that an NLMSG_ERROR message carries, with the
// kernel's explanation where it gives one; nil for an acknowledgement.
func replyError(h header, payload []byte) error {
	if len(payload) < 4+unix.NLMSG_HDRLEN {
		return errors.New("short rtnetlink error message")
	}
	err := errnoOf(payload)
	if err == nil || h.Flags&unix.NLM_F_ACK_TLVS == 0 {
		return err
	}
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
