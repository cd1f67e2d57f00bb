package tunnel

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSocketFull has more come to a socket than that has room for: nothing is lost that
// is not counted.
func TestSocketFull(t *testing.T) {
	s, err := openSocket(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), false)
	if err != nil {
		t.Fatal(err)
	}
	defer s.release()
	defer s.close()
	if err := s.raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1<<16) }); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	sender, err := net.DialUDP("udp4", nil, s.conn.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	i := newInbound(&Tunnel{Config: Config{Device: &Device{}, Table: NewTable(), Counters: &Counters{}}}, s)
	const each = 1000
	var sent, before uint64
	for range 2 {
		for range each {
			if _, err := sender.Write(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		sent += each
		eventually(t, "what came and what did not", func() error {
			if _, err := sender.Write([]byte("tells")); err != nil { // with it the kernel says what was lost before
				return err
			}
			sent++
			_ = s.raw.Control(func(fd uintptr) {
				for err = nil; err == nil; {
					err = i.read(fd)
				}
			})
			came, lost := i.Counters.dropped[UnknownPeer].Load(), i.Counters.dropped[SocketFull].Load()
			if lost == before || came+lost != sent {
				return fmt.Errorf("%d came and %d were lost of %d, %w", came, lost, sent, err)
			}
			before = lost
			return nil
		})
	}
}
