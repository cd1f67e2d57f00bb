// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Host is a machine of the lab, called host1, host2 and so on.
type Host struct {
	*Namespace
	lab             *Lab
	number, segment int
	mac             net.HardwareAddr // of eth0

	mu      sync.Mutex
	daemons []*Daemon
	pods    []*Pod
}

func (h *Host) install(ctx context.Context) error {
	n, err := newNamespace(fmt.Sprintf("host%d", h.number), enterHostNamespaces)
	if err != nil {
		return err
	}

	h.Namespace = n
	if err := h.boot(ctx); err != nil {
		return err
	}
	return h.lab.attach(ctx, h)
}

// Reinstall replaces the host by a new one with the same addresses, which has no daemon, pod or file. Nothing else may
// use the host meanwhile.
func (h *Host) Reinstall(ctx context.Context) error {
	for _, d := range h.running() {
		d.Kill()
	}
	for _, p := range h.pods {
		p.close()
	}
	h.pods = nil
	h.close()

	// The kernel removes a namespace in the background. Until then the host's port has its name.
	err := h.lab.underlay.Netlink(ctx, func(nl *netlink.Handle) error {
		port, err := nl.LinkByName(h.Name())
		if err == nil {
			err = nl.LinkDel(port)
		}
		if errors.As(err, &netlink.LinkNotFoundError{}) || errors.Is(err, unix.ENODEV) {
			return nil
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("remove the port of %s: %w", h.Name(), err)
	}

	return h.install(ctx)
}

var podPort = regexp.MustCompile(`^pod\d+$`)

// RemovePods removes all pods of the host and their bridges.
func (h *Host) RemovePods(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()

	for _, p := range h.pods {
		p.close()
	}
	h.pods = nil

	return h.Netlink(ctx, func(nl *netlink.Handle) error {
		links, err := nl.LinkList()
		for errors.Is(err, netlink.ErrDumpInterrupted) {
			links, err = nl.LinkList()
		}

		for _, link := range links {
			if name := link.Attrs().Name; err == nil && (h.lab.IsBridge(name) || podPort.MatchString(name)) {
				err = nl.LinkDel(link)
			}
			if errors.Is(err, unix.ENODEV) { // the kernel has removed the port in the background, with the pod
				err = nil
			}
		}
		return err
	})
}

// Addr returns the host's underlay address of family f. The host has this address only if
// the lab uses that family.
func (h *Host) Addr(f prefix.Family) netip.Addr {
	return segmentAddr(f, h.segment, h.number).Addr()
}

// Segment returns the number of the host's L2 segment, counted from 0.
func (h *Host) Segment() int { return h.segment }

// Pods returns the host's pods in the order of their creation. The caller owns the slice.
func (h *Host) Pods() []*Pod {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.pods)
}

// Daemon returns the flanneld that was started last, or nil if none was started.
func (h *Host) Daemon() *Daemon {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.daemons) == 0 {
		return nil
	}
	return h.daemons[len(h.daemons)-1]
}

// Daemons returns all processes of flanneld that were started, the oldest first. They may
// have exited.
func (h *Host) Daemons() []*Daemon {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.daemons)
}

func (h *Host) running() []*Daemon {
	return slices.DeleteFunc(h.Daemons(), func(d *Daemon) bool { return d.Ended() != nil })
}

// Route is a route of a host's main table.
type Route struct {
	Dst      netip.Prefix // ::/0 or 0.0.0.0/0 for a default route
	Via      netip.Addr   // zero if there is no gateway
	Dev      string       // empty if there is none, as with unreachable routes
	OnLink   bool         // the gateway counts as directly reachable
	Refuses  bool         // packets are refused or dropped: the route is unreachable, a blackhole or prohibited
	Protocol int          // number of the program that created it, as in /etc/iproute2/rt_protos
}

// String returns the route in the syntax of ip(8), without the protocol.
func (r Route) String() string {
	var b strings.Builder
	if r.Refuses {
		b.WriteString("unreachable ")
	}

	fmt.Fprint(&b, r.Dst)
	if r.Via.IsValid() {
		fmt.Fprint(&b, " via ", r.Via)
	}
	if r.Dev != "" {
		fmt.Fprint(&b, " dev ", r.Dev)
	}
	if r.OnLink {
		b.WriteString(" onlink")
	}
	return b.String()
}

// Routes returns the routes of the main table, IPv4 first. It omits those to link-local
// and multicast addresses, which the kernel creates.
func (h *Host) Routes(ctx context.Context) (routes []Route, err error) {
	err = h.Netlink(ctx, func(nl *netlink.Handle) error {
		links, err := nl.LinkList()
		if err != nil {
			return fmt.Errorf("list links of %s: %w", h.Name(), err)
		}

		dev := map[int]string{}
		for _, l := range links {
			dev[l.Attrs().Index] = l.Attrs().Name
		}

		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			have, err := nl.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return fmt.Errorf("list routes of %s: %w", h.Name(), err)
			}

			for _, r := range have {
				route := toRoute(r, family)
				if !route.Refuses { // the kernel shows lo for an unreachable IPv6 route
					route.Dev = dev[r.LinkIndex]
				}
				if a := route.Dst.Addr(); a.IsLinkLocalUnicast() || a.IsMulticast() {
					continue
				}
				routes = append(routes, route)
			}
		}
		return nil
	})
	return routes, err
}

func toRoute(r netlink.Route, family int) Route {
	out := Route{
		Protocol: int(r.Protocol), OnLink: r.Flags&int(netlink.FLAG_ONLINK) != 0,
		Refuses: slices.Contains([]int{unix.RTN_UNREACHABLE, unix.RTN_BLACKHOLE, unix.RTN_PROHIBIT}, r.Type),
	}
	if via, ok := netip.AddrFromSlice(r.Gw); ok {
		out.Via = via.Unmap()
	}

	dst, _ := netip.AddrFromSlice(r.Dst.IP)
	if family == unix.AF_INET {
		dst = dst.Unmap()
	}
	bits, _ := r.Dst.Mask.Size()
	out.Dst = netip.PrefixFrom(dst, bits)
	return out
}
