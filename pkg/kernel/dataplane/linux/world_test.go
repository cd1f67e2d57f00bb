// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// world is the kernel of an anonymous network namespace. It makes the changes of other programs
// through its own socket, and builds most of the messages itself, so that these do not depend on
// the code under test.
type world struct {
	*Kernel
	other *socket
}

var (
	_ subject    = (*world)(nil)
	_ realKernel = (*world)(nil)
)

// newWorld moves the calling goroutine to a new network namespace, which ends with its
// thread and the sockets of the world.
func newWorld(t testing.TB) *world {
	t.Helper()
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("make a network namespace: %v (this test needs root, CAP_SYS_ADMIN in its user namespace)", err)
	}
	k, err := Open(Options{NexthopObjects: true})
	if err != nil {
		t.Fatal(err)
	}
	other, err := openSocket(&Buffers{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(k.Close(), other.close()); err != nil {
			t.Error(err)
		}
	})
	w := &world{k, other}
	if err := w.underlay(); err != nil {
		t.Fatalf("make the underlay: %v", err)
	}
	return w
}

// newContractWorld is newWorld with the type that dataplanetest expects.
func newContractWorld(t testing.TB) subject { return newWorld(t) }

func (w *world) underlay() error {
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0", TxQLen: 1000, MTU: 1500}, PeerName: "peer0"}
	if err := w.links.LinkAdd(veth); err != nil {
		return err
	}
	for _, dev := range []string{"lo", "peer0", "eth0"} {
		if err := w.SetUp(dev, true); err != nil {
			return err
		}
	}
	err := w.Append(
		dataplane.Addr{Dev: "eth0", Prefix: netip.MustParsePrefix("192.168.77.1/24")},
		dataplane.Addr{Dev: "eth0", Prefix: netip.MustParsePrefix("fd00:77::1/64")})
	if err != nil {
		return err
	}
	if err := w.awaitUp("eth0"); err != nil {
		return err
	}
	return w.awaitOwn(netip.MustParseAddr("fd00:77::1"))
}

// awaitUp waits until the kernel has announced that a device is operational, which it does
// in a worker some time after both ends of a veth pair are up.
func (w *world) awaitUp(dev string) error {
	return await(func(context.Context) (string, error) {
		link, err := w.links.LinkByName(dev)
		if err == nil && link.Attrs().OperState != netlink.OperUp {
			return dev + " is " + link.Attrs().OperState.String(), nil
		}
		return "", err
	})
}

// awaitOwn waits until lookups treat an address as one of this host. For IPv6 the kernel
// updates that in a worker.
func (w *world) awaitOwn(a netip.Addr) error {
	return await(func(ctx context.Context) (string, error) {
		dev, err := w.OnLink(ctx, a, "eth0")
		if dev != "" {
			return fmt.Sprintf("%s is still reached through %s", a, dev), err
		}
		return "", err
	})
}

// await calls missing until it returns "", for at most 5 seconds.
func await(missing func(context.Context) (string, error)) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		what, err := missing(ctx)
		if err != nil || what == "" {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, ctx.Err())
		case <-tick.C:
		}
	}
}

// request sends one message as another program, and returns the error in the kernel's
// answer.
func (w *world) request(build func(m *message)) error {
	return w.other.send(context.Background(), 1, func(_ int, m *message) { build(m) })[0]
}

func (w *world) index(dev string) (int, error) {
	index, err := w.linkIndex(dev)
	if err == nil && index == 0 {
		err = fmt.Errorf("%s: %w", dev, unix.ENODEV)
	}
	return index, err
}

func (w *world) Append(objects ...dataplane.Object) error {
	for _, o := range objects {
		if err := w.append(o); err != nil {
			return fmt.Errorf("append %s: %w", o, err)
		}
	}
	return nil
}

