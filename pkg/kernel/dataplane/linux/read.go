// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// Read implements dataplane.Kernel.
func (k *Kernel) Read(ctx context.Context, s dataplane.Scope) (dataplane.State, error) {
	state := dataplane.NewState()
	for _, name := range s.Devices {
		index, err := k.readLink(name, s, state)
		if err != nil {
			return state, err
		}
		if index == 0 || len(s.Networks) == 0 {
			continue
		}

		dev := device{name, index}
		for _, read := range []func(context.Context, device, dataplane.Scope, dataplane.State) error{k.readAddrs, k.readNeighs, k.readFDB} {
			if err := read(ctx, dev, s, state); err != nil {
				return state, err
			}
		}
	}
	if len(s.Networks) == 0 {
		return state, nil
	}

	if err := k.readNexthops(ctx); err != nil {
		return state, err
	}
	state.Routes = make(map[netip.Prefix][]dataplane.Route, k.nexthops.len()) // where there are many routes, each uses its own object
	readRoutes := k.readRoutes
	if s.Connected {
		readRoutes = k.readConnected
	}
	for _, f := range families(s) {
		if err := readRoutes(ctx, f, s, state); err != nil {
			return state, err
		}
	}
	if slices.Contains(families(s), unix.AF_INET) && !s.Connected { // IPv4 routes were read, and only these use nexthop objects
		k.nexthops.selectUnused()
	}
	return state, nil
}

type device struct {
	name  string
	index int
}

func families(s dataplane.Scope) []uint8 {
	var fs []uint8
	for _, n := range s.Networks {
		if f := familyOf(n.Addr()); !slices.Contains(fs, f) {
			fs = append(fs, f)
		}
	}
	return fs
}

// readLink adds the named link to state. It returns index 0 if the device does not exist.
func (k *Kernel) readLink(name string, s dataplane.Scope, state dataplane.State) (int, error) {
	link, err := k.links.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read link %s: %w", name, err)
	}

	attrs := link.Attrs()
	l := dataplane.Link{Name: name, Kind: link.Type(), MTU: attrs.MTU, Up: attrs.Flags&unix.IFF_UP != 0}
	if len(attrs.HardwareAddr) == len(l.MAC) { // a tunnel has an IP address there
		copy(l.MAC[:], attrs.HardwareAddr)
	}

	l.Tunnel = readTunnel(link)
	if _, ok := link.(*netlink.Tuntap); ok {
		l.Kind = dataplane.KindTUN
	}
	if v, ok := link.(*netlink.Vxlan); ok {
		l.VXLAN = dataplane.VXLAN{
			VNI: v.VxlanId, Port: v.Port, Learning: v.Learning, GBP: v.GBP,
			Foreign: v.L2miss || v.L3miss || v.Proxy || v.RSC || v.FlowBased || len(v.Group) > 0,
		}
		if a, ok := netip.AddrFromSlice(v.SrcAddr); ok {
			l.VXLAN.Local = a.Unmap()
		}
		if l.VXLAN.Underlay, err = k.linkName(v.VtepDevIndex); err != nil {
			return 0, err
		}
	}
	if s.TxChecksum {
		l.TxChecksum, err = k.readTxChecksum(name)
		if errors.Is(err, unix.ENODEV) { // deleted meanwhile
			return 0, nil
		}
		if err != nil {
			return 0, err
		}
	}
	state.Add(l)
	return attrs.Index, nil
}

func (k *Kernel) readAddrs(ctx context.Context, dev device, s dataplane.Scope, state dataplane.State) error {
	for _, f := range families(s) {
		found, err := k.dumpAddrs(ctx, f, dev.index)
		if err != nil {
			return fmt.Errorf("dump addresses of %s: %w", dev.name, err)
		}
		for _, a := range found {
			if a.index == dev.index && s.InNetworks(prefix.Host(a.prefix.Addr())) {
				state.Add(dataplane.Addr{Dev: dev.name, Prefix: a.prefix})
			}
		}
	}
	return nil
}

// connectedMetric (IP6_RT_PRIO_ADDRCONF) is the metric of the IPv6 routes that the kernel
// creates for addresses.
const connectedMetric = 256

// readConnected implements Scope.Connected: it derives from the addresses of all devices the routes that
// the kernel creates for them.
func (k *Kernel) readConnected(ctx context.Context, family uint8, s dataplane.Scope, state dataplane.State) error {
	found, err := k.dumpAddrs(ctx, family, 0)
	if err != nil {
		return fmt.Errorf("dump addresses: %w", err)
	}

	for _, a := range found {
		dst := a.prefix.Masked()
		if !s.InNetworks(dst) {
			continue
		}

		dev, err := k.linkName(a.index)
		if err != nil {
			return err
		}
		r := dataplane.NewRoute(dst, netip.Addr{}, dev, false)
		r.Protocol = unix.RTPROT_KERNEL
		if r.Dst.Addr().Is6() {
			r.Priority = connectedMetric
		}
		state.AddRoute(r)
	}
	return nil
}

