// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// monitorBuffer is the size in bytes of a receive buffer for announcements of about ten
// thousand changes.
const monitorBuffer = 32 << 20

// monitor implements dataplane.Monitor.
type monitor struct {
	kernel *Kernel
	scope  dataplane.Scope
	conn   *netlink.Conn   // the socket
	raw    syscall.RawConn // of conn, for reads that never wait
	ready  wait.Signal
	resume wait.Signal // Drain sends it, so that watch waits for the next announcement
	wg     sync.WaitGroup

	names  map[int]string // names of the devices in Scope.Devices and Scope.Shared, by index
	others map[int]string // names of other devices that routes use, by index
	own    uint32         // port of the socket that this process writes to
	// links contains the last announced state of each device in names, and of other devices
	// that routes use. It stays when the cache becomes invalid, because the next read of
	// the kernel happens after these announcements. It is cleared if the monitor has missed
	// announcements.
	links map[int]linkDetails
}

// Monitor implements dataplane.Kernel.
func (k *Kernel) Monitor(s dataplane.Scope, changed wait.Signal) (dataplane.Monitor, error) {
	conn, err := netlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink socket: %w", err)
	}
	m := &monitor{
		kernel: k, scope: s, conn: conn,
		ready: changed, resume: wait.NewSignal(),
		links: map[int]linkDetails{},
	}
	err = m.subscribe()
	if err == nil {
		m.raw, err = conn.SyscallConn()
	}
	if err == nil {
		m.own, err = k.sock.port()
	}
	if err != nil {
		return nil, oneline.Join(fmt.Errorf("subscribe to kernel changes: %w", err), conn.Close())
	}

	m.resolveDevices()
	m.resume.Send()
	m.wg.Go(m.watch)
	return m, nil
}

// subscribe joins the multicast groups that the scope needs.
func (m *monitor) subscribe() error {
	// Without CAP_NET_ADMIN in the first user namespace, net.core.rmem_max limits the buffer.
	_ = m.conn.SetReadBuffer(monitorBuffer)

	groups := []uint32{unix.RTNLGRP_LINK}
	if len(m.scope.Devices) > 0 {
		groups = append(groups, unix.RTNLGRP_NEIGH)
	}
	for _, f := range families(m.scope) {
		if f == unix.AF_INET {
			groups = append(groups, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_ROUTE)
		} else {
			groups = append(groups, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV6_ROUTE)
		}
	}

	for _, g := range groups {
		if err := m.conn.JoinGroup(g); err != nil {
			return err
		}
	}

	// Kernels before 5.3 have no nexthop objects, and no group for them.
	_ = m.conn.JoinGroup(unix.RTNLGRP_NEXTHOP)
	return nil
}

// watch sends to ready when the socket has an announcement, and then waits until Drain has read all.
func (m *monitor) watch() {
	for range m.resume {
		// Drain may have read the announcement before this goroutine ran.
		if err := m.raw.Read(pending); err != nil { // closed
			return
		}
		m.ready.Send()
	}
}

// pending reports whether a read would return data or an error at once.
func pending(fd uintptr) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return n > 0 || err != nil
}

// Close implements dataplane.Monitor.
func (m *monitor) Close() error {
	err := m.conn.Close()
	m.resume.Send() // watch then finds that the socket is closed
	m.wg.Wait()
	return err
}

// Drain implements dataplane.Monitor.
func (m *monitor) Drain() (events []dataplane.Event, rerouted, lost bool) {
	defer m.resume.Send()
	missed := false
	buf := m.kernel.buffers.get()
	defer m.kernel.buffers.put(buf)
	for {
		n, err := m.read(*buf)
		switch {
		case errors.Is(err, unix.EAGAIN): // nothing is left
			if missed { // the last announced states may be out of date
				clear(m.links)
			}
			if lost {
				m.resolveDevices()
			}
			return events, rerouted || lost, lost

		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.ENOBUFS): // the socket has overflowed
			lost = true
			missed = true

		case err != nil:
			return nil, true, true
		default:
			moved, void := m.decode((*buf)[:n], &events)
			rerouted = rerouted || moved
			lost = lost || void
		}
	}
}

func (m *monitor) read(buf []byte) (n int, err error) {
	if ctlErr := m.raw.Control(func(fd uintptr) {
		n, _, err = unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT)
	}); ctlErr != nil {
		return 0, ctlErr
	}
	return n, err
}