func (w *world) append(o dataplane.Object) error {
	if l, ok := o.(dataplane.Link); ok {
		return w.appendLink(l)
	}
	if r, ok := o.(dataplane.Route); ok {
		return w.appendRoute(r)
	}
	index, err := w.index(o.Device())
	if err != nil {
		return err
	}
	return w.request(func(m *message) {
		switch o := o.(type) {
		case dataplane.Addr:
			m.begin(unix.RTM_NEWADDR, unix.NLM_F_CREATE, familyOf(o.Prefix.Addr()), uint8(o.Prefix.Bits()), unix.IFA_F_NODAD, 0)
			m.buf = binary.NativeEndian.AppendUint32(m.buf, uint32(index))
			m.addr(unix.IFA_ADDRESS, o.Prefix.Addr())
			m.addr(unix.IFA_LOCAL, o.Prefix.Addr())
		case dataplane.Neigh:
			w.neigh(m, o, index, unix.NUD_PERMANENT)
		case dataplane.FDB:
			flags := uint16(unix.NLM_F_CREATE | unix.NLM_F_REPLACE)
			if !o.MAC.IsUnicast() { // the kernel never replaces such entries
				flags = unix.NLM_F_CREATE | unix.NLM_F_APPEND
			}
			m.begin(unix.RTM_NEWNEIGH, flags, ndmsg(unix.AF_BRIDGE, index, unix.NUD_PERMANENT|unix.NUD_NOARP, unix.NTF_SELF)...)
			m.attr(unix.NDA_LLADDR, o.MAC[:])
			m.addr(unix.NDA_DST, o.Dst)
			if o.Override {
				m.attr(unix.NDA_PORT, []byte{0x12, 0x34})
			}
		}
	})
}

func (w *world) neigh(m *message, n dataplane.Neigh, index int, state uint16) {
	m.begin(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, ndmsg(familyOf(n.IP), index, state, 0)...)
	m.addr(unix.NDA_DST, n.IP)
	m.attr(unix.NDA_LLADDR, n.MAC[:])
}

// appendLink creates a vxlan device with the attributes of other flannel daemons, or a
// device of another kind.
func (w *world) appendLink(l dataplane.Link) error {
	under := 0
	if l.VXLAN.Underlay != "" {
		var err error
		if under, err = w.index(l.VXLAN.Underlay); err != nil {
			return err
		}
	}
	err := w.request(func(m *message) {
		m.begin(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, ifinfomsg(0)...)
		m.attr(unix.IFLA_IFNAME, []byte(l.Name+"\x00"))
		if l.MTU != 0 {
			m.attr32(unix.IFLA_MTU, uint32(l.MTU))
		}
		if l.MAC != (dataplane.MAC{}) {
			m.attr(unix.IFLA_ADDRESS, l.MAC[:])
		}
		m.attr32(unix.IFLA_TXQLEN, 0)
		m.nest(unix.IFLA_LINKINFO, func() {
			m.attr(unix.IFLA_INFO_KIND, []byte(l.Kind+"\x00"))
			switch l.Kind {
			case "vxlan":
				m.nest(unix.IFLA_INFO_DATA, func() { vxlanData(m, l.VXLAN, under) })
			case "veth":
				m.nest(unix.IFLA_INFO_DATA, func() {
					m.nest(vethInfoPeer, func() {
						m.buf = append(m.buf, ifinfomsg(0)...)
						m.attr(unix.IFLA_IFNAME, []byte(peerOf(l.Name)+"\x00"))
					})
				})
			}
		})
	})
	if err == nil && l.Kind == "veth" {
		err = w.SetUp(peerOf(l.Name), true)
	}
	if err != nil || !l.Up {
		return err
	}
	return w.SetUp(l.Name, true)
}

// vethInfoPeer is VETH_INFO_PEER, for which x/sys has no constant.
const vethInfoPeer = 1

// peerOf returns the name of the other end of the veth pair of dev.
func peerOf(dev string) string { return "peer" + strings.TrimPrefix(dev, "eth") }

