// SPDX-License-Identifier: Apache-2.0

package underlay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/tune"
	"github.com/flanneld/flanneld/pkg/base/wait"
)

// dumpTries is the maximum number of tries of a dump that changes interrupt.
const dumpTries = 5

// gather reads the facts that the choice with options o needs, in the network namespace of the calling
// thread. Others may get the same Facts, so they must not be changed.
func (o Options) gather(ctx context.Context, rest time.Duration) gathered {
	g := o.shared(ctx, rest)
	if g.err == nil {
		g.facts = o.look(g.facts)
	}
	return g
}

// shared reads those facts that are the same for all networks with the same families. With a Reader,
// callers share reads, and the time between two of them is at least rest.
func (o Options) shared(ctx context.Context, rest time.Duration) gathered {
	read := func(ctx context.Context) gathered {
		cost := tune.Cost()
		f, err := o.read(ctx)
		return gathered{f, err, cost()}
	}
	key := fmt.Sprint(o.Families, o.asksForInterface(), rest)
	batch, _ := cmp.Or(o.Reader, &Reader{}).facts.LoadOrStore(key, &wait.Batch[gathered]{Rest: rest})
	return batch.(*wait.Batch[gathered]).Do(ctx, read)
}

func (o Options) read(ctx context.Context) (Facts, error) {
	var f Facts
	var err error
	if f.Links, err = readLinks(ctx); err != nil {
		return Facts{}, err
	}
	if !o.asksForInterface() {
		for _, fam := range o.Families {
			routes, err := dump(ctx, fam.String()+" default routes", func() ([]DefaultRoute, error) { return listDefaults(fam) })
			if err != nil {
				return Facts{}, err
			}
			f.Defaults = append(f.Defaults, routes...)
		}
	}
	return f, nil
}

// look adds the kernel's answers to the questions of o, which networks do not share.
func (o Options) look(f Facts) Facts {
	if dst, err := parseAddr(o.CanReach); err == nil {
		f.Reach = readReach(dst)
	}

	var peers []netip.Addr
	if o.Peers != nil {
		peers = o.Peers()
	}
	for _, fam := range o.Families {
		asked := 0
		for _, a := range peers {
			if asked < mostAsked && a.IsValid() && prefix.FamilyOf(a) == fam && a.IsGlobalUnicast() && len(f.linksWith(a)) == 0 {
				asked++
				f.Peers = append(f.Peers, readReach(a))
			}
		}
		if asked == 0 {
			f.Elsewhere = append(f.Elsewhere, readReach(elsewhere[fam]))
		}
	}

	failed := func(r Reach) bool { return r.Failure != "" }
	f.Peers = slices.DeleteFunc(f.Peers, failed)
	f.Elsewhere = slices.DeleteFunc(f.Elsewhere, failed)
	return f
}

// mostAsked is the number of peers of a family to which the kernel's route is read.
const mostAsked = 16

// elsewhere has addresses that no host has, because they are reserved for documentation (RFC 5737,
// RFC 3849).
var elsewhere = map[prefix.Family]netip.Addr{
	prefix.IPv4: netip.MustParseAddr("192.0.2.1"),
	prefix.IPv6: netip.MustParseAddr("2001:db8::1"),
}

// dump calls list until no change interrupts it. Errors name the result by the word in what.
func dump[T any](ctx context.Context, what string, list func() (T, error)) (T, error) {
	var zero T
	for try := 1; ; try++ {
		if err := ctx.Err(); err != nil {
			return zero, err
		}
		v, err := list()
		if err == nil {
			return v, nil
		}
		if try == dumpTries || !errors.Is(err, netlink.ErrDumpInterrupted) {
			return zero, fmt.Errorf("list %s: %w", what, err)
		}
	}
}

func readLinks(ctx context.Context) ([]Link, error) {
	links, err := dump(ctx, "links", netlink.LinkList)
	if err != nil {
		return nil, err
	}
	addrs, err := dump(ctx, "addresses", func() ([]netlink.Addr, error) {
		return netlink.AddrList(nil, netlink.FAMILY_ALL)
	})
	if err != nil {
		return nil, err
	}

	of := map[int][]Addr{}
	for _, a := range addrs {
		if a.IPNet == nil {
			continue
		}
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			of[a.LinkIndex] = append(of[a.LinkIndex], newAddr(ip, a))
		}
	}

	out := make([]Link, len(links))
	for i, l := range links {
		at := l.Attrs()
		out[i] = Link{
			Name:     at.Name,
			Index:    at.Index,
			Kind:     kind(l),
			Master:   at.MasterIndex,
			Parent:   parent(l),
			MTU:      at.MTU,
			Hardware: at.HardwareAddr.String(),
			Up:       at.RawFlags&unix.IFF_UP != 0,
			Running:  at.RawFlags&unix.IFF_RUNNING != 0,
			Addrs:    of[at.Index],
		}
	}
	slices.SortFunc(out, func(a, b Link) int { return a.Index - b.Index })
	return out, nil
}

