// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane/dataplanetest"
)

// trafficWorld is a world whose routes use nexthop objects, with a host in another
// namespace behind its tunnels.
type trafficWorld struct {
	*world
	monitors []*monitor
	far      farEnd
}

var (
	_ disturber = (*trafficWorld)(nil)
	_ traffic   = (*trafficWorld)(nil)
)

// remote is the index of the host behind the tunnels.
const remote = 200

// farEnd is the host behind the tunnels: a thread in its own network namespace.
type farEnd struct {
	kernel *Kernel
	world  *world
	calls  chan func()
	conns  map[string]net.PacketConn // by device
}

// do runs work in the network namespace of the far end, and returns its error.
func (f *farEnd) do(work func() error) error {
	done := make(chan error, 1)
	f.calls <- func() { done <- work() }
	return <-done
}

func newTrafficWorld(t testing.TB) *trafficWorld {
	t.Helper()
	w := &trafficWorld{world: newWorld(t), far: farEnd{calls: make(chan func()), conns: map[string]net.PacketConn{}}}
	w.nexthops.threshold = 1
	namespace := make(chan int)
	go func() {
		runtime.LockOSThread() // never unlocked: the namespace ends with the thread
		fd := -1
		if unix.Unshare(unix.CLONE_NEWNET) == nil {
			fd, _ = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		}
		namespace <- fd
		for f := range w.far.calls {
			f()
		}
	}()
	t.Cleanup(func() { close(w.far.calls) })
	fd := <-namespace
	if fd < 0 {
		t.Fatal("no second network namespace")
	}
	peer0, err := w.links.LinkByName("peer0")
	if err == nil {
		err = w.links.LinkSetNsFd(peer0, fd)
	}
	if err := errors.Join(err, unix.Close(fd), w.far.do(func() error { return w.far.setUp(t) })); err != nil {
		t.Fatalf("make the far end: %v", err)
	}
	return w
}

// setUp creates the devices of the far end and starts goroutines that send each packet back.
func (f *farEnd) setUp(t testing.TB) (err error) {
	if f.kernel, err = Open(Options{}); err != nil {
		return err
	}
	t.Cleanup(func() { _ = f.kernel.Close() })
	w := &world{Kernel: f.kernel}
	f.world = w
	if w.other, err = openSocket(&Buffers{}); err != nil {
		return err
	}
	t.Cleanup(func() { _ = w.other.close() })
	err = errors.Join(w.SetUp("lo", true), w.Append(dataplane.Addr{Dev: "peer0", Prefix: netip.MustParsePrefix("192.168.77.200/24")}))
	if err != nil {
		return err
	}
	if err := f.setCarrier(true); err != nil {
		return err
	}
	for i, base := range slices.SortedFunc(maps.Values(dataplanetest.Base().Links), func(a, b dataplane.Link) int { return len(a.Name) - len(b.Name) }) {
		l := base
		far := dataplanetest.Peer(remote, 0)[3*i : 3*i+3]
		n, fdb := far[0].(dataplane.Neigh), far[1].(dataplane.FDB)
		l.MAC, l.VXLAN.Local, l.VXLAN.Underlay = fdb.MAC, farAddr(l.VXLAN.Local), "peer0"
		near := nearAddr(l.Name)
		ops := []dataplane.Op{
			{Object: l}, {Object: dataplane.Addr{Dev: l.Name, Prefix: prefix.Host(n.IP)}},
			{Object: dataplane.NewRoute(prefix.Host(near), netip.Addr{}, l.Name, false)},
		}
		for _, e := range f.kernel.Apply(context.Background(), ops) {
			return e
		}
		conn, err := net.ListenPacket("udp", netip.AddrPortFrom(n.IP, 9).String())
		if err != nil {
			return err
		}
		t.Cleanup(func() { conn.Close() })
		f.conns[l.Name] = conn
		go func() {
			for buf := make([]byte, 64); ; {
				n, from, err := conn.ReadFrom(buf)
				if err != nil {
					return
				}
				_, _ = conn.WriteTo(buf[:n], from)
			}
		}()
	}
	return nil
}

// setCarrier sets the far end's side of the underlay up or down. The kernel deletes the
// IPv6 address of the device when it goes down, so setCarrier adds it again when it sets
// the device up.
func (f *farEnd) setCarrier(on bool) error {
	if err := f.world.SetUp("peer0", on); err != nil || !on {
		return err
	}
	own := netip.MustParseAddr("fd00:77::200")
	err := f.world.Append(dataplane.Addr{Dev: "peer0", Prefix: netip.PrefixFrom(own, 64)})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return f.world.awaitOwn(own)
}

// SetCarrier implements subject.
func (w *trafficWorld) SetCarrier(dev string, on bool) error {
	if dev != "eth0" {
		return w.world.SetCarrier(dev, on)
	}
	if err := w.far.do(func() error { return w.far.setCarrier(on) }); err != nil {
		return err
	}
	return w.awaitCarrier(dev, on)
}

// farAddr returns the far end's address on the underlay, of the family of near.
func farAddr(near netip.Addr) netip.Addr {
	if near.Is4() {
		return netip.MustParseAddr("192.168.77.200")
	}
	return netip.MustParseAddr("fd00:77::200")
}

