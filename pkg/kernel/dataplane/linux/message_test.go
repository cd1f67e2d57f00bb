// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

func routeMessage(t testing.TB, op dataplane.Op, index int) []byte {
	t.Helper()
	var m message
	encode(&m, &op, index)
	m.finish(7)
	if len(m.buf)%4 != 0 || int(binary.NativeEndian.Uint32(m.buf)) != len(m.buf) {
		t.Fatalf("message of %d bytes has length %d in its header", len(m.buf), binary.NativeEndian.Uint32(m.buf))
	}
	return m.buf
}

// TestRouteRoundTrip checks that parsing an encoded route returns the same route.
func TestRouteRoundTrip(t *testing.T) {
	v4 := dataplane.NewRoute(netip.MustParsePrefix("10.5.3.0/24"), netip.MustParseAddr("10.5.3.0"), "", true)
	v4.TOS, v4.Priority, v4.MTU = 8, 70000, 1300
	v6 := dataplane.NewRoute(netip.MustParsePrefix("fd00:10:5:3::/64"), netip.MustParseAddr("fd00:77::9"), "", false)
	v6.MTU = 1280
	hole := dataplane.Route{RouteKey: dataplane.RouteKey{Dst: v6.Dst, Priority: 1024, Type: dataplane.Unreachable}, Protocol: 4}
	for _, r := range []dataplane.Route{v4, v6, hole} {
		got := parseRoute(routeMessage(t, dataplane.Op{Object: r}, 42)[unix.NLMSG_HDRLEN:])
		if got.route != r || got.oif != 42 || got.table != unix.RT_TABLE_MAIN || got.fromSource {
			t.Errorf("%+v, want %+v", got, r)
		}
	}
	// A delete must contain the next hop. Otherwise the kernel could delete a route with
	// another next hop.
	for _, r := range []dataplane.Route{v4, v6, hole} {
		got := parseRoute(routeMessage(t, dataplane.Op{Delete: true, Object: r}, 42)[unix.NLMSG_HDRLEN:]).route
		if want := r.Gateway; r.Dst.Addr().Is6() && !want.IsValid() {
			r.Gateway = netip.IPv6Unspecified()
		}
		if r.OnLink, r.MTU = false, 0; got != r {
			t.Errorf("delete %+v, want %+v", got, r)
		}
	}
}

func TestAttributesEnd(t *testing.T) {
	var m message
	m.attr(1, []byte("abc"))
	m.attr32(2, 5)
	for cut := range len(m.buf) + 1 {
		n := 0
		for a := range attributes(m.buf[:cut]) {
			n++
			if a.typ == 1 && !bytes.Equal(a.data, []byte("abc")) {
				t.Errorf("%q, want abc", a.data)
			}
		}
		if want := map[bool]int{true: 1}[cut >= 7] + map[bool]int{true: 1}[cut >= 16]; n != want {
			t.Errorf("%d attributes in %d bytes, want %d", n, cut, want)
		}
	}
}

func FuzzAttributes(f *testing.F) {
	f.Add([]byte{8, 0, 1, 0, 1, 2, 3, 4, 5, 0, 2, 0, 9})
	f.Add([]byte{0, 0, 0, 0})
	f.Add([]byte{255, 255, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		total := 0
		for a := range attributes(b) {
			total += 4 + len(a.data)
			_, _ = a.uint32(), a.addr()
		}
		if total > len(b) {
			t.Errorf("attributes of %d bytes in %d", total, len(b))
		}
	})
}

func FuzzParseRoute(f *testing.F) {
	r := dataplane.NewRoute(netip.MustParsePrefix("10.5.3.0/24"), netip.MustParseAddr("10.5.3.0"), "", true)
	f.Add(routeMessage(f, dataplane.Op{Object: r}, 42)[unix.NLMSG_HDRLEN:])
	f.Add([]byte{})
	f.Add(bytes.Repeat([]byte{0xff}, 64))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r := parseRoute(b); r.route.Dst.IsValid() && r.route.Dst.Bits() > r.route.Dst.Addr().BitLen() {
			t.Errorf("destination %s", r.route.Dst)
		}
	})
}

func FuzzReplyError(f *testing.F) {
	f.Add(uint16(unix.NLM_F_ACK_TLVS), append([]byte{0xed, 0xff, 0xff, 0xff, 16, 0, 0, 0}, make([]byte, 20)...))
	f.Add(uint16(unix.NLM_F_ACK_TLVS|unix.NLM_F_CAPPED), bytes.Repeat([]byte{0xff}, 40))
	f.Fuzz(func(_ *testing.T, flags uint16, b []byte) { _ = replyError(header{Flags: flags}, b) })
}
