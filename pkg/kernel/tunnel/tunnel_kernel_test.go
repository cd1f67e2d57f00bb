// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/test/lab"
)

func families(name string) []prefix.Family {
	switch name {
	case "IPv4":
		return []prefix.Family{prefix.IPv4}
	case "IPv6":
		return []prefix.Family{prefix.IPv6}
	}
	return []prefix.Family{prefix.IPv4, prefix.IPv6}
}

// TestKernelStreams sends data over TCP in both directions between ends in every mode,
// and compares the received data. The kernel of an end without offloads verifies every
// checksum.
//
//stages:rest TestKernelDatagrams has the same ends, and takes a third of the time
func TestKernelStreams(t *testing.T) {
	for _, family := range []string{"IPv4", "IPv6", "dual"} {
		for _, m := range modes() {
			for _, n := range modes() {
				if m.name < n.name || family == "dual" && (m.noDeviceOffloads || n.noDeviceOffloads) {
					continue
				}
				t.Run(family+"/"+m.name+" and "+n.name, func(t *testing.T) {
					l := newTestLab(t, 2, families(family)...)
					a, b := newEnd(t, l, 1, m), newEnd(t, l, 2, n)
					for i := range a.subnets {
						transfer(t, a, b, b.subnets[i].Addr())
						transfer(t, b, a, a.subnets[i].Addr())
					}
					expectNoDrops(t, a, b)
				})
			}
		}
	}
}

// expectNoDrops fails the test if an end has dropped packets, other than those that the
// kernel itself sends on a new device.
func expectNoDrops(t *testing.T, ends ...*end) {
	t.Helper()
	for _, e := range ends {
		for reason, count := range nonzeroDrops(e.Counters) {
			if reason != NoRoute.String() {
				t.Errorf("%d packets dropped: %s", count, reason)
			}
		}
	}
}

// TestKernelDatagrams sends bursts of datagrams, each burst in one system call (UDP_SEGMENT). It
// does so between ends with every combination of offloads, and compares each received datagram.
func TestKernelDatagrams(t *testing.T) {
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		for _, m := range modes() {
			for _, n := range modes() {
				t.Run(f.String()+"/"+m.name+" and "+n.name, func(t *testing.T) {
					l := newTestLab(t, 2, f)
					a, b := newEnd(t, l, 1, m), newEnd(t, l, 2, n)
					exchange(t, a, b, b.subnets[0].Addr())
					expectNoDrops(t, a, b)
				})
			}
		}
	}
}

// exchange sends UDP datagrams of different sizes in bursts. addr is an address of the
// end to. exchange fails the test unless each datagram of a burst arrives unchanged
// before it sends the next burst.
func exchange(t *testing.T, from, to *end, addr netip.Addr) {
	t.Helper()
	waittest.Eventually(t, patience, "ping", func() error { // an IPv6 address may not be ready yet
		_, err := from.Ping(t.Context(), addr, lab.Echo{})
		return err
	})
	var in *net.UDPConn
	err := to.Do(t.Context(), func() (err error) {
		in, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	conn, err := from.Dial(t.Context(), "udp", in.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = in.SetReadDeadline(time.Now().Add(patience))
	r := rand.NewChaCha8([32]byte{2})
	control, got := newSegmentSize(), make([]byte, maxPacket)
	for _, size := range []int{1, 33, 999, 1001, 1399} {
		for _, count := range []int{1, 2, 44} {
			for _, less := range []int{0, size / 3} {
				data := make([]byte, size*count-less)
				_, _ = r.Read(data)
				control.set(size)
				if _, _, err := conn.(*net.UDPConn).WriteMsgUDP(data, control, nil); err != nil {
					t.Fatalf("send %d datagrams of %d bytes: %v", count, size, err)
				}
				for number := range count {
					want := data[number*size : min((number+1)*size, len(data))]
					n, err := in.Read(got)
					if err != nil || !bytes.Equal(got[:n], want) {
						t.Fatalf("datagram %d of %d with %d bytes: %v, or wrong data", number, count, size, err)
					}
				}
			}
		}
	}
}

// transfer sends data over TCP in writes of random sizes, and fails the test unless the
// same data arrives. addr is an address of the end to.
func transfer(t *testing.T, from, to *end, addr netip.Addr) {
	t.Helper()
	const size = 8 << 20
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ln, err := to.Listen(ctx, "tcp", netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	type result struct {
		sum []byte
		n   int64
		err error
	}
	got := make(chan result, 1)
	go func() {
		conn, err := ln.Accept()
		if err != nil {
			got <- result{err: err}
			return
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(patience))
		h := sha256.New()
		n, err := io.Copy(h, conn)
		got <- result{h.Sum(nil), n, err}
	}()
	var conn net.Conn
	waittest.Eventually(t, patience, "connect", func() (err error) { // an IPv6 route may not be ready yet
		conn, err = from.Dial(ctx, "tcp", ln.Addr().String())
		return err
	})
	_ = conn.SetDeadline(time.Now().Add(patience))
	data := make([]byte, size)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(data)
	for rest := data; len(rest) > 0; {
		n := min(len(rest), 1+rand.IntN(100_000))
		if _, err := conn.Write(rest[:n]); err != nil {
			t.Fatal(err)
		}
		rest = rest[n:]
	}
	conn.Close()
	want := sha256.Sum256(data)
	if r := <-got; r.err != nil || r.n != size || !bytes.Equal(r.sum, want[:]) {
		t.Errorf("%d of %d bytes arrived, %v, data equal: %v", r.n, size, r.err, bytes.Equal(r.sum, want[:]))
	}
}

// TestKernelMTU checks that packets of exactly the MTU pass, and larger ones do not.
func TestKernelMTU(t *testing.T) {
	for _, family := range []string{"IPv4", "IPv6", "dual"} {
		t.Run(family, func(t *testing.T) {
			l := newTestLab(t, 2, families(family)...)
			a, b := newEnd(t, l, 1, mode{}), newEnd(t, l, 2, mode{})
			mtu := mtuFor(l.Families())
			for _, s := range b.subnets {
				waittest.Eventually(t, patience, "ping with a full MTU", func() error { // the far end's address may not be ready yet
					_, err := a.Ping(t.Context(), s.Addr(), lab.Echo{Size: mtu, DontFragment: true})
					return err
				})
				if _, err := a.Ping(t.Context(), s.Addr(), lab.Echo{Size: mtu + 1, DontFragment: true, Timeout: patience}); !errors.Is(err, ping.ErrTooBig) {
					t.Errorf("%d bytes: %v", mtu+1, err)
				}
			}
		})
	}
}
