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

	"flanneld/pkg/ping"
	"flanneld/pkg/prefix"
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

// TestKernelStreams sends data over TCP in both directions, between ends of
// every kind, and compares what arrives. An end without offloads has its kernel
// verify every checksum.
func TestKernelStreams(t *testing.T) {
	for _, family := range []string{"IPv4", "IPv6", "dual"} {
		for _, m := range modes() {
			for _, n := range modes() {
				if m.name < n.name || family == "dual" && (m.plainDevice || n.plainDevice) {
					continue
				}
				t.Run(family+"/"+m.name+" and "+n.name, func(t *testing.T) {
					l := newBed(t, 2, families(family)...)
					a, b := newEnd(t, l, 1, m), newEnd(t, l, 2, n)
					for i := range a.subnets {
						transfer(t, a, b, b.subnets[i].Addr())
						transfer(t, b, a, a.subnets[i].Addr())
					}
					for _, e := range []*end{a, b} {
						for reason, count := range e.Counters.Dropped() {
							if count > 0 && reason != OtherFamily.String() && reason != NoRoute.String() {
								t.Errorf("%d packets dropped: %s", count, reason)
							}
						}
					}
				})
			}
		}
	}
}

// transfer sends data in writes of odd sizes.
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
	eventually(t, "connect", func() (err error) { // an IPv6 route may be a moment late
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
		t.Errorf("%d of %d bytes arrived, %v, and they are the same: %v", r.n, size, r.err, bytes.Equal(r.sum, want[:]))
	}
}

// TestKernelMTU: packets of exactly the MTU pass, and none bigger.
func TestKernelMTU(t *testing.T) {
	for _, family := range []string{"IPv4", "IPv6", "dual"} {
		t.Run(family, func(t *testing.T) {
			l := newBed(t, 2, families(family)...)
			a, b := newEnd(t, l, 1, mode{}), newEnd(t, l, 2, mode{})
			mtu := mtuFor(l.Families())
			for _, s := range b.subnets {
				eventually(t, "ping with a full MTU", func() error { // the far end's address may be a moment late
					_, err := a.Ping(t.Context(), s.Addr(), ping.Options{Size: mtu, DontFragment: true})
					return err
				})
				if _, err := a.Ping(t.Context(), s.Addr(), ping.Options{Size: mtu + 1, DontFragment: true, Timeout: patience}); !errors.Is(err, ping.ErrTooBig) {
					t.Errorf("%d bytes: %v", mtu+1, err)
				}
			}
		})
	}
}