type address struct {
	prefix netip.Prefix // includes the host bits
	index  int          // of the device
}

// dumpAddrs takes index 0 as all devices.
func (k *Kernel) dumpAddrs(ctx context.Context, family uint8, index int) (found []address, err error) {
	err = k.sock.dump(ctx, func(m *message) {
		body := make([]byte, unix.SizeofIfAddrmsg)
		body[0] = family
		binary.NativeEndian.PutUint32(body[4:], uint32(index))
		m.begin(unix.RTM_GETADDR, 0, body...)
	}, func() { found = nil }, func(typ uint16, payload []byte) {
		if typ == unix.RTM_NEWADDR && len(payload) >= unix.SizeofIfAddrmsg {
			found = append(found, address{parseAddress(payload), int(binary.NativeEndian.Uint32(payload[4:]))})
		}
	})
	return found, err
}

// dumpNeighs returns the permanent entries of dev in the neighbour table of family, or with unix.AF_BRIDGE
// in the FDB.
func (k *Kernel) dumpNeighs(ctx context.Context, family uint8, dev device) (found []neighbour, err error) {
	var wanted uint8
	if family == unix.AF_BRIDGE {
		wanted = unix.NTF_SELF // the entries of the device itself and not of a bridge
	}
	err = k.sock.dump(ctx, func(m *message) {
		m.begin(unix.RTM_GETNEIGH, 0, ndmsg(family, 0, 0, 0)...)
		m.attr32(unix.NDA_IFINDEX, uint32(dev.index))
	}, func() { found = found[:0] }, func(typ uint16, payload []byte) {
		if typ != unix.RTM_NEWNEIGH || len(payload) < unix.SizeofNdMsg || payload[0] != family {
			return
		}
		n, permanent := parseNeighbour(payload)
		if permanent && binary.NativeEndian.Uint32(payload[4:]) == uint32(dev.index) && payload[10]&wanted == wanted {
			found = append(found, n)
		}
	})
	return found, err
}

func (k *Kernel) readNeighs(ctx context.Context, dev device, s dataplane.Scope, state dataplane.State) error {
	for _, f := range families(s) {
		found, err := k.dumpNeighs(ctx, f, dev)
		if err != nil {
			return fmt.Errorf("dump neighbours of %s: %w", dev.name, err)
		}
		for _, n := range found {
			if key := (dataplane.NeighKey{Dev: dev.name, IP: n.dst}); n.dst.IsValid() && s.InNetworks(prefix.Host(n.dst)) {
				state.Neighs[key] = dataplane.Neigh{NeighKey: key, MAC: n.mac}
			}
		}
	}
	return nil
}

func (k *Kernel) readFDB(ctx context.Context, dev device, _ dataplane.Scope, state dataplane.State) error {
	found, err := k.dumpNeighs(ctx, unix.AF_BRIDGE, dev)
	if err != nil {
		return fmt.Errorf("dump FDB of %s: %w", dev.name, err)
	}
	for _, n := range found {
		if key := (dataplane.FDBKey{Dev: dev.name, MAC: n.mac}); n.mac.IsUnicast() {
			state.FDB[key] = dataplane.FDB{FDBKey: key, Dst: n.dst, Override: n.override}
		}
	}
	return nil
}

func (k *Kernel) readRoutes(ctx context.Context, family uint8, s dataplane.Scope, state dataplane.State) error {
	found := make([]routeReply, 0, k.nexthops.len())
	err := k.sock.dump(ctx, func(m *message) {
		body := make([]byte, unix.SizeofRtMsg)
		body[0] = family
		body[4] = unix.RT_TABLE_MAIN
		m.begin(unix.RTM_GETROUTE, 0, body...)
	}, func() { found = found[:0] }, func(typ uint16, payload []byte) {
		if typ != unix.RTM_NEWROUTE || elsewhere(payload, s) {
			return
		}
		if r := parseRoute(payload); r.mayConcern(s) || r.route.NexthopID != 0 {
			found = append(found, r)
		}
	})
	if errors.Is(err, unix.ENOENT) { // the table does not exist, so it has no routes
		return nil
	}
	if err != nil {
		return fmt.Errorf("dump routes: %w", err)
	}

	names := map[int]string{0: ""}
	for _, r := range found {
		k.nexthops.addRoute(&r)
		if !r.mayConcern(s) { // it only uses a nexthop object, and may belong to another flanneld on this host
			continue
		}
		k.dependencies.add(r)
		name, ok := names[r.oif]
		if !ok {
			if name, err = k.linkName(r.oif); err != nil {
				return err
			}
			names[r.oif] = name
		}

		r.route.Dev = name
		if r.route.Type != dataplane.Unicast {
			r.route.Dev = "" // the kernel shows "dev lo" for an unreachable IPv6 route and no device for an IPv4 one
		}
		if s.Shows(r.route) {
			state.AddRoute(r.route)
		}
	}
	return nil
}