// kind returns "" for hardware and lo, which netlink calls "device".
func kind(l netlink.Link) string {
	if l.Type() == "device" {
		return ""
	}
	return l.Type()
}

func parent(l netlink.Link) int {
	// The parent of a veth is its other end. In a container, that of a macvlan is an interface of the host.
	if at := l.Attrs(); l.Type() != "veth" && at.NetNsID < 0 {
		return at.ParentIndex
	}
	return 0
}

func newAddr(ip netip.Addr, a netlink.Addr) Addr {
	flags := a.Flags
	ones, _ := a.Mask.Size()
	network := netip.PrefixFrom(ip, ones).Masked()
	if a.Peer != nil {
		if other, ok := netip.AddrFromSlice(a.Peer.IP); ok {
			bits, _ := a.Peer.Mask.Size()
			network = netip.PrefixFrom(other.Unmap(), bits).Masked()
		}
	}
	return Addr{
		IP:         ip,
		Network:    network,
		Permanent:  flags&unix.IFA_F_PERMANENT != 0,
		Temporary:  flags&unix.IFA_F_TEMPORARY != 0,
		Deprecated: flags&unix.IFA_F_DEPRECATED != 0,
		// An optimistic address may be used during duplicate address detection.
		Tentative: flags&unix.IFA_F_TENTATIVE != 0 && flags&unix.IFA_F_OPTIMISTIC == 0,
		Duplicate: flags&unix.IFA_F_DADFAILED != 0,
	}
}

// readReach asks the kernel for the route to dst. If there is none, another option may find an interface.
func readReach(dst netip.Addr) Reach {
	routes, err := netlink.RouteGet(net.IP(dst.AsSlice()))
	if err != nil {
		return Reach{To: dst, Failure: "look up route: " + err.Error()}
	}
	if len(routes) == 0 {
		return Reach{To: dst, Failure: "look up route: no answer"}
	}
	r := Reach{To: dst, Link: routes[0].LinkIndex}
	if src, ok := netip.AddrFromSlice(routes[0].Src); ok {
		r.Source = src
	}
	return r
}

// listDefaults returns the default routes of family f in the main table, in the kernel's order.
func listDefaults(f prefix.Family) (defaults []DefaultRoute, err error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer h.Close()

	// With strict checking the kernel sends only the routes of the table in the request.
	if err := h.SetStrictCheck(true); err != nil {
		return nil, err
	}

	family := map[prefix.Family]int{prefix.IPv4: netlink.FAMILY_V4, prefix.IPv6: netlink.FAMILY_V6}[f]
	main := &netlink.Route{Table: unix.RT_TABLE_MAIN}
	over := false
	err = h.RouteListFilteredIter(family, main, netlink.RT_FILTER_TABLE, func(r netlink.Route) (more bool) {
		if ones, _ := r.Dst.Mask.Size(); ones > 0 {
			// The kernel sorts the IPv4 table by destination, and a router may have a million routes. The
			// library would receive all of them.
			if over = f == prefix.IPv4 && !r.Dst.IP.IsUnspecified(); over {
				h.Close()
			}
			return !over
		}

		d := DefaultRoute{Family: f, Metric: r.Priority}
		d.add(r.LinkIndex)
		for _, hop := range r.MultiPath {
			d.add(hop.LinkIndex)
		}

		// Some systems keep an unreachable default route as a backstop. It carries no traffic, so it does
		// not count. Neither do routes for a type of service.
		if r.Type == unix.RTN_UNICAST && r.Tos == 0 {
			defaults = append(defaults, d)
		}
		return true
	})
	if over || errors.Is(err, unix.ENOENT) { // without the table there are no routes
		err = nil
	}
	return defaults, err
}

func (r *DefaultRoute) add(link int) {
	// Packets to several gateways on one link leave through a single interface.
	if link > 0 && !slices.Contains(r.Links, link) {
		r.Links = append(r.Links, link)
	}
}
