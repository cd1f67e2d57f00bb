// SPDX-License-Identifier: Apache-2.0

package linux

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// Apply implements dataplane.Kernel. It executes operations on links one by one, and sends
// consecutive operations on other objects in one batch.
func (k *Kernel) Apply(ctx context.Context, ops []dataplane.Op) []dataplane.OpError {
	var failed []dataplane.OpError
	for len(ops) > 0 {
		if err := ctx.Err(); err != nil {
			for _, op := range ops {
				failed = append(failed, dataplane.OpError{Op: op, Err: err})
			}
			return failed
		}
		if _, ok := ops[0].Object.(dataplane.Link); ok {
			if err := k.applyLink(ctx, ops[0]); err != nil {
				failed = append(failed, dataplane.OpError{Op: ops[0], Err: err})
			}
			ops = ops[1:]
			continue
		}

		n := 1
		for n < len(ops) {
			if _, ok := ops[n].Object.(dataplane.Link); ok {
				break
			}
			n++
		}
		failed = append(failed, k.applyRun(ctx, ops[:n])...)
		ops = ops[n:]
	}
	return failed
}

func (k *Kernel) applyRun(ctx context.Context, ops []dataplane.Op) []dataplane.OpError {
	var failed []dataplane.OpError
	indexes := map[string]int{"": 0}
	ready := make([]*dataplane.Op, 0, len(ops))
	for i := range ops {
		op := &ops[i]
		dev := op.Object.Device()
		if _, ok := indexes[dev]; !ok {
			index, err := k.linkIndex(dev)
			if err != nil {
				failed = append(failed, dataplane.OpError{Op: *op, Err: err})
				continue
			}
			indexes[dev] = index
			k.dependencies.Store(index, nil)
		}
		if a, ok := op.Object.(dataplane.Addr); ok && !op.Delete && a.Prefix.Addr().Is6() {
			enableIPv6(dev)
		}
		if indexes[dev] != 0 || dev == "" {
			ready = append(ready, op)
		} else if !op.Delete { // the objects of a deleted device are deleted too
			failed = append(failed, dataplane.OpError{Op: *op, Err: unix.ENODEV})
		}
	}

	k.provideNexthops(ctx, ready, indexes)
	errs := k.sock.send(ctx, len(ready), func(i int, m *message) {
		encode(m, ready[i], indexes[ready[i].Object.Device()])
	})
	k.detour(ctx, ready, indexes, errs)
	done := ready[:0]
	for i, op := range ready {
		if err := errs[i]; err != nil && !harmless(op, err) {
			failed = append(failed, dataplane.OpError{Op: *op, Err: err})
			k.nexthops.putFailed(op, indexes)
			continue
		}
		done = append(done, op)
	}
	k.releaseNexthops(ctx, done, indexes)
	return failed
}

// detour repeats puts that the kernel has refused. The kernel refuses an IPv6 route if
// another route leads to the gateway of the IPv6 route through another device. Often that
// other route is the one to be replaced. An onlink flag does not help. A detour helps: a
// temporary route to the gateway alone, through the device of the wanted route. errs contains
// the errors by index in ops. detour replaces the errors of the repeated puts by the new
// results.
//
// Packets must not take the detour. So detour first copies the route that packets to the
// gateway take, for the gateway alone. When the kernel creates the wanted route, it looks
// up the gateway on the device of that route, and finds the detour. For packets it takes
// the older of two routes with the same destination and metric, which is the copy. Only
// packets that arrive from the device take the detour.
//
// The five steps for a route are: create the copy, create the detour, put the route, delete
// the detour, delete the copy. They are in one datagram, so that neither another program
// nor the end of ctx can interrupt them.
func (k *Kernel) detour(ctx context.Context, ops []*dataplane.Op, indexes map[string]int, errs map[int]error) {
	var again []int
	var copies []routeReply
	for i, op := range ops {
		r, ok := op.Object.(dataplane.Route)
		if ok && !op.Delete && r.OnLink && r.Gateway.Is6() && errors.Is(errs[i], unix.EINVAL) {
			again = append(again, i)
			copies = append(copies, k.beforeDetour(r, indexes[r.Dev]))
		}
	}

	const steps, put = 5, 2
	failed := k.sock.sendGroups(ctx, len(again), steps, func(i int, m *message) {
		op := ops[again[i/steps]]
		before := copies[i/steps]
		r := op.Object.(dataplane.Route)
		index := indexes[r.Dev]
		detour := dataplane.NewDetour(r.Gateway, r.Dev)
		switch i % steps {
		case 0:
			encodeRoute(m, unix.RTM_NEWROUTE, unix.NLM_F_CREATE, before.route, before.oif)
			if before.source.IsValid() {
				m.addr(unix.RTA_PREFSRC, before.source)
			}

		case 1:
			encodeRoute(m, unix.RTM_NEWROUTE, unix.NLM_F_CREATE, detour, index)
		case put:
			encode(m, op, index)
		case 3:
			encodeRoute(m, unix.RTM_DELROUTE, 0, detour, index)
		case 4:
			encodeRoute(m, unix.RTM_DELROUTE, 0, before.route, before.oif)
		}
	})

	for j, i := range again {
		errs[i] = failed[steps*j+put]
	}
}

