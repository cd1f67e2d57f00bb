// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait/waittest"
	"github.com/flanneld/flanneld/pkg/kernel/tunnel/internal/packet"
	"github.com/flanneld/flanneld/pkg/probe/ping"
	"github.com/flanneld/flanneld/test/lab"
)

// singlePeer is a host that behaves like flannel's udp backend: it sends and receives
// datagrams one by one, each with one packet.
type singlePeer struct {
	*net.UDPConn
	to netip.AddrPort
}

// newSinglePeer creates a singlePeer on the host with number i of the lab, which sends
// to the host with number to. The numbers begin with 1.
func newSinglePeer(t *testing.T, l *lab.Lab, i, to int, f prefix.Family) *singlePeer {
	t.Helper()
	h := l.Host(i)
	p := &singlePeer{to: netip.AddrPortFrom(l.Host(to).Addr(f), port)}
	err := h.Do(context.Background(), func() (err error) {
		p.UDPConn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(h.Addr(f), port)))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.UDPConn.Close() })
	return p
}

func (p *singlePeer) send(t *testing.T, b []byte) {
	t.Helper()
	if _, err := p.WriteToUDPAddrPort(b, p.to); err != nil {
		t.Fatal(err)
	}
}

// receive returns the first packet for which wanted returns true.
func (p *singlePeer) receive(t *testing.T, wanted func([]byte) bool) []byte {
	t.Helper()
	buf := make([]byte, 65535)
	_ = p.SetReadDeadline(time.Now().Add(patience))
	for {
		n, err := p.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		if wanted(buf[:n]) {
			return buf[:n]
		}
	}
}

// echo returns an ICMP echo request from src to dst, with the hop limit ttl.
func echo(src, dst string, ttl byte) []byte {
	from, to := netip.MustParseAddr(src), netip.MustParseAddr(dst)
	if from.Is6() {
		return echo6(from, to, ttl)
	}
	b := make([]byte, 28)
	b[0], b[8], b[9] = 0x45, ttl, unix.IPPROTO_ICMP
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	copy(b[12:], from.AsSlice())
	copy(b[16:], to.AsSlice())
	b[20], b[25] = 8, 7
	binary.BigEndian.PutUint16(b[10:], internetChecksum(b[:20]))
	binary.BigEndian.PutUint16(b[22:], internetChecksum(b[20:]))
	return b
}

func echo6(from, to netip.Addr, hops byte) []byte {
	b := make([]byte, 48)
	b[0], b[5], b[6], b[7] = 0x60, 8, unix.IPPROTO_ICMPV6, hops
	copy(b[8:], from.AsSlice())
	copy(b[24:], to.AsSlice())
	b[40], b[45] = 128, 7
	pseudo := append(bytes.Clone(b[8:40]), 0, 0, 0, 8, 0, 0, 0, unix.IPPROTO_ICMPV6)
	binary.BigEndian.PutUint16(b[42:], internetChecksum(append(pseudo, b[40:]...)))
	return b
}

