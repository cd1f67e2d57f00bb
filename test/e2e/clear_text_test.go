// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/lab"
)

// marker is the payload of the packets that sendMarkers sends.
const marker = "this packet is not encrypted"

// sendMarkers makes a pod send UDP packets with the payload marker to another pod in all families of the
// lab, many times a second, until the test ends or stop is called.
func sendMarkers(t *testing.T, l *lab.Lab, from, to *lab.Pod) (stop func()) {
	t.Helper()

	interval := 5 * time.Millisecond
	if emulated() {
		// The kernel handles packets before it runs processes. 2,400 a second, each copied for the
		// captures, take so much of an emulated CPU that etcd does not answer within 5 s.
		interval *= 10
	}

	var conns []net.Conn
	for _, f := range l.Families() {
		conn, err := from.Dial(testContext(t), "udp", netip.AddrPortFrom(to.Addr(f), 9).String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conns = append(conns, conn)
		go func() {
			tick := time.NewTicker(interval)
			defer tick.Stop()
			for range tick.C {
				if _, err := conn.Write([]byte(marker)); errors.Is(err, net.ErrClosed) {
					return
				}
			}
		}()
	}
	return func() {
		for _, conn := range conns {
			conn.Close()
		}
	}
}

// capture counts the frames that a host sends through eth0: all, and those with a marker in clear text.
type capture struct{ frames, marked atomic.Int64 }

// captureSent starts a capture on a host. The capture counts until the test ends.
func captureSent(t *testing.T, h *lab.Host) *capture {
	t.Helper()
	c := &capture{}
	captureFrames(t, h, func(frame []byte) {
		c.frames.Add(1)
		if bytes.Contains(frame, []byte(marker)) {
			c.marked.Add(1)
		}
	})
	return c
}

// captureFrames calls the function on with each frame that a host sends through eth0, until the test ends.
// All calls come from one goroutine. The function on must not keep the frame after it returns. The test
// fails if the kernel has dropped frames of the capture. The result drained returns nil when no captured
// frame waits for its call, and otherwise an error.
func captureFrames(t *testing.T, h *lab.Host, on func(frame []byte)) (drained func() error) {
	t.Helper()
	fd := -1
	err := h.Do(testContext(t), func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		var all [2]byte
		binary.BigEndian.PutUint16(all[:], unix.ETH_P_ALL)
		protocol := binary.NativeEndian.Uint16(all[:])
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol)); err != nil {
			return err
		}
		timeout := unix.NsecToTimeval(int64(100 * time.Millisecond))
		const buffer = 64 << 20
		return errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: eth0.Index}))
	})
	if err != nil {
		t.Fatal(err)
	}
	ended, ctx := make(chan struct{}), t.Context()
	go func() {
		defer close(ended)
		defer unix.Close(fd)
		defer func() {
			stats, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
			if err != nil || stats.Drops > 0 {
				t.Errorf("the capture at %s has dropped frames, which could have been clear text: %+v, %v", h.Name(), stats, err)
			}
		}()
		for buf := make([]byte, 1<<16); ctx.Err() == nil; {
			n, from, err := unix.Recvfrom(fd, buf, 0)
			if at, ok := from.(*unix.SockaddrLinklayer); err != nil || !ok || at.Pkttype != unix.PACKET_OUTGOING {
				continue
			}
			on(buf[:n])
		}
	}()
	t.Cleanup(func() { <-ended })
	return func() error {
		if n, err := unix.IoctlGetInt(fd, unix.SIOCINQ); err != nil || n > 0 {
			return fmt.Errorf("a frame of %d bytes waits: %w", n, err)
		}
		return nil
	}
}

// TestBackendMigrationEndsClearText migrates from vxlan to wireguard. As soon as flannelctl on a host says
// that no packet to a peer leaves the host in clear text, a capture on the host must find none.
//
//stages:rest it makes one more migration
func TestBackendMigrationEndsClearText(t *testing.T) {
	t.Parallel()
	testClearTextEnds(t, userspace)
}

// TestVMBackendMigrationEndsClearText is TestBackendMigrationEndsClearText with the kernel's WireGuard.
//
//stages:rest the kernel of the guest is emulated, which takes minutes
func TestVMBackendMigrationEndsClearText(t *testing.T) {
	t.Parallel()
	testClearTextEnds(t, "wireguard")
}

func testClearTextEnds(t *testing.T, wireguard string) {
	t.Helper()
	l := newLab(t, lab.Config{Hosts: 3, Families: dual}, backendConfig("vxlan"))
	startAll(t, l, oneByOne())
	expectConverged(t, l)
	var captures []*capture
	for i, h := range l.Hosts() {
		captures = append(captures, captureSent(t, h))
		for j := range l.Hosts() {
			if i != j {
				sendMarkers(t, l, l.Pods()[i], l.Pods()[j])
			}
		}
	}
	for i, c := range captures {
		eventually(t, fmt.Sprintf("host%d sends packets in clear text", i+1), func() error {
			if c.marked.Load() == 0 {
				return fmt.Errorf("none of %d frames", c.frames.Load())
			}
			return nil
		})
	}
	const says = "no packet to a peer leaves this host in clear text"
	status := func(h *lab.Host) string {
		out, err := flannelctl(t, h, "migrate", "status", "--socket="+h.Path(socket))
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return out
	}
	migrate(t, l, "vxlan", wireguard, l.Host(1), l.Host(2))
	eventuallyCarriedBy(t, l.Host(1), "wireguard", l.Host(2))
	if out := status(l.Host(1)); strings.Contains(out, says) {
		t.Errorf("host1 still sends to host3 by vxlan, but flannelctl prints\n%s", out)
	}
	follow(t, l.Host(3))
	for i, h := range l.Hosts() {
		within(t, 2*patience, h.Name()+" sends nothing in clear text", func() error {
			if out := status(h); !strings.Contains(out, says) {
				return errors.New(out)
			}
			return nil
		})
		c := captures[i]
		frames, marked := c.frames.Load(), c.marked.Load()
		pause(t, time.Second)
		if n := c.marked.Load() - marked; n > 0 {
			t.Errorf("%s sends %d frames in clear text", h.Name(), n)
		}
		if c.frames.Load() == frames {
			t.Errorf("%s sends nothing at all", h.Name())
		}
	}
}

// TestNothingLeavesWithoutTheTunnel removes the routes and the device of wireguard, as another program could
// do it, while pods send. No packet of theirs may leave the host in clear text by the default route.
func TestNothingLeavesWithoutTheTunnel(t *testing.T) {
	t.Parallel()
	l := newLab(t, lab.Config{Hosts: 2, Families: dual}, backendConfig(userspace))
	startAll(t, l, lab.FlanneldOptions{})
	expectConverged(t, l)
	h := l.Host(1)
	c := captureSent(t, h)
	sendMarkers(t, l, l.Pods()[0], l.Pods()[1])
	for _, damage := range []string{
		"ip route flush dev flannel-wg; ip -6 route flush dev flannel-wg-v6",
		"ip link set flannel-wg down; ip link set flannel-wg-v6 down",
		"ip link del flannel-wg; ip link del flannel-wg-v6",
	} {
		for range 5 {
			shell(t, h.Namespace, damage)
			expectConverged(t, l)
		}
		if n := c.marked.Load(); n > 0 {
			t.Fatalf("%d of %d frames left in clear text after %q", n, c.frames.Load(), damage)
		}
	}
	if c.frames.Load() == 0 {
		t.Error("the capture has seen no frame")
	}
}