func vxlanData(m *message, v dataplane.VXLAN, under int) {
	flag := func(typ uint16, on bool) { m.attr(typ, []byte{map[bool]byte{true: 1}[on]}) }
	m.attr32(unix.IFLA_VXLAN_ID, uint32(v.VNI))
	if under != 0 {
		m.attr32(unix.IFLA_VXLAN_LINK, uint32(under))
	}
	switch {
	case v.Local.Is4():
		m.addr(unix.IFLA_VXLAN_LOCAL, v.Local)
	case v.Local.Is6():
		m.addr(unix.IFLA_VXLAN_LOCAL6, v.Local)
	}
	flag(unix.IFLA_VXLAN_TTL, false)
	flag(unix.IFLA_VXLAN_TOS, false)
	flag(unix.IFLA_VXLAN_LEARNING, v.Learning)
	flag(unix.IFLA_VXLAN_PROXY, false)
	flag(unix.IFLA_VXLAN_RSC, false)
	flag(unix.IFLA_VXLAN_L2MISS, v.Foreign)
	flag(unix.IFLA_VXLAN_L3MISS, false)
	flag(unix.IFLA_VXLAN_UDP_ZERO_CSUM6_TX, false)
	flag(unix.IFLA_VXLAN_UDP_ZERO_CSUM6_RX, false)
	if v.GBP {
		m.attr(unix.IFLA_VXLAN_GBP, nil)
	}
	m.attr(unix.IFLA_VXLAN_PORT, binary.BigEndian.AppendUint16(nil, uint16(v.Port)))
}

func (w *world) appendRoute(r dataplane.Route) error {
	return w.writeRoute(r, unix.NLM_F_CREATE|unix.NLM_F_APPEND)
}

func (w *world) Change(r dataplane.Route) error { return w.writeRoute(r, unix.NLM_F_REPLACE) }

func (w *world) writeRoute(r dataplane.Route, how uint16) error {
	index := 0
	if r.Dev != "" {
		var err error
		if index, err = w.index(r.Dev); err != nil {
			return err
		}
	}
	if r.NexthopID != 0 {
		if err := w.nexthop(r, index); err != nil {
			return fmt.Errorf("nexthop %d: %w", r.NexthopID, err)
		}
	}
	eth0, err := w.index("eth0")
	if err != nil {
		return err
	}
	return w.request(func(m *message) {
		var flags uint32
		if r.OnLink {
			flags = unix.RTNH_F_ONLINK
		}
		m.begin(unix.RTM_NEWROUTE, how,
			rtmsg(r.Dst, r.TOS, unix.RT_TABLE_MAIN, r.Protocol, unix.RT_SCOPE_UNIVERSE, uint8(r.Type), flags)...)
		m.addr(unix.RTA_DST, r.Dst.Addr())
		if r.Priority != 0 {
			m.attr32(unix.RTA_PRIORITY, uint32(r.Priority))
		}
		if r.MTU != 0 {
			m.nest(unix.RTA_METRICS, func() {
				m.attr32(unix.RTAX_MTU, uint32(r.MTU))
				m.attr32(unix.RTAX_LOCK, 1<<unix.RTAX_MTU)
			})
		}
		switch {
		case r.NexthopID != 0:
			m.attr32(rtaNexthopID, r.NexthopID)
		case r.Multipath:
			m.nest(unix.RTA_MULTIPATH, func() { multipath(m, r.Dst.Addr().Is6(), eth0) })
		default:
			if r.Gateway.IsValid() {
				m.addr(unix.RTA_GATEWAY, r.Gateway)
			}
			if index != 0 {
				m.attr32(unix.RTA_OIF, uint32(index))
			}
		}
	})
}

// multipath adds two next hops (struct rtnexthop) through the device with the given index,
// .8 and .9 of eth0's networks.
func multipath(m *message, is6 bool, index int) {
	gateways := []string{"192.168.77.8", "192.168.77.9"}
	if is6 {
		gateways = []string{"fd00:77::8", "fd00:77::9"}
	}
	for _, gw := range gateways {
		start := len(m.buf)
		m.buf = append(m.buf, 0, 0, 0, 0)
		m.buf = binary.NativeEndian.AppendUint32(m.buf, uint32(index))
		m.addr(unix.RTA_GATEWAY, netip.MustParseAddr(gw))
		binary.NativeEndian.PutUint16(m.buf[start:], uint16(len(m.buf)-start))
	}
}

func (w *world) nexthop(r dataplane.Route, index int) error {
	return w.request(func(m *message) {
		m.begin(unix.RTM_NEWNEXTHOP, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, familyOf(r.Gateway), 0, unix.RTPROT_BOOT, 0)
		var flags uint32
		if r.OnLink {
			flags = unix.RTNH_F_ONLINK
		}
		m.buf = binary.NativeEndian.AppendUint32(m.buf, flags)
		m.attr32(unix.NHA_ID, r.NexthopID)
		m.attr32(unix.NHA_OIF, uint32(index))
		m.addr(unix.NHA_GATEWAY, r.Gateway)
	})
}

