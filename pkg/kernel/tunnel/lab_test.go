// SPDX-License-Identifier: Apache-2.0

package tunnel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/test/lab"
)

const (
	port     = 8285
	patience = 30 * time.Second
	devName  = "flannel0"
)

// mode disables some of the offloads.
type mode struct {
	name             string
	noDeviceOffloads bool
	noSocketOffloads bool
}

func modes() []mode {
	return []mode{
		{name: "all offloads"},
		{name: "no device offloads", noDeviceOffloads: true},
		{name: "no socket offloads", noSocketOffloads: true},
		{name: "no offloads", noDeviceOffloads: true, noSocketOffloads: true},
	}
}

// withoutDeviceOffloads makes the kernel exchange single, complete packets through the device, like a
// kernel without offloads.
func withoutDeviceOffloads(d *Device) error {
	d.tcp, d.udp = false, false
	return d.control(func(fd int) error { return unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, 0) })
}

func withoutSocketOffloads(s *socket) (err error) {
	s.segments = false
	failed := s.raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_GRO, 0) })
	return errors.Join(failed, err)
}

// end is a host with a tunnel.
type end struct {
	*lab.Host
	*Tunnel
	device  *Device
	table   *Table
	subnets []netip.Prefix
	stop    func() error // closes the tunnel once
}

var networks = []netip.Prefix{netip.MustParsePrefix("10.5.0.0/16"), netip.MustParsePrefix("fd00:10:5::/48")}

// subnetOf returns the subnet of host i of the lab, from 1.
func subnetOf(i int, f prefix.Family) netip.Prefix {
	if f == prefix.IPv6 {
		return netip.MustParsePrefix(fmt.Sprintf("fd00:10:5:%d::/64", i))
	}
	return netip.MustParsePrefix(fmt.Sprintf("10.5.%d.0/24", i))
}

// Peer is a subnet of another host, and the public address of that host.
type Peer struct {
	Subnet netip.Prefix
	Public netip.Addr
}

// update removes peers from the table, and then adds others.
func (t *Table) update(removed, added []Peer) {
	peers := maps.Clone(t.Peers())
	if peers == nil {
		peers = map[netip.Prefix]netip.Addr{}
	}
	for _, p := range removed {
		delete(peers, p.Subnet)
	}
	for _, p := range added {
		peers[p.Subnet] = p.Public
	}
	t.Set(peers)
}

// peersOf returns h, which is host i of the lab, as a peer, once per family.
func peersOf(h *lab.Host, i int, families []prefix.Family) []Peer {
	var peers []Peer
	for _, f := range families {
		peers = append(peers, Peer{Subnet: subnetOf(i, f), Public: h.Addr(f)})
	}
	return peers
}

func newTestLab(t testing.TB, hosts int, families ...prefix.Family) *lab.Lab {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l, err := lab.New(ctx, lab.Config{Hosts: hosts, Families: families, Etcd: lab.EtcdOptions{Disabled: true}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	return l
}

// newEnd creates a tunnel on host i of the lab, from 1, with all other hosts as peers. It
// ends with the test. change may change its configuration.
func newEnd(t testing.TB, l *lab.Lab, i int, m mode, change ...func(*Config)) *end {
	t.Helper()
	ctx := context.Background()
	families := l.Families()
	e := &end{Host: l.Host(i), table: NewTable()}
	for j, h := range l.Hosts() {
		if j+1 != i {
			e.table.update(nil, peersOf(h, j+1, families))
		}
	}
	c := Config{Networks: networks, Table: e.table, Counters: &Counters{}}
	for _, f := range families {
		e.subnets = append(e.subnets, subnetOf(i, f))
		c.Local = append(c.Local, netip.AddrPortFrom(e.Addr(f), port))
		c.Own = append(c.Own, subnetOf(i, f).Addr())
	}
	err := e.Do(ctx, func() (err error) {
		if e.device, err = OpenDevice(devName); err != nil {
			return err
		}
		if err = e.device.AcceptOwn(); err != nil {
			return err
		}
		if m.noDeviceOffloads {
			if err = withoutDeviceOffloads(e.device); err != nil {
				return err
			}
		}
		c.Device = e.device
		for _, f := range change {
			f(&c)
		}
		if e.Tunnel, err = Open(ctx, c); err != nil {
			return err
		}
		if m.noSocketOffloads {
			if err = e.sockets.forEach(withoutSocketOffloads); err != nil {
				return err
			}
		}
		return e.Tunnel.Start()
	})
	if err != nil {
		t.Fatal(err)
	}
	e.stop = sync.OnceValue(e.Tunnel.Close)
	t.Cleanup(func() {
		if err := e.stop(); err != nil {
			t.Error(err)
		}
		if err := e.device.Close(); err != nil {
			t.Error(err)
		}
	})
	e.configure(t, mtuFor(families))
	return e
}

func mtuFor(families []prefix.Family) int {
	mtu := 1500
	for _, f := range families {
		mtu = min(mtu, 1500-Overhead(f == prefix.IPv6))
	}
	return mtu
}

// configure configures the device as the backend does.
func (e *end) configure(t testing.TB, mtu int) {
	t.Helper()
	err := e.Netlink(context.Background(), func(h *netlink.Handle) error {
		link, err := h.LinkByName(devName)
		if err != nil {
			return err
		}
		if err := h.LinkSetMTU(link, mtu); err != nil {
			return err
		}
		if err := h.LinkSetUp(link); err != nil {
			return err
		}
		for _, s := range e.subnets {
			own := toIPNet(netip.PrefixFrom(s.Addr(), s.Addr().BitLen()))
			if err := h.AddrAdd(link, &netlink.Addr{IPNet: own, Flags: 0x02}); err != nil {
				return err
			}
			for _, n := range networks {
				if n.Addr().Is6() == s.Addr().Is6() {
					if err := h.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: toIPNet(n)}); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func toIPNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