func internetChecksum(b []byte) uint16 {
	var s uint32
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for s>>16 != 0 {
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}

func isEchoReply(b []byte) bool { return len(b) == 28 && b[9] == 1 && b[20] == 0 }

// TestKernelPlainPeer pings a host with a tunnel from a singlePeer. It runs with every
// combination of offloads, and checks TTL and checksums of the reply.
func TestKernelPlainPeer(t *testing.T) {
	for _, m := range modes() {
		t.Run(m.name, func(t *testing.T) {
			l := newTestLab(t, 2, prefix.IPv4)
			newEnd(t, l, 1, m)
			p := newSinglePeer(t, l, 2, 1, prefix.IPv4)
			p.send(t, echo("10.5.2.7", "10.5.1.0", 9))
			b := p.receive(t, isEchoReply)
			if internetChecksum(b[:20]) != 0 || internetChecksum(b[20:]) != 0 || b[8] != 63 {
				t.Errorf("checksums or TTL of the reply are wrong: %x", b)
			}
		})
	}
}

// nonzeroDrops returns the counters of dropped packets that are not zero, by reason. It
// leaves out OtherFamily, because the kernel itself sends such packets on a new device.
func nonzeroDrops(c *Counters) map[string]uint64 {
	all := map[string]uint64{}
	for reason, n := range c.Dropped() {
		if n > 0 && reason != OtherFamily.String() {
			all[reason] = n
		}
	}
	return all
}

// sources returns source addresses for packets that host 2 sends to host 1, by the owner
// of the address.
func sources(f prefix.Family, host1 *lab.Host) map[string]string {
	of := func(i int) string { return subnetOf(i, f).Addr().Next().String() }
	foreign := "203.0.113.9"
	if f == prefix.IPv6 {
		foreign = "2001:db8::9"
	}
	return map[string]string{
		"own": of(2), "foreign": foreign, "other peer's": of(3), "no peer's": of(77), "this host's": of(1),
		"this host's public": host1.Addr(f).String(),
	}
}

type damage struct {
	b    []byte
	want Reason
}

// damaged returns variants of the valid packet good, each with one defect and the reason
// for which it must be dropped.
func damaged(good []byte) map[string]damage {
	change := func(at int, to ...byte) []byte {
		b := bytes.Clone(good)
		copy(b[at:], to)
		return b
	}
	all := map[string]damage{
		"empty": {nil, Malformed}, "short": {good[:19], Malformed}, "cut off": {good[:len(good)-1], Malformed}, "IPv5": {change(0, 0x55), Malformed},
	}
	if good[0]>>4 == 6 {
		all["39 bytes"] = damage{good[:39], Malformed}
		return all
	}
	all["header of 16 bytes"] = damage{change(0, 0x44), Malformed}
	all["wrong checksum"] = damage{change(10, 0), WrongChecksum}
	return all
}

// TestKernelSourceCheck sends packets from each kind of source, damaged packets and packets
// of a removed peer. It checks with which reason each one is dropped. The reason 0 in the
// tables below means that the packet must arrive.
func TestKernelSourceCheck(t *testing.T) {
	for check, want := range map[SourceCheck]map[string]Reason{
		CheckNetwork: {"own": 0, "foreign": 0, "other peer's": WrongSource, "no peer's": WrongSource, "this host's": WrongSource, "this host's public": WrongSource},
		CheckStrict:  {"own": 0, "foreign": WrongSource, "other peer's": WrongSource, "no peer's": WrongSource, "this host's": WrongSource, "this host's public": WrongSource},
		CheckOff:     {"own": 0, "foreign": 0, "other peer's": 0, "no peer's": 0},
		"":           {"own": 0, "foreign": 0, "other peer's": WrongSource, "this host's public": WrongSource},
	} {
		for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
			t.Run(fmt.Sprintf("check %s/%s", check, f), func(t *testing.T) { sourceCheck(t, check, f, want) })
		}
	}
}

func sourceCheck(t *testing.T, check SourceCheck, f prefix.Family, want map[string]Reason) {
	l := newTestLab(t, 3, f)
	e := newEnd(t, l, 1, mode{}, func(c *Config) { c.Check = check })
	p, other := newSinglePeer(t, l, 2, 1, f), newSinglePeer(t, l, 3, 1, f)
	from, dst := sources(f, l.Host(1)), subnetOf(1, f).Addr().String()
	expected := map[string]uint64{}
	received := uint64(0)
	send := func(by *singlePeer, b []byte, reason Reason) {
		by.send(t, b)
		if reason != 0 {
			expected[reason.String()]++
		} else {
			received++
		}
	}
	for source, reason := range want {
		send(p, echo(from[source], dst, 9), reason)
	}
	good := echo(from["own"], dst, 9)
	for _, d := range damaged(good) {
		send(p, d.b, d.want)
	}
	send(p, echo(from["own"], dst, 1), HopsExceeded)
	p.send(t, map[prefix.Family][]byte{ // valid packets of the other family
		prefix.IPv4: echo("fd00:10:5:2::7", "fd00:10:5:1::", 9), prefix.IPv6: echo("10.5.2.7", "10.5.1.0", 9),
	}[f])
	theirs := echo(from["other peer's"], dst, 9)
	send(other, theirs, 0)
	send(p, theirs, want["other peer's"]) // the same packet directly after that, but from a peer that may not send it
	send(other, theirs, 0)                // the last packet before the peer is removed
	waittest.Eventually(t, patience, "packets of two peers", func() error {
		if n := e.Counters.Received(); n != received {
			return fmt.Errorf("%d packets received, want %d", n, received)
		}
		return nil
	})
	e.table.update(peersOf(l.Host(3), 3, l.Families()), nil)
	if check == CheckOff {
		send(other, good, 0)
	} else {
		send(other, good, UnknownPeer)
	}
	waittest.Eventually(t, patience, "counters", func() error {
		have := nonzeroDrops(e.Counters)
		delete(have, NoRoute.String()) // some of the host's replies go to addresses that no peer has
		if diff := cmp.Diff(expected, have); diff != "" {
			return errors.New(diff)
		}
		if n := e.Counters.Received(); n != received {
			return fmt.Errorf("%d packets received, want %d", n, received)
		}
		return nil
	})
}