func (w *world) Remove(objects ...dataplane.Object) error {
	for _, o := range objects {
		err := w.removeOne(o)
		if err != nil && !harmless(&dataplane.Op{Delete: true}, err) {
			return fmt.Errorf("remove %s: %w", o, err)
		}
	}
	return nil
}

func (w *world) removeOne(o dataplane.Object) error {
	if l, ok := o.(dataplane.Link); ok {
		index, err := w.index(l.Name)
		if err != nil {
			return err
		}
		return w.request(func(m *message) { m.begin(unix.RTM_DELLINK, 0, ifinfomsg(index)...) })
	}
	index := 0
	if dev := o.Device(); dev != "" {
		var err error
		if index, err = w.index(dev); err != nil {
			return err
		}
	}
	return w.request(func(m *message) { encode(m, &dataplane.Op{Delete: true, Object: o}, index) })
}

// listener is a monitor with the signal that it sends.
type listener struct {
	*monitor
	changed wait.Signal
}

func (w *world) listen(s dataplane.Scope) (listener, error) {
	changed := wait.NewSignal()
	m, err := w.Monitor(s, changed)
	if err != nil {
		return listener{}, err
	}
	return listener{m.(*monitor), changed}, nil
}

// missed makes the monitor lose the announcements of change: its socket has no room for them.
func (l listener) missed(t *testing.T, change func()) {
	t.Helper()
	room := func(size int) {
		var err error
		ctlErr := l.raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, size) })
		if err := errors.Join(ctlErr, err); err != nil {
			t.Fatal(err)
		}
	}
	room(1)
	change()
	room(monitorBuffer)
}

func (w *world) SetUp(dev string, up bool) error { return w.setFlag(dev, unix.IFF_UP, up) }

func (w *world) SetARP(dev string, on bool) error { return w.setFlag(dev, unix.IFF_NOARP, !on) }

func (w *world) setFlag(dev string, flag uint32, on bool) error {
	index, err := w.index(dev)
	if err != nil {
		return err
	}
	return w.request(func(m *message) {
		body := ifinfomsg(index)
		if on {
			binary.NativeEndian.PutUint32(body[8:], flag)
		}
		binary.NativeEndian.PutUint32(body[12:], flag)
		m.begin(unix.RTM_NEWLINK, 0, body...)
	})
}

func (w *world) SetCarrier(dev string, on bool) error {
	if err := w.SetUp(peerOf(dev), on); err != nil {
		return err
	}
	return w.awaitCarrier(dev, on)
}

// awaitCarrier waits until a device has a carrier, or has none, and the kernel has handled
// that. A kernel worker does so and changes the running flag in the same step. awaitCarrier
// returns at once for a device that is down.
func (w *world) awaitCarrier(dev string, on bool) error {
	index, err := w.index(dev)
	if err != nil {
		return err
	}
	return await(func(context.Context) (string, error) {
		var flags uint32
		err := w.other.ask(func(m *message) { m.begin(unix.RTM_GETLINK, 0, ifinfomsg(index)...) },
			func(_ uint16, payload []byte) { flags = binary.NativeEndian.Uint32(payload[8:]) })
		if flags&unix.IFF_UP == 0 || flags&unix.IFF_RUNNING != 0 == on {
			return "", err
		}
		return fmt.Sprintf("%s has the flags %#x, carrier wanted: %t", dev, flags, on), err
	})
}

// RemoveNexthop implements subject.
func (w *world) RemoveNexthop(id uint32) error {
	err := w.deleteNexthop(id)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func (w *world) Learn(n dataplane.Neigh) error {
	index, err := w.index(n.Dev)
	if err != nil {
		return err
	}
	return w.request(func(m *message) { w.neigh(m, n, index, unix.NUD_REACHABLE) })
}

func (w *world) AcceptRA(dev string) (string, error) {
	b, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + dev + "/accept_ra")
	return strings.TrimSpace(string(b)), err
}
