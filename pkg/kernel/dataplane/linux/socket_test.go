// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// neighMessage returns a function that appends a request to create neighbour i, from 0, on the
// device with the given index.
func neighMessage(i, index int) func(*message) {
	ip := netip.AddrFrom4([4]byte{10, 5, byte(i >> 8), byte(i)})
	return func(m *message) {
		encode(m, &dataplane.Op{Object: dataplane.Neigh{NeighKey: dataplane.NeighKey{IP: ip}, MAC: dataplane.MAC{2}}}, index)
	}
}

// TestKernelSendManyFailures checks that errors belong to the right messages, across
// datagrams, and also for the last message of a datagram.
func TestKernelSendManyFailures(t *testing.T) {
	w := newWorld(t)
	eth0, err := w.index("eth0")
	if err != nil {
		t.Fatal(err)
	}
	const n = 2*chunk + 50
	bad := func(i int) bool { return i%7 == 3 || i == chunk-1 || i == n-1 }
	failed := w.sock.send(t.Context(), n, func(i int, m *message) {
		index := eth0
		if bad(i) {
			index = 9999
		}
		neighMessage(i, index)(m)
	})
	for i := range n {
		if got := errors.Is(failed[i], unix.ENODEV); got != bad(i) || !bad(i) && failed[i] != nil {
			t.Errorf("message %d: %v, want a failure: %t", i, failed[i], bad(i))
		}
	}
	all := w.sock.send(t.Context(), n, func(i int, m *message) { neighMessage(i, 9999)(m) })
	if len(all) != n {
		t.Errorf("%d failures, want %d", len(all), n)
	}
}

// TestKernelExplanation checks that an error contains the kernel's explanation.
func TestKernelExplanation(t *testing.T) {
	w := newWorld(t)
	r := dataplane.NewRoute(netip.MustParsePrefix("10.5.3.0/24"), netip.MustParseAddr("192.0.2.1"), "eth0", false)
	failed := w.Apply(t.Context(), []dataplane.Op{{Object: r}})
	if len(failed) != 1 || !errors.Is(failed[0], unix.ENETUNREACH) || !strings.Contains(failed[0].Error(), "invalid gateway") {
		t.Errorf("failures %v, want one with the kernel's explanation", failed)
	}
}

// TestKernelUnparsable checks that all messages of a datagram fail after a timeout if the
// kernel cannot parse one of them, and that later requests succeed.
func TestKernelUnparsable(t *testing.T) {
	w := newWorld(t)
	tv := unix.NsecToTimeval(50_000_000)
	if err := unix.SetsockoptTimeval(w.sock.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		t.Fatal(err)
	}
	failed := w.sock.send(t.Context(), 3, func(i int, m *message) {
		neighMessage(i, 1)(m)
		if i == 1 {
			m.start += 4 // the length is written to the wrong place
		}
	})
	if len(failed) != 3 || !strings.Contains(failed[2].Error(), "no reply") {
		t.Errorf("failures %v, want all three without a reply", failed)
	}
	if name, err := w.linkName(1); err != nil || name != "lo" {
		t.Errorf("link 1 is %q (%v), want lo", name, err)
	}
}

func TestKernelSendContext(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	const n = 3 * chunk
	failed := w.sock.send(ctx, n, func(i int, m *message) {
		if i == chunk {
			cancel() // the datagram under construction is still sent
		}
		neighMessage(i, 1)(m)
	})
	if len(failed) != chunk || !errors.Is(failed[n-1], context.Canceled) {
		t.Errorf("%d failures, the last %v; want the last %d to be canceled", len(failed), failed[n-1], chunk)
	}
	if err := w.sock.dump(ctx, nil, nil, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("dump: %v, want canceled", err)
	}
}

// TestKernelClosed checks that calls on a closed Kernel return an error and do not hang. A
// closed socket must not keep its file number, because another file may get that number.
func TestKernelClosed(t *testing.T) {
	w := newWorld(t)
	s, err := openSocket(&Buffers{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
	if s.fd >= 0 {
		t.Error("a closed socket keeps its file number")
	}
	k := &Kernel{sock: s, links: w.links}
	if _, err := k.OnLink(t.Context(), netip.MustParseAddr("192.168.77.2"), "eth0"); !errors.Is(err, unix.EBADF) {
		t.Errorf("OnLink: %v, want bad file descriptor", err)
	}
	if err := k.readRoutes(t.Context(), unix.AF_INET, dataplane.Scope{}, dataplane.NewState()); !errors.Is(err, unix.EBADF) {
		t.Errorf("dump: %v, want bad file descriptor", err)
	}
	if failed := s.send(t.Context(), 2, func(i int, m *message) { neighMessage(i, 1)(m) }); len(failed) != 2 {
		t.Errorf("failures %v, want two", failed)
	}
}

func TestReplyError(t *testing.T) {
	capped := append([]byte{0xed, 0xff, 0xff, 0xff}, make([]byte, unix.NLMSG_HDRLEN)...) // ENODEV
	text := append([]byte{9, 0, unix.NLMSGERR_ATTR_MSG, 0}, "gone\x00\x00\x00\x00"...)
	uncapped := append([]byte{}, capped...)
	uncapped[4] = 24 // the request that follows has 8 bytes of body
	uncapped = append(append(uncapped, make([]byte, 8)...), text...)
	long := append([]byte{}, capped...)
	long[7] = 0xff
	for _, tc := range []struct {
		name    string
		flags   uint16
		payload []byte
		want    string
	}{
		{"acknowledgement", 0, make([]byte, 20), ""},
		{"no text", 0, capped, "no such device"},
		{"text after the header", unix.NLM_F_ACK_TLVS | unix.NLM_F_CAPPED, append(append([]byte{}, capped...), text...), "no such device (gone)"},
		{"text after the request", unix.NLM_F_ACK_TLVS, uncapped, "no such device (gone)"},
		{"request longer than the message", unix.NLM_F_ACK_TLVS, long, "no such device"},
		{"short", 0, []byte{1, 2, 3}, "short rtnetlink error message"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := replyError(header{Flags: tc.flags}, tc.payload)
			if got := errText(err); got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
