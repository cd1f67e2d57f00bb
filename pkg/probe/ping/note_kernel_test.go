// SPDX-License-Identifier: Apache-2.0

package ping

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// TestKernelNotes sends echo requests with and without notes. Only those with a note must reach a socket, even if
// their IPv4 header has options, and Pinger.Heard must get the notes.
func TestKernelNotes(t *testing.T) {
	enterLossyNamespace(t)
	for _, host := range []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1")} {
		t.Run(host.String(), func(t *testing.T) {
			heard := make(chan string, 10)
			listener, plain, optional := NewPinger(), NewPinger(), NewPinger()
			listener.Heard = func(from netip.Addr, n Note) { heard <- fmt.Sprint(from, n) }
			ping := func(p *Pinger, n Note) {
				t.Helper()
				t.Cleanup(func() { _ = p.Close() })
				if _, err := p.Ping(t.Context(), host, Path{Size: 84, Note: n}, 5*time.Second); err != nil {
					t.Fatal(err)
				}
			}
			ping(listener, Note{}) // it opens its socket
			ping(optional, Note{})
			addOptions(t, optional)
			s, err := openSocket(t.Context(), prefix.FamilyOf(host), listener.Heard)
			if err != nil {
				t.Fatal(err)
			}
			defer s.close()

			sender := netip.MustParseAddr("10.5.2.0")
			ping(plain, Note{})
			ping(plain, Note{sender, time.Second})
			ping(optional, Note{})
			ping(optional, Note{sender, 2 * time.Second})

			// If the filter looked for an IP header where there is none, it would take this id for a request without a note.
			id := uint32(s.kind.request) << 24
			if err := s.send(t.Context(), host, Path{}, id); err != nil {
				t.Fatal(err)
			}

			want := []string{fmt.Sprint(host, Note{sender, time.Second}), fmt.Sprint(host, Note{sender, 2 * time.Second})}
			for _, w := range want {
				select {
				case got := <-heard:
					if got != w {
						t.Errorf("heard %s, want %s", got, w)
					}
				case <-time.After(5 * time.Second):
					t.Fatalf("nothing is heard, want %s", w)
				}
			}

			// The kernel has put all messages that it admits into the other socket.
			_ = s.conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
			var admitted []string
			answered := false
			buf := make([]byte, leastBuffer)
			for size, from, err := s.conn.ReadFrom(buf); err == nil; size, from, err = s.conn.ReadFrom(buf) {
				if n, _ := s.kind.noteOf(buf[:size]); buf[0] == s.kind.request {
					admitted = append(admitted, fmt.Sprint(from, n))
				}
				if answer, ok, _ := s.kind.parse(buf[:size], netip.Addr{}); ok && answer == id {
					answered = true
				}
			}
			if !answered {
				t.Errorf("the kernel keeps the reply to request %#x back", id)
			}
			if !slices.Equal(admitted, want) {
				t.Errorf("the kernel admits %q, want %q", admitted, want)
			}
		})
	}
}

// addOptions makes the packets that p sends over IPv4 have IP options.
func addOptions(t *testing.T, p *Pinger) {
	t.Helper()
	s := p.sockets[prefix.IPv4]
	if s == nil {
		return
	}
	for _, conn := range s.senders {
		raw, err := conn.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		cerr := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptString(int(fd), unix.IPPROTO_IP, unix.IP_OPTIONS, "\x01\x01\x01\x01") // no operation
		})
		if cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
	}
}
