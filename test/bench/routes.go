// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/test/lab"
	"github.com/flanneld/flanneld/test/must"
)

// kernelRoute is a route to a peer, without its destination.
type kernelRoute struct {
	metric, device, nexthop uint32 // device is an index; nexthop is the id of a nexthop object, or 0 without one
	gateway                 netip.Addr
}

// routeWatch follows the routes of a host to peers by the kernel's announcements. The kernel
// announces changes in the order in which it makes them. So the watch notices even a peer that has no
// route for only a microsecond.
type routeWatch struct {
	host      *lab.Host
	r         *rtnl
	routes    map[netip.Prefix][]kernelRoute
	byNexthop map[uint32]map[netip.Prefix]struct{} // for each nexthop object, destinations of routes that use it or have used it
	best      map[uint32]int                       // number of peers whose best route leads through a device, by its index

	changes int // number of announcements about routes to peers and about nexthop objects
	without int // how often a peer has lost its last route
}

func newRouteWatch(h *lab.Host, peers []peer) *routeWatch {
	w := &routeWatch{host: h, routes: map[netip.Prefix][]kernelRoute{}, byNexthop: map[uint32]map[netip.Prefix]struct{}{}, best: map[uint32]int{}}
	for _, p := range peers {
		w.routes[p.subnet] = nil
	}
	return w
}

// watchRoutes begins to follow the routes of a host to peers. The caller must call close.
func watchRoutes(ctx context.Context, h *lab.Host, peers []peer) *routeWatch {
	w := newRouteWatch(h, peers)
	inside(ctx, h.Namespace, func() { w.r = openRTNL(unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_ROUTE, rtnlgrpNexthop) })
	w.r.limitWait(100 * time.Millisecond)
	for dst, all := range w.read(ctx) {
		for _, one := range all {
			w.put(dst, one)
		}
	}
	return w
}

func (w *routeWatch) close() { w.r.close() }

// until handles announcements until done returns true. It calls done after each datagram, and at
// least every 100 ms. It ends the measure if ctx ends first.
func (w *routeWatch) until(ctx context.Context, done func() bool) {
	for !done() {
		err := w.r.receive(func(typ uint16, _ uint32, payload []byte) { w.apply(typ, payload) })
		if ctx.Err() != nil {
			must.Fail("wait for routes to %d peers, have %v by device: %w: %s", len(w.routes), w.best, context.Cause(ctx), w.host.Daemon().Log())
		}
		if !errors.Is(err, unix.EAGAIN) {
			must.Do(err)
		}
	}
}

// verify ends the measure if the kernel's routes to peers differ from those that the announcements
// describe. The routes must not change meanwhile.
func (w *routeWatch) verify(ctx context.Context) {
	have := w.read(ctx)
	for dst, all := range w.routes {
		if len(all) != len(have[dst]) || slices.ContainsFunc(all, func(one kernelRoute) bool { return !slices.Contains(have[dst], one) }) {
			must.Fail("%s: the kernel has announced the routes %v to %s and has %v", w.host.Name(), all, dst, have[dst])
		}
	}
}

// read returns the kernel's present routes to the peers.
func (w *routeWatch) read(ctx context.Context) map[netip.Prefix][]kernelRoute {
	have := map[netip.Prefix][]kernelRoute{}
	withRTNL(ctx, w.host, func(r *rtnl) {
		r.dumpRoutes(0, func(dst netip.Prefix, one kernelRoute) {
			if _, ok := w.routes[dst]; ok {
				have[dst] = append(have[dst], one)
			}
		})
	})
	return have
}

// parse returns the route to a peer that a message describes. ok is false if it describes no such route.
func (w *routeWatch) parse(payload []byte) (dst netip.Prefix, one kernelRoute, ok bool) {
	if dst, one, ok = parseRoute(payload); ok {
		_, ok = w.routes[dst]
	}
	return dst, one, ok
}

