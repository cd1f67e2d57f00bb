// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
)

// TestSocketFull sends more datagrams to a socket than fit its buffer. All datagrams must
// arrive or be counted as lost.
func TestSocketFull(t *testing.T) {
	s, err := openSocket(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"))
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
	i := newInbound(Config{Device: &Device{}, Table: NewTable(), Counters: &Counters{}}, s)
	const each = 1000
	var sent, before uint64
	for range 2 {
		for range each {
			if _, err := sender.Write(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
		}
		sent += each
		waittest.Eventually(t, patience, "count of received and lost datagrams", func() error {
			if _, err := sender.Write([]byte("tells")); err != nil { // with this datagram the kernel reports earlier losses
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
				return fmt.Errorf("%d received and %d lost of %d, %w", came, lost, sent, err)
			}
			before = lost
			return nil
		})
	}
}