// datagram returns an IP packet that contains a UDP datagram from and to the same port.
func datagram(src, dst string, port uint16, payload string) []byte {
	if len(payload)%2 != 0 {
		payload += " "
	}
	from, to := netip.MustParseAddr(src).AsSlice(), netip.MustParseAddr(dst).AsSlice()
	udp := make([]byte, 8, 8+len(payload))
	binary.BigEndian.PutUint16(udp, port)
	binary.BigEndian.PutUint16(udp[2:], port)
	binary.BigEndian.PutUint16(udp[4:], uint16(8+len(payload)))
	udp = append(udp, payload...)
	pseudo := slices.Concat(from, to, []byte{0, unix.IPPROTO_UDP}, udp[4:6], udp)
	binary.BigEndian.PutUint16(udp[6:], internetChecksum(pseudo))
	ip := make([]byte, 8, 40)
	if len(from) == 16 {
		ip[0], ip[6], ip[7] = 0x60, unix.IPPROTO_UDP, 9
		binary.BigEndian.PutUint16(ip[4:], uint16(len(udp)))
		return slices.Concat(ip, from, to, udp)
	}
	ip = slices.Concat(ip, []byte{9, unix.IPPROTO_UDP, 0, 0}, from, to)
	ip[0] = 0x45
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(udp)))
	binary.BigEndian.PutUint16(ip[10:], internetChecksum(ip))
	return append(ip, udp...)
}

// TestKernelLoopbackServices checks that a peer can neither reach services on a loopback
// address nor broadcast on the host, even if the host routes loopback addresses as
// kube-proxy configures it.
func TestKernelLoopbackServices(t *testing.T) {
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		for _, check := range []SourceCheck{CheckNetwork, CheckStrict, CheckOff} {
			t.Run(fmt.Sprintf("%s/%s", f, check), func(t *testing.T) { loopbackServices(t, f, check) })
		}
	}
}