// beforeDetour returns the copy for detour: the route that packets to the gateway of r take, for the
// gateway alone. index is that of r's device.
func (k *Kernel) beforeDetour(r dataplane.Route, index int) routeReply {
	// If there is nothing to copy, before is the detour itself. The kernel then refuses the second
	// attempts to create and to delete it, which does no harm.
	before := routeReply{route: dataplane.NewDetour(r.Gateway, r.Dev), oif: index}
	if r.Dst.Contains(r.Gateway) { // so packets to the gateway may take the device of r
		return before
	}

	now, err := k.lookup(r.Gateway)
	if err != nil || now.table != unix.RT_TABLE_MAIN || now.route.Type != dataplane.Unicast || now.route.Multipath || now.route.NexthopID != 0 {
		return before
	}
	before.oif = now.oif
	before.source = now.source
	before.route.Gateway = now.route.Gateway
	before.route.OnLink = now.route.OnLink
	before.route.MTU = now.route.MTU
	return before
}

// harmless reports whether the kernel is already in the state that op should reach.
func harmless(op *dataplane.Op, err error) bool {
	if !op.Delete {
		return errors.Is(err, unix.EEXIST) && !op.Exclusive
	}

	// The kernel deletes routes together with their nexthop object, and then refuses its id.
	if r, ok := op.Object.(dataplane.Route); ok && r.NexthopID != 0 && errors.Is(err, unix.EINVAL) {
		return true
	}

	code, _ := errors.AsType[unix.Errno](err)
	return slices.Contains([]unix.Errno{unix.ESRCH, unix.ENOENT, unix.EADDRNOTAVAIL, unix.ENODEV}, code)
}

func encode(m *message, op *dataplane.Op, index int) {
	flags := uint16(unix.NLM_F_CREATE | unix.NLM_F_REPLACE)
	verb := func(put, del uint16) uint16 {
		if op.Delete {
			flags = 0
			return del
		}
		return put
	}

	switch o := op.Object.(type) {
	case dataplane.Addr:
		encodeAddr(m, verb(unix.RTM_NEWADDR, unix.RTM_DELADDR), flags, o, index)
	case dataplane.Neigh:
		typ := verb(unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH)
		m.begin(typ, flags, ndmsg(familyOf(o.IP), index, unix.NUD_PERMANENT, 0)...)
		m.addr(unix.NDA_DST, o.IP)
		m.attr(unix.NDA_LLADDR, o.MAC[:])

	case dataplane.FDB:
		typ := verb(unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH)
		m.begin(typ, flags, ndmsg(unix.AF_BRIDGE, index, unix.NUD_PERMANENT, unix.NTF_SELF)...)
		m.attr(unix.NDA_LLADDR, o.MAC[:])
		if !op.Delete {
			m.addr(unix.NDA_DST, o.Dst)
		}

	case dataplane.Route:
		if op.Exclusive {
			flags = unix.NLM_F_CREATE | unix.NLM_F_EXCL
		}
		encodeRoute(m, verb(unix.RTM_NEWROUTE, unix.RTM_DELROUTE), flags, o, index)
	}
}

func encodeAddr(m *message, typ, flags uint16, a dataplane.Addr, index int) {
	// Skip duplicate address detection, which would only cause a delay: no other host can
	// have an address in this host's subnet.
	var nodad uint8
	if a.Prefix.Addr().Is6() {
		nodad = unix.IFA_F_NODAD
	}
	m.begin(typ, flags, ifaddrmsg(a.Prefix, nodad, index)...)
	m.addr(unix.IFA_LOCAL, a.Prefix.Addr())
	m.addr(unix.IFA_ADDRESS, a.Prefix.Addr())
}

func encodeRoute(m *message, typ, flags uint16, r dataplane.Route, index int) {
	var rtflags uint32
	if r.OnLink {
		rtflags = unix.RTNH_F_ONLINK
	}

	scope := uint8(unix.RT_SCOPE_UNIVERSE)
	deleting := typ == unix.RTM_DELROUTE
	if deleting {
		scope = unix.RT_SCOPE_NOWHERE // any scope
		rtflags = 0
	}
	m.begin(typ, flags, rtmsg(r.Dst, r.TOS, unix.RT_TABLE_MAIN, r.Protocol, scope, uint8(r.Type), rtflags)...)
	m.addr(unix.RTA_DST, r.Dst.Addr())
	if r.Priority != 0 {
		m.attr32(unix.RTA_PRIORITY, uint32(r.Priority))
	}
	if r.MTU != 0 && !deleting {
		m.nest(unix.RTA_METRICS, func() {
			m.attr32(unix.RTAX_MTU, uint32(r.MTU))
			if r.Dst.Addr().Is6() { // without the lock, the kernel ignores the MTU for packets that it forwards
				m.attr32(unix.RTAX_LOCK, 1<<unix.RTAX_MTU)
			}
		})
	}

	if r.NexthopID != 0 { // the kernel refuses a gateway or device beside the id, or does not find the route
		m.attr32(rtaNexthopID, r.NexthopID)
		return
	}
	if deleting && r.Multipath {
		return
	}
	if r.Gateway.IsValid() {
		m.addr(unix.RTA_GATEWAY, r.Gateway)
	} else if deleting && r.Dst.Addr().Is6() { // without a gateway, routes with one would match too
		m.addr(unix.RTA_GATEWAY, netip.IPv6Unspecified())
	}
	if index != 0 {
		m.attr32(unix.RTA_OIF, uint32(index))
	}
}