// parseRoute returns the route that a message describes. ok is false if it is not a unicast route in the
// main table.
func parseRoute(payload []byte) (dst netip.Prefix, one kernelRoute, ok bool) {
	if len(payload) < unix.SizeofRtMsg || payload[4] != unix.RT_TABLE_MAIN || payload[7] != unix.RTN_UNICAST {
		return dst, one, false
	}

	dst = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	attrs(payload[unix.SizeofRtMsg:], func(typ uint16, data []byte) {
		switch typ {
		case unix.RTA_DST:
			a, _ := netip.AddrFromSlice(data)
			dst = netip.PrefixFrom(a, int(payload[1]))
		case unix.RTA_GATEWAY:
			one.gateway, _ = netip.AddrFromSlice(data)
		case unix.RTA_OIF:
			one.device = binary.NativeEndian.Uint32(data)
		case unix.RTA_PRIORITY:
			one.metric = binary.NativeEndian.Uint32(data)
		case rtaNHID:
			one.nexthop = binary.NativeEndian.Uint32(data)
		}
	})
	return dst, one, true
}

// apply handles one announcement.
func (w *routeWatch) apply(typ uint16, payload []byte) {
	switch typ {
	case unix.RTM_NEWROUTE:
		if dst, one, ok := w.parse(payload); ok {
			w.changes++
			w.put(dst, one)
		}

	case unix.RTM_DELROUTE:
		if dst, one, ok := w.parse(payload); ok {
			w.changes++
			w.remove(dst, func(have kernelRoute) bool { return have == one })
		}

	case rtmNewNexthop:
		w.changes++
	case rtmDelNexthop: // the kernel deletes the routes that use it without an announcement
		w.changes++
		attrs(payload[min(8, len(payload)):], func(typ uint16, data []byte) {
			if typ != nhaID {
				return
			}
			id := binary.NativeEndian.Uint32(data)
			for dst := range w.byNexthop[id] {
				w.remove(dst, func(have kernelRoute) bool { return have.nexthop == id })
			}
			delete(w.byNexthop, id)
		})

	case unix.RTM_NEWLINK, unix.RTM_DELLINK: // the same happens if a device goes down or is deleted
		if len(payload) < unix.SizeofIfInfomsg || payload[0] == unix.AF_BRIDGE {
			return
		}
		index := binary.NativeEndian.Uint32(payload[4:])
		if typ == unix.RTM_NEWLINK && binary.NativeEndian.Uint32(payload[8:])&unix.IFF_UP != 0 {
			return
		}
		for dst := range w.routes {
			w.remove(dst, func(have kernelRoute) bool { return have.device == index })
		}
	}
}

// put adds a route to dst. It replaces the route with the same metric, if there is one.
func (w *routeWatch) put(dst netip.Prefix, one kernelRoute) {
	if one.nexthop != 0 {
		if w.byNexthop[one.nexthop] == nil {
			w.byNexthop[one.nexthop] = map[netip.Prefix]struct{}{}
		}
		w.byNexthop[one.nexthop][dst] = struct{}{}
	}
	w.change(dst, func(all []kernelRoute) []kernelRoute {
		all = slices.DeleteFunc(all, func(have kernelRoute) bool { return have.metric == one.metric })
		return append(all, one)
	})
}

// remove removes the routes to dst for which gone returns true. It counts a peer that thereby loses
// its last route.
func (w *routeWatch) remove(dst netip.Prefix, gone func(kernelRoute) bool) {
	before := len(w.routes[dst])
	w.change(dst, func(all []kernelRoute) []kernelRoute { return slices.DeleteFunc(all, gone) })
	if before > 0 && len(w.routes[dst]) == 0 {
		w.without++
	}
}

// change replaces the routes to dst by those that how returns, and updates best.
func (w *routeWatch) change(dst netip.Prefix, how func([]kernelRoute) []kernelRoute) {
	best := func(n int) {
		if all := w.routes[dst]; len(all) > 0 {
			w.best[slices.MinFunc(all, func(a, b kernelRoute) int { return int(a.metric) - int(b.metric) }).device] += n
		}
	}
	best(-1)
	w.routes[dst] = how(w.routes[dst])
	best(1)
}