// resolveDevices looks up the indexes of the scope's devices again, and makes the kernel filter
// announcements by them.
func (m *monitor) resolveDevices() {
	m.names = map[int]string{}
	for _, name := range slices.Concat(m.scope.Devices, m.scope.Shared) {
		if index, err := m.kernel.linkIndex(name); err == nil && index != 0 {
			m.names[index] = name
		}
	}
	m.others = map[int]string{}

	// Errors are ignored: without a filter there are only more announcements to read.
	_ = filter(m.conn, m.own, slices.Collect(maps.Keys(m.names)))
}

// decode appends the events in a datagram to events. See Drain for rerouted and lost.
func (m *monitor) decode(b []byte, events *[]dataplane.Event) (rerouted, lost bool) {
	for len(b) >= unix.NLMSG_HDRLEN {
		h, payload, rest, err := cut(b)
		if err != nil {
			return true, true
		}

		event, void := m.message(h.Type, h.Flags, payload)
		lost = lost || void

		// Only neighbours never affect OnLink, and this process's own routes, which the filter drops.
		rerouted = rerouted || h.Type != unix.RTM_NEWNEIGH && h.Type != unix.RTM_DELNEIGH
		if event != (dataplane.Event{}) {
			*events = append(*events, event)
		}
		b = rest
	}
	return rerouted, lost
}

// message returns the event that a message describes, or the zero event if there is none. lost reports
// whether no event can describe the change.
func (m *monitor) message(typ, flags uint16, payload []byte) (e dataplane.Event, lost bool) {
	switch typ {
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		return m.neighbour(typ == unix.RTM_DELNEIGH, payload), false
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		return m.route(typ == unix.RTM_DELROUTE, flags, payload)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return m.address(typ == unix.RTM_DELADDR, payload)
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		return dataplane.Event{}, m.link(typ == unix.RTM_DELLINK, payload)
	case unix.RTM_DELNEXTHOP:
		return m.nexthop(payload), false
	case unix.RTM_NEWNEXTHOP:
		if flags&unix.NLM_F_REPLACE != 0 { // this process never replaces an object
			return m.nexthop(payload), false
		}
	}
	return dataplane.Event{}, false
}

func (m *monitor) neighbour(deleted bool, payload []byte) dataplane.Event {
	if len(payload) < unix.SizeofNdMsg {
		return dataplane.Event{}
	}

	dev := m.names[int(int32(binary.NativeEndian.Uint32(payload[4:])))]
	if !slices.Contains(m.scope.Devices, dev) {
		return dataplane.Event{}
	}

	n, permanent := parseNeighbour(payload)
	e := dataplane.Event{Deleted: deleted || !permanent}
	switch {
	case payload[0] == unix.AF_BRIDGE:
		// Kernels before 6.13 announce a write twice: after vxlan's own message comes one
		// that contains only the MAC.
		if payload[10]&unix.NTF_SELF == 0 || !n.mac.IsUnicast() || !n.aged {
			return dataplane.Event{}
		}
		e.Object = dataplane.FDB{FDBKey: dataplane.FDBKey{Dev: dev, MAC: n.mac}, Dst: n.dst, Override: n.override}
	case m.scope.InNetworks(prefix.Host(n.dst)):
		e.Object = dataplane.Neigh{NeighKey: dataplane.NeighKey{Dev: dev, IP: n.dst}, MAC: n.mac}
	}
	return e
}

func (m *monitor) route(deleted bool, flags uint16, payload []byte) (e dataplane.Event, lost bool) {
	r := parseRoute(payload)
	if !r.mayConcern(m.scope) {
		return dataplane.Event{}, false
	}

	m.kernel.nexthops.announced(&r, deleted)
	if r.route.Type == dataplane.Unicast && !r.route.Multipath {
		r.route.Dev = m.name(r.oif)
		m.kernel.dependencies.add(r)
	}
	if !m.scope.Shows(r.route) { // now that the device is known
		return dataplane.Event{}, false
	}

	// For an IPv6 route with several next hops the kernel announces sometimes one and
	// sometimes all.
	return dataplane.Event{Object: r.route, Deleted: deleted, Replaced: flags&unix.NLM_F_REPLACE != 0 && !deleted}, r.route.Multipath
}

// name returns "" if the device does not exist or its name cannot be read.
func (m *monitor) name(index int) string {
	for _, known := range []map[int]string{m.names, m.others} {
		if name, ok := known[index]; ok {
			return name
		}
	}
	name, _ := m.kernel.linkName(index)
	m.others[index] = name
	return name
}