func loopbackServices(t *testing.T, f prefix.Family, check SourceCheck) {
	const service = 9999
	l := newTestLab(t, 2, f)
	e := newEnd(t, l, 1, mode{}, func(c *Config) { c.Check = check })
	if out, err := e.Exec(t.Context(), "sysctl", "-w", "net.ipv4.conf.all.route_localnet=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf."+devName+".rp_filter=0"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var in *net.UDPConn
	err := e.Do(t.Context(), func() (err error) {
		in, err = net.ListenUDP("udp", &net.UDPAddr{Port: service})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	from, to, none := "10.5.2.7", "10.5.1.0", []string{"127.0.0.1", "127.7.7.7", "224.0.0.1", "255.255.255.255", "0.0.0.0"}
	if f == prefix.IPv6 {
		from, to, none = "fd00:10:5:2::7", "fd00:10:5:1::", []string{"::1", "ff02::1", "::"}
	}
	p := newSinglePeer(t, l, 2, 1, f)
	waittest.Eventually(t, patience, "packets of the peer", func() error { // an address may not be ready yet
		p.send(t, datagram(from, to, service, "ready"))
		_ = in.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		_, err := in.Read(make([]byte, 100))
		return err
	})
	// The host's own packets, such as those of MLD, count as no_route at any time.
	drops := func() map[string]uint64 {
		all := nonzeroDrops(e.Counters)
		delete(all, NoRoute.String())
		return all
	}
	want := drops()
	for _, a := range none {
		p.send(t, datagram(from, a, service, "to "+a))
		p.send(t, datagram(a, to, service, "from "+a))
		p.send(t, datagram(a, a, service, "from and to "+a))
	}
	want["wrong_destination"], want["wrong_source"] = uint64(len(none)), uint64(2*len(none))
	p.send(t, datagram(from, to, service, "last"))
	buf := make([]byte, 100)
	for {
		_ = in.SetReadDeadline(time.Now().Add(patience))
		n, err := in.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		switch got := strings.TrimSpace(string(buf[:n])); got {
		case "ready":
			continue
		case "last":
			if diff := cmp.Diff(want, drops()); diff != "" {
				t.Errorf("dropped (-want +got):\n%s", diff)
			}
			return
		default:
			t.Errorf("the service received a packet that was sent %s", got)
		}
	}
}

// listenICMP returns a socket that receives ICMP messages on the host.
func listenICMP(t *testing.T, h *lab.Host) net.PacketConn {
	t.Helper()
	var conn net.PacketConn
	err := h.Do(context.Background(), func() (err error) {
		conn, err = net.ListenPacket("ip4:icmp", "0.0.0.0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	return conn
}

// sendUDP sends a UDP datagram from the host. size is the length in bytes of the IP packet,
// and discover the value of IP_MTU_DISCOVER.
func sendUDP(t *testing.T, h *lab.Host, dst string, ttl, size, discover int) {
	t.Helper()
	err := h.Do(context.Background(), func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, ttl),
			unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, discover))
		if err != nil {
			return err
		}
		return unix.Sendto(fd, make([]byte, size-28), 0, &unix.SockaddrInet4{Port: 9, Addr: netip.MustParseAddr(dst).As4()})
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestKernelICMPErrors checks that a sender gets an ICMP error if no peer has the
// destination, or if the hop limit is used up.
func TestKernelICMPErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		dst       string
		ttl       int
		typ, code byte
		reason    Reason
	}{
		"no route": {"10.5.99.1", 64, 3, 0, NoRoute},
		"no hops":  {"10.5.2.1", 1, 11, 0, HopsExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			l := newTestLab(t, 2, prefix.IPv4)
			e := newEnd(t, l, 1, mode{})
			conn := listenICMP(t, e.Host)
			sendUDP(t, e.Host, tc.dst, tc.ttl, 100, unix.IP_PMTUDISC_DO)
			buf := make([]byte, 1500)
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				t.Fatal(err)
			}
			if buf[0] != tc.typ || buf[1] != tc.code || from.String() != "10.5.1.0" || n != 8+28 {
				t.Errorf("type %d code %d from %s, %d bytes", buf[0], buf[1], from, n)
			}
			if got := nonzeroDrops(e.Counters)[tc.reason.String()]; got != 1 {
				t.Errorf("counted %d times", got)
			}
		})
	}
}

// TestKernelPathMTU tests a path to the peer with a small MTU. The sender of a large
// packet that must not be fragmented gets the MTU in an ICMP error. Other packets arrive
// in fragments, and streams continue.
func TestKernelPathMTU(t *testing.T) {
	for _, m := range modes() {
		t.Run(m.name, func(t *testing.T) {
			l := newTestLab(t, 2, prefix.IPv4)
			a, b := newEnd(t, l, 1, m), newEnd(t, l, 2, m)
			addRouteWithMTU(t, a.Host, b.Host, prefix.IPv4, 1300)
			addRouteWithMTU(t, b.Host, a.Host, prefix.IPv4, 1300)
			conn := listenICMP(t, a.Host)
			sendUDP(t, a.Host, "10.5.2.0", 64, 1400, unix.IP_PMTUDISC_PROBE)
			buf := make([]byte, 1500)
			if _, _, err := conn.ReadFrom(buf); err != nil {
				t.Fatal(err)
			}
			if mtu := binary.BigEndian.Uint16(buf[6:]); buf[0] != 3 || buf[1] != 4 || mtu != 1300-28 {
				t.Errorf("type %d code %d MTU %d", buf[0], buf[1], mtu)
			}
			expectFragmented(t, a, b, 2)
			transfer(t, a, b, b.subnets[0].Addr())
		})
	}
}

// TestKernelPathMTUIPv6 tests a path with a small MTU. The sender of large packets or
// fragments gets the MTU in an ICMP error. On a path with the minimum MTU of IPv6, a packet
// of that size must arrive nevertheless, in a datagram that is fragmented.
func TestKernelPathMTUIPv6(t *testing.T) {
	for _, m := range modes() {
		for _, mtu := range []int{1400, 1280} {
			t.Run(fmt.Sprintf("%s/%d", m.name, mtu), func(t *testing.T) {
				l := newTestLab(t, 2, prefix.IPv6)
				a, b := newEnd(t, l, 1, m), newEnd(t, l, 2, m)
				addRouteWithMTU(t, a.Host, b.Host, prefix.IPv6, mtu)
				addRouteWithMTU(t, b.Host, a.Host, prefix.IPv6, mtu)
				dst := b.subnets[0].Addr()
				waittest.Eventually(t, patience, "ping in fragments", func() error {
					_, err := a.Ping(t.Context(), dst, lab.Echo{Size: 3000, Timeout: 300 * time.Millisecond})
					return err
				})
				most := max(mtu-Overhead(true), packet.MinMTU6)
				if _, err := a.Ping(t.Context(), dst, lab.Echo{Size: most, DontFragment: true, Timeout: patience}); err != nil {
					t.Errorf("%d bytes: %v", most, err)
				}
				if _, err := a.Ping(t.Context(), dst, lab.Echo{Size: most + 1, DontFragment: true}); !errors.Is(err, ping.ErrTooBig) {
					t.Errorf("%d bytes: %v", most+1, err)
				}
				transfer(t, a, b, dst)
			})
		}
	}
}

// addRouteWithMTU adds a route with its own MTU from one host to another.
func addRouteWithMTU(t *testing.T, from, to *lab.Host, f prefix.Family, mtu int) {
	t.Helper()
	err := from.Netlink(context.Background(), func(h *netlink.Handle) error {
		link, err := h.LinkByName("eth0")
		if err != nil {
			return err
		}
		return h.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: toIPNet(prefix.Host(to.Addr(f))), MTU: mtu})
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestKernelPathMTUBySource checks that packets arrive over a path with a small MTU that
// only the tunnel's datagrams take: the host routes by source address or by port, and the
// tunnel uses the host's second address.
func TestKernelPathMTUBySource(t *testing.T) {
	for version, second := range map[string]string{"-4": "192.168.77.201", "-6": "fd00:77::201"} {
		public := netip.MustParseAddr(second)
		f := prefix.FamilyOf(public)
		for _, rule := range []string{"from " + second, "ipproto udp sport 8285"} {
			t.Run(f.String()+"/"+rule, func(t *testing.T) {
				l := newTestLab(t, 2, f)
				h, far := l.Host(1), l.Host(2).Addr(f)
				for _, command := range []string{
					"addr add " + prefix.Host(public).String() + " dev eth0 nodad preferred_lft 0", // by default the host uses its first address
					"rule add " + rule + " lookup 100",
					"route add " + far.String() + " dev eth0 mtu 1400 table 100",
				} {
					if out, err := h.Exec(t.Context(), "ip", append([]string{version}, strings.Fields(command)...)...); err != nil {
						t.Fatalf("ip %s: %v: %s", command, err, out)
					}
				}
				a := newEnd(t, l, 1, mode{}, func(c *Config) { c.Local = []netip.AddrPort{netip.AddrPortFrom(public, port)} })
				b := newEnd(t, l, 2, mode{})
				b.table.update(peersOf(h, 1, l.Families()), []Peer{{Subnet: subnetOf(1, f), Public: public}})
				if f == prefix.IPv4 {
					expectFragmented(t, a, b, 2)
				}
				transfer(t, a, b, b.subnets[0].Addr())
			})
		}
	}
}

// expectFragmented sends an IPv4 packet of the device's MTU from a to b. The packet may be
// fragmented. expectFragmented fails the test unless exactly want fragments arrive at b.
func expectFragmented(t *testing.T, a, b *end, want uint64) {
	t.Helper()
	before := b.Counters.Received()
	sendUDP(t, a.Host, b.subnets[0].Addr().String(), 64, mtuFor([]prefix.Family{prefix.IPv4}), unix.IP_PMTUDISC_DONT)
	waittest.Eventually(t, patience, "fragments", func() error {
		if n := b.Counters.Received() - before; n != want {
			return fmt.Errorf("%d packets, want %d", n, want)
		}
		return nil
	})
}

// TestKernelDeviceDeleted checks that a tunnel ends with an error when its device is
// deleted.
func TestKernelDeviceDeleted(t *testing.T) {
	l := newTestLab(t, 1, prefix.IPv4)
	e := newEnd(t, l, 1, mode{})
	err := e.Netlink(t.Context(), func(h *netlink.Handle) error {
		link, err := h.LinkByName(devName)
		if err != nil {
			return err
		}
		return h.LinkDel(link)
	})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-e.Done():
	case <-time.After(patience):
		t.Fatal("the tunnel has not ended")
	}
	if e.Err() == nil || e.device.Alive() {
		t.Errorf("error %v, alive: %v", e.Err(), e.device.Alive())
	}
}

// TestKernelPersistence checks that only a persistent device still exists after Close,
// and that OpenDevice opens it again, also if it was created with several queues. While
// a device is open, it cannot be opened again.
func TestKernelPersistence(t *testing.T) {
	l := newTestLab(t, 1, prefix.IPv4)
	h := l.Host(1)
	indexOf := func() (index int) {
		t.Helper()
		err := h.Netlink(t.Context(), func(nl *netlink.Handle) error {
			link, err := nl.LinkByName(devName)
			if errors.As(err, &netlink.LinkNotFoundError{}) {
				return nil
			}
			if err == nil {
				index = link.Attrs().Index
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return index
	}
	open := func() *Device {
		t.Helper()
		var d *Device
		if err := h.Do(t.Context(), func() (err error) { d, err = OpenDevice(devName); return err }); err != nil {
			t.Fatal(err)
		}
		return d
	}
	d := open()
	if err := d.Persist(true); err != nil {
		t.Fatal(err)
	}
	index := indexOf()
	if err := h.Do(t.Context(), func() error { _, err := OpenDevice(devName); return err }); !errors.Is(err, unix.EBUSY) {
		t.Errorf("a device in use was opened again: %v", err)
	}
	d.Close()
	d = open()
	if indexOf() != index {
		t.Error("the device is another one")
	}
	if err := d.Persist(false); err != nil {
		t.Fatal(err)
	}
	d.Close()
	if indexOf() != 0 {
		t.Error("the device still exists")
	}
	if out, err := h.Exec(t.Context(), "ip", "tuntap", "add", devName, "mode", "tun", "multi_queue"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	index = indexOf()
	d = open()
	defer d.Close()
	if indexOf() != index {
		t.Error("a device with several queues was not adopted")
	}
}

// TestKernelOtherDevice checks that OpenDevice returns an error if a bridge has the
// name of the device.
func TestKernelOtherDevice(t *testing.T) {
	l := newTestLab(t, 1, prefix.IPv4)
	h := l.Host(1)
	if out, err := h.Exec(t.Context(), "ip", "link", "add", devName, "type", "bridge"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := h.Do(t.Context(), func() error { _, err := OpenDevice(devName); return err }); err == nil {
		t.Error("a bridge was opened as a TUN device")
	}
}

// TestKernelCloseUnderLoad checks that Close ends a tunnel although packets keep
// arriving.
func TestKernelCloseUnderLoad(t *testing.T) {
	l := newTestLab(t, 2, prefix.IPv4)
	e := newEnd(t, l, 1, mode{})
	p := newSinglePeer(t, l, 2, 1, prefix.IPv4)
	request := echo("10.5.2.7", "10.5.1.0", 9)
	const many = 64
	load, gathered := bytes.Repeat(request, many), newSegmentSize()
	gathered.set(len(request))
	var sending sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		sending.Go(func() {
			for {
				select {
				case <-stop:
					return
				default: // the host returns an error when it no longer listens
					_, _, _ = p.WriteMsgUDPAddrPort(load, gathered, p.to)
				}
			}
		})
	}
	defer sending.Wait()
	defer close(stop)
	waittest.Eventually(t, patience, "load", func() error {
		if got := e.Counters.Received(); got < 100*many {
			return fmt.Errorf("%d packets received", got)
		}
		return nil
	})
	closed := make(chan error, 1)
	go func() { closed <- e.stop() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("the tunnel is still open")
	}
}