// nearAddr returns this host's address on the tunnel device dev, or the zero Addr if there
// is no such device.
func nearAddr(dev string) netip.Addr {
	for a := range dataplanetest.Base().Addrs {
		if a.Dev == dev {
			return a.Prefix.Addr()
		}
	}
	return netip.Addr{}
}

// Monitor implements dataplane.Kernel.
func (w *trafficWorld) Monitor(s dataplane.Scope, changed wait.Signal) (dataplane.Monitor, error) {
	m, err := w.world.Monitor(s, changed)
	if err == nil {
		w.monitors = append(w.monitors, m.(*monitor))
	}
	return m, err
}

// Overflow implements disturber. The sockets of the monitors get the smallest
// buffer while another program makes some changes.
func (w *trafficWorld) Overflow() error {
	buffer := func(size int) (err error) {
		for _, m := range w.monitors {
			err = errors.Join(err, m.raw.Control(func(fd uintptr) {
				err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, size))
			}))
		}
		return err
	}
	if err := buffer(1); err != nil {
		return err
	}
	dst := dataplane.NewRoute(netip.MustParsePrefix("10.99.0.0/24"), netip.MustParseAddr("192.168.77.7"), "eth0", false)
	dst.Protocol = unix.RTPROT_STATIC
	for range 20 {
		if err := errors.Join(w.Append(dst), w.Remove(dst)); err != nil {
			return err
		}
	}
	return buffer(monitorBuffer)
}

// DeleteNexthop implements disturber.
func (w *trafficWorld) DeleteNexthop(n int) error {
	return w.changeNexthop(n, func(m *message, id uint32, _ nexthop) {
		m.begin(unix.RTM_DELNEXTHOP, 0, nhmsg(unix.AF_UNSPEC, 0, 0)...)
		m.attr32(unix.NHA_ID, id)
	})
}

// ReplaceNexthop implements disturber.
func (w *trafficWorld) ReplaceNexthop(n int) error {
	return w.changeNexthop(n, func(m *message, id uint32, o nexthop) {
		m.begin(unix.RTM_NEWNEXTHOP, unix.NLM_F_REPLACE, nhmsg(unix.AF_INET, dataplane.Protocol, unix.RTNH_F_ONLINK)...)
		m.attr32(unix.NHA_ID, id)
		m.attr32(unix.NHA_OIF, uint32(o.index))
		m.addr(unix.NHA_GATEWAY, netip.MustParseAddr("172.30.0.9"))
	})
}

// changeNexthop sends the message that build builds for the n-th nexthop object of
// flanneld, from 0 and modulo their number. It does nothing if there is none.
func (w *trafficWorld) changeNexthop(n int, build func(m *message, id uint32, o nexthop)) error {
	w.nexthops.mu.Lock()
	ids := slices.Sorted(maps.Keys(w.nexthops.byID))
	if len(ids) == 0 {
		w.nexthops.mu.Unlock()
		return nil
	}
	id := ids[n%len(ids)]
	o := *w.nexthops.byID[id]
	w.nexthops.mu.Unlock()
	err := w.request(func(m *message) { build(m, id, o) })
	if errors.Is(err, unix.ENOENT) { // the kernel has deleted it with its device
		return nil
	}
	return err
}

// Remote implements traffic.
func (w *trafficWorld) Remote() (objects []dataplane.Object) {
	for _, o := range dataplanetest.Peer(remote, 0) {
		if f, ok := o.(dataplane.FDB); ok {
			f.Dst = farAddr(f.Dst)
			o = f
		}
		objects = append(objects, o)
	}
	return objects
}

// Exchange implements traffic.
func (w *trafficWorld) Exchange(ctx context.Context, s dataplane.State) error {
	for dev, far := range w.far.conns {
		near := nearAddr(dev)
		underlay := dataplanetest.Base().Links[dev].VXLAN.Local
		// As in a network, the far end knows the MAC of this host, which its lease would contain.
		err := w.far.do(func() error {
			for _, e := range w.far.kernel.Apply(ctx, []dataplane.Op{
				{Object: dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: dev, IP: near}, MAC: s.Links[dev].MAC}},
				{Object: dataplane.FDB{FDBKey: dataplane.FDBKey{Dev: dev, MAC: s.Links[dev].MAC}, Dst: underlay}},
			}) {
				return e
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("change the far end: %w", err)
		}
		if err := echo(near, far.LocalAddr().String()); err != nil {
			return fmt.Errorf("through %s: %w", dev, err)
		}
	}
	return nil
}

// echo sends packets until one comes back, and returns an error if none does within 10
// seconds.
func echo(near netip.Addr, far string) error {
	to, err := net.ResolveUDPAddr("udp", far)
	if err != nil {
		return err
	}
	conn, err := net.ListenPacket("udp", netip.AddrPortFrom(near, 0).String())
	if err != nil {
		return err
	}
	defer conn.Close()
	buf := make([]byte, 64)
	for range 50 {
		if _, err = conn.WriteTo([]byte("hello"), to); err != nil {
			return err
		}
		_ = conn.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		var n int
		if n, _, err = conn.ReadFrom(buf); err == nil && string(buf[:n]) == "hello" {
			return nil
		}
	}
	return fmt.Errorf("no answer from %s: %w", far, err)
}