// address returns the zero event if the address is outside of the scope.
func (m *monitor) address(deleted bool, payload []byte) (e dataplane.Event, lost bool) {
	if len(payload) < unix.SizeofIfAddrmsg {
		return dataplane.Event{}, false
	}
	index := int(binary.NativeEndian.Uint32(payload[4:]))
	dev, ours := m.names[index]
	p := parseAddress(payload)

	// With an address, the kernel deletes routes without an announcement: those on any device that
	// have the address as their source and, with the last address of a device, all routes through
	// it. It may also not announce the IPv6 routes that it deletes when IPv6 is disabled on a device.
	lost = deleted && (ours || m.kernel.dependencies.has(index) || m.kernel.dependencies.has(p.Addr()))
	if !slices.Contains(m.scope.Devices, dev) || !m.scope.InNetworks(prefix.Host(p.Addr())) {
		return dataplane.Event{}, lost
	}
	return dataplane.Event{Object: dataplane.Addr{Dev: dev, Prefix: p}, Deleted: deleted}, lost
}

// link reports whether the announcement of a link invalidates the cache.
func (m *monitor) link(deleted bool, payload []byte) bool {
	if len(payload) < unix.SizeofIfInfomsg || payload[0] == unix.AF_BRIDGE { // a port's bridge settings
		return false
	}

	index := int(int32(binary.NativeEndian.Uint32(payload[4:])))
	name, known := m.names[index]
	delete(m.others, index) // its name may have changed
	if deleted {
		delete(m.names, index)
		delete(m.links, index)
		return known
	}

	// Most announcements about a link do not matter.
	before, announced := m.links[index]
	now, features := newLinkDetails(payload)
	switch {
	case !known && (slices.Contains(m.scope.Devices, now.name) || slices.Contains(m.scope.Shared, now.name)):
		return true // the device is new
	case !known && !announced && !m.kernel.dependencies.has(index):
		return false // no route uses it
	case !known: // routes use it, and the kernel may delete them if the flags change
		now = linkDetails{flags: now.flags}
		features = false
		if !announced { // it was up when its routes were read, and no change was announced since
			before.flags = upFlags
		}
	case !slices.Contains(m.scope.Devices, name):
		now.kind = "" // the attribute of a bridge contains timers, which differ each time
	}
	m.links[index] = now

	// A carrier that returns for a moment is announced as if nothing had happened:
	//   LINK eth0 up,!running   (no carrier: the nexthop objects are gone)
	//                           (the carrier returns, the kernel accepts new objects, it is lost again)
	//   LINK eth0 up,!running   (up to a second later linkwatch_do_dev handles both changes at once:
	//                            nh_netdev_event deletes the objects with the IPv4 routes through them)
	// Nothing else tells that. So each announcement without a carrier counts, and not only changes.
	return before != now || features || now.lacksCarrier()
}

// linkDetails contains the attributes of a link that matter here.
type linkDetails struct {
	flags                uint32 // those of upFlags
	name, mac, mtu, kind string // undecoded, except for the name
}

// upFlags contains the flags of a link that is up and has a carrier. Without a carrier the
// kernel deletes nexthop objects, and the IPv4 routes through them, without an
// announcement.
const upFlags = unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_LOWER_UP

func (d linkDetails) lacksCarrier() bool { return d.flags&unix.IFF_UP != 0 && d.flags != upFlags }

// newLinkDetails parses a link message. It reports whether offloads have changed: the message does not
// contain their values.
func newLinkDetails(payload []byte) (d linkDetails, features bool) {
	d.flags = linkFlags(payload) & upFlags
	for a := range attributes(payload[unix.SizeofIfInfomsg:]) {
		switch a.typ {
		case unix.IFLA_IFNAME:
			d.name = unix.ByteSliceToString(a.data)
		case unix.IFLA_ADDRESS:
			d.mac = string(a.data)
		case unix.IFLA_MTU:
			d.mtu = string(a.data)
		case unix.IFLA_LINKINFO:
			d.kind = string(a.data)
		case unix.IFLA_EVENT:
			features = len(a.data) == 4 && a.uint32() == unix.IFLA_EVENT_FEATURES
		}
	}
	return d, features
}

// nexthop forgets the nexthop object that a message announces as deleted or replaced.
func (m *monitor) nexthop(payload []byte) (e dataplane.Event) {
	if len(payload) < unix.SizeofNhmsg {
		return dataplane.Event{}
	}
	for a := range attributes(payload[unix.SizeofNhmsg:]) {
		if a.typ == unix.NHA_ID {
			e.Nexthop = a.uint32()
		}
	}
	m.kernel.nexthops.forget(e.Nexthop)
	return e
}
