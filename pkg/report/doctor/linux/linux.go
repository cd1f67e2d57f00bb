// SPDX-License-Identifier: Apache-2.0

// Package linux gathers the facts about this host that package doctor judges. It changes nothing.
package linux

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/gaissmai/bart"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/base/wait"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/iptables"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
	"github.com/flanneld/flanneld/pkg/report/doctor"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// dumpTries is the maximum number of tries of a dump that changes interrupt.
const dumpTries = 5

// Host returns the facts about this host without a daemon. away says why no daemon answers.
func Host(away error) doctor.Facts {
	return doctor.Facts{Away: away, Files: os.DirFS("/")}
}

// Pods returns the facts that doctor.CutOff judges: those about the packets of pods of one network. Facts.Unread names
// those that cannot be read.
func Pods(r status.Report) doctor.Facts { return pods(r, nil) }

// pods returns the result of Pods. parts has destinations of routes for which it asks too.
func pods(r status.Report, parts []part) doctor.Facts {
	f := Host(nil)
	f.Report = r
	var err error
	f.Bridges, err = bridges(r)
	unread(&f, "read the bridges of pods", err)
	f.Rules, err = rules()
	unread(&f, "read the rules for routing tables", err)
	f.Ways, err = ways(r, f.Bridges, parts)
	unread(&f, "ask for the routes of pods", err)
	if slices.ContainsFunc(f.Ways, func(w doctor.Way) bool { return w.Route.Err != nil }) {
		f.Refusals, err = refusals()
		unread(&f, "read the routes that refuse packets", err)
	}
	f.Policies, err = policies()
	unread(&f, "read the policies of IPsec", err)
	return f
}

// unread adds to the facts that an activity has failed, unless err is nil.
func unread(f *doctor.Facts, activity string, err error) {
	if err != nil {
		f.Unread = oneline.Join(f.Unread, fmt.Errorf("%s: %w", activity, err))
	}
}

// Gather returns the facts about this host and one of its networks.
func Gather(ctx context.Context, r status.Report) doctor.Facts {
	twins := make(chan []doctor.Twin, 1)
	go func() { twins <- ownTwins(ctx, r) }() // it waits for answers

	parts, err := partsOf(r)
	f := pods(r, parts)
	unread(&f, "read the routes to parts of subnets", err)
	f.Docker = docker(ctx, r, f.Bridges)
	packets := packets(r, f.Ways)
	inIPTables, err := iptables.Blocks(ctx, packets)
	inNFTables, failed := nftables.Blocks(packets)
	unread(&f, "read the rules of other firewalls", oneline.Join(err, failed))
	f.Blocks = slices.Concat(inIPTables, inNFTables)
	f.Attached, err = Attached(r, f.Bridges)
	unread(&f, "read what is attached to devices", err)
	f.Twins = <-twins
	return f
}

// dump calls list until no change in the kernel interrupts it, at most dumpTries times.
func dump[T any](list func() ([]T, error)) (all []T, err error) {
	for range dumpTries {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return nil, err
}

func addresses() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) }

// routeList lists the routes of all tables.
func routeList() ([]netlink.Route, error) {
	return netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
}

// routes returns the routes of these types, such as unix.RTN_UNICAST, of all tables.
func routes(kinds ...int) ([]netlink.Route, error) {
	all, err := dump(routeList)
	return slices.DeleteFunc(all, func(r netlink.Route) bool { return !slices.Contains(kinds, r.Type) }), err
}

// refusing are the types of routes that drop or refuse packets.
var refusing = []int{unix.RTN_BLACKHOLE, unix.RTN_UNREACHABLE, unix.RTN_PROHIBIT}

// Ranges returns the ranges of addresses that this host reaches through routes of any table or its own
// addresses, except for default routes, loopback, multicast and link-local addresses.
func Ranges() ([]doctor.Range, error) {
	routes, err := routes(unix.RTN_UNICAST)
	names, errNames := deviceNames()
	addrs, errAddrs := dump(addresses)
	if err = cmp.Or(err, errNames, errAddrs); err != nil {
		return nil, err
	}

	var all []doctor.Range
	known := map[doctor.Range]struct{}{} // without gateways; a router may have a million routes
	add := func(r doctor.Range) {
		key := doctor.Range{To: r.To, Dev: r.Dev}
		_, twice := known[key]
		a := r.To.Addr()
		if twice || r.To.Bits() == 0 || a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast() {
			return
		}

		known[key] = struct{}{}
		all = append(all, r)
	}

	for _, a := range addrs {
		if to, ok := toPrefix(a.IPNet); ok {
			add(doctor.Range{To: to.Masked(), Dev: names[a.LinkIndex]})
		}
	}

	for _, r := range routes {
		if to, ok := toPrefix(r.Dst); ok {
			via, _ := netip.AddrFromSlice(r.Gw)
			add(doctor.Range{To: to, Dev: names[r.LinkIndex], Via: via.Unmap()})
		}
	}
	return all, nil
}

// deviceNames returns the names of all devices by index.
func deviceNames() (map[int]string, error) {
	links, err := dump(netlink.LinkList)
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	return names, err
}

// usualBridge is the bridge that the CNI plugins make if their configuration names none.
const usualBridge = "cni0"

// bridges returns the bridges that have an address in the network, except for the external interface, and the
// usual one if it has pods and no address at all.
func bridges(r status.Report) ([]doctor.Bridge, error) {
	links, err := dump(netlink.LinkList)
	addrs, failed := dump(addresses)
	if err = cmp.Or(err, failed); err != nil {
		return nil, err
	}

	var found []doctor.Bridge
	for _, link := range links {
		own := link.Attrs()
		if link.Type() != "bridge" || own.Name == r.Interface.Name {
			continue
		}

		b := doctor.Bridge{Name: own.Name, MTU: own.MTU}
		anywhere := false
		for _, a := range addrs {
			p, ok := toPrefix(a.IPNet)
			anywhere = anywhere || ok && a.LinkIndex == own.Index && !p.Addr().IsLinkLocalUnicast()
			if ok && a.LinkIndex == own.Index && slices.ContainsFunc(r.Network.Prefixes, func(n netip.Prefix) bool { return n.Contains(p.Addr()) }) {
				b.Addresses = append(b.Addresses, p)
			}
		}

		for _, port := range links {
			if port.Attrs().MasterIndex == own.Index {
				b.PortMTU = max(b.PortMTU, port.Attrs().MTU)
			}
		}
		b.CNI = b.Name == usualBridge && b.PortMTU > 0
		b.Down = own.Flags&net.FlagUp == 0 && b.PortMTU > 0
		if len(b.Addresses) > 0 || !anywhere && b.CNI {
			found = append(found, b)
		}
	}
	return found, nil
}

// Addresses lets several networks share reads of the addresses of this host.
type Addresses struct{ wait.Batch[[]netlink.Addr] }

// HasPods reports whether a bridge has an address in a subnet of this host. It does not list the links: a host with a
// hundred networks has hundreds.
func (s *Addresses) HasPods(ctx context.Context, subnets []netip.Prefix) bool {
	addrs := s.Do(ctx, func(context.Context) []netlink.Addr {
		all, _ := dump(addresses) // nil with an error
		return all
	})
	return slices.ContainsFunc(addrs, func(a netlink.Addr) bool {
		p, ok := toPrefix(a.IPNet)
		if !ok || !slices.ContainsFunc(subnets, func(own netip.Prefix) bool { return own.Contains(p.Addr()) }) {
			return false
		}

		link, err := netlink.LinkByIndex(a.LinkIndex)
		return err == nil && link.Type() == "bridge"
	})
}

func ruleList() ([]netlink.Rule, error) { return netlink.RuleList(netlink.FAMILY_ALL) }

func rules() ([]doctor.Rule, error) {
	list, err := dump(ruleList)
	if err != nil {
		return nil, err
	}
	var all []doctor.Rule
	for _, r := range list {
		rule := doctor.Rule{Family: prefix.IPv4, Priority: r.Priority, In: r.IifName, Table: r.Table}
		if r.Family == netlink.FAMILY_V6 {
			rule.Family = prefix.IPv6
		}
		rule.From, _ = toPrefix(r.Src)
		rule.To, _ = toPrefix(r.Dst)
		// The library does not tell the action. Rules that refuse have no table, but those for VRFs have none either: these
		// are about all packets.
		rule.Refuses = r.Table == unix.RT_TABLE_UNSPEC && r.Goto < 0 && !r.Invert && (rule.From.IsValid() || rule.To.IsValid() || rule.In != "")
		// Packets of pods have no mark.
		rule.Partly = r.Mark != 0 || r.Invert || r.OifName != "" || r.Tos != 0 || r.IPProto != 0 || r.Dport != nil || r.Sport != nil || r.UIDRange != nil || r.Goto > 0
		all = append(all, rule)
	}
	slices.SortStableFunc(all, func(a, b doctor.Rule) int { return a.Priority - b.Priority })
	return all, nil
}

// refusals returns the routes of all tables that drop or refuse packets.
func refusals() (all []doctor.Refusal, err error) {
	found, err := routes(refusing...)
	for _, r := range found {
		if to, ok := toPrefix(r.Dst); ok {
			all = append(all, doctor.Refusal{To: to, Table: r.Table})
		}
	}
	return all, err
}

// part is the destination of a route that is longer than that of the subnet around it.
type part struct {
	to      netip.Prefix
	strange bool // a route to pods of this host would not be like that
}

// mostParts limits the number of routes to parts of subnets for which the kernel is asked.
const mostParts = 256

// partsOf returns the routes of all tables to parts of subnets of r, such as those that Calico leaves behind.
func partsOf(r status.Report) (parts []part, err error) {
	var subnets bart.Lite
	for _, s := range r.Lease.Subnets {
		subnets.Insert(s)
	}
	for _, p := range r.Peers {
		for _, s := range p.Subnets {
			subnets.Insert(s)
		}
	}

	all, err := routes(append(slices.Clone(refusing), unix.RTN_UNICAST)...)
	for _, route := range all {
		to, ok := toPrefix(route.Dst)
		around, inside := subnets.LookupPrefixLPM(to)
		if ok && inside && around.Bits() < to.Bits() && len(parts) < mostParts {
			parts = append(parts, part{to, route.Type != unix.RTN_UNICAST || route.Gw != nil})
		}
	}
	return parts, err
}

// somewhere returns an address for which the kernel takes the route to p.
func (p part) somewhere() netip.Addr {
	if p.to.IsSingleIP() {
		return p.to.Addr()
	}
	return p.to.Addr().Next() // the first one may be a broadcast address
}

// ways asks the kernel what it does with packets between a pod of each bridge and a pod of each peer, and with those
// for the parts of both subnets.
func ways(r status.Report, bridges []doctor.Bridge, parts []part) ([]doctor.Way, error) {
	k, err := newAsker()
	if err != nil {
		return nil, err
	}
	defer k.handle.Close()

	for _, b := range bridges {
		for _, own := range r.Lease.Subnets {
			a := b.In(own)
			if !a.IsValid() {
				continue
			}
			for _, p := range r.Peers {
				for _, s := range p.Subnets {
					if !p.State.Served() || s.Addr().Is4() != a.Addr().Is4() {
						continue
					}
					k.askBetween(b.Name, own, podAt(a), p, s, parts)
				}
			}
		}
	}
	if k.err != nil {
		return nil, k.err
	}
	return k.ways, nil
}

// podAt returns the address of a pod at a bridge with the address a. A gateway may have the last address of a subnet that
// pods can have.
func podAt(a netip.Prefix) netip.Addr {
	if next := a.Addr().Next(); next.Compare(prefix.Last(a)) < 0 {
		return next
	}
	return a.Addr().Prev()
}

// askBetween asks about packets between a pod in the subnet own of this host, behind a bridge, and a subnet of a peer.
func (k *asker) askBetween(bridge string, own netip.Prefix, pod netip.Addr, p status.Peer, s netip.Prefix, parts []part) {
	there := s.Addr().Next().Next() // the first address is that of the device, the second that of the bridge
	out := doctor.Way{Subnet: s, In: bridge, Bridge: bridge, From: pod, To: there}
	route := k.ask(out)
	k.askParts(out, s, parts)
	if in := arrival(route.Dev, doctor.RoutesTo(p)); in != "" {
		back := doctor.Way{Subnet: s, Back: true, In: in, Bridge: bridge, From: there, To: pod}
		k.ask(back)
		k.askParts(back, own, parts)
	}
}

// askParts asks about packets like that of w to those parts of the destination's subnet in which w.To is not.
func (k *asker) askParts(w doctor.Way, subnet netip.Prefix, parts []part) {
	for _, part := range parts {
		if !subnet.Contains(part.to.Addr()) || part.to.Contains(w.To) || w.Back && !part.strange {
			continue
		}
		other := w
		other.Part = part.to
		other.To = part.somewhere()
		k.ask(other)
	}
}

// arrival returns the device on which packets of a peer arrive: the one by which this host sends, unless another
// program has changed that. It is empty if it is not known.
func arrival(out string, own []doctor.Route) string {
	if len(own) == 0 || slices.ContainsFunc(own, func(r doctor.Route) bool { return r.Dev == out }) {
		return out
	}
	return own[0].Dev
}

// asker asks the kernel for routes. It has one socket and remembers devices, because a host may have thousands of
// peers.
type asker struct {
	handle  *netlink.Handle
	names   map[int]string
	indexes map[string]int
	ways    []doctor.Way // with the answers
	err     error        // the first one of ask, which then asks no more
}

func newAsker() (*asker, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	return &asker{handle: handle, names: map[int]string{}, indexes: map[string]int{}}, nil
}

// ask returns the route of a packet, and adds the packet with its routes to ways.
func (k *asker) ask(w doctor.Way) doctor.Route {
	if _, known := k.indexes[w.In]; !known && k.err == nil {
		var link netlink.Link
		if link, k.err = k.handle.LinkByName(w.In); k.err == nil {
			k.indexes[w.In] = link.Attrs().Index
		}
	}
	if k.err == nil {
		w.Route, k.err = k.lookUp(w.To, &netlink.RouteGetOptions{IifIndex: k.indexes[w.In], SrcAddr: net.IP(w.From.AsSlice())})
	}
	if k.err == nil && w.Route.Err != nil {
		w.Sent, k.err = k.lookUp(w.To, nil)
	}
	k.ways = append(k.ways, w)
	return w.Route
}

func (k *asker) lookUp(to netip.Addr, o *netlink.RouteGetOptions) (r doctor.Route, err error) {
	routes, err := k.handle.RouteGetWithOptions(net.IP(to.AsSlice()), o)
	refusal := unix.Errno(0)
	switch {
	case errors.As(err, &refusal):
		return doctor.Route{Err: refusal}, nil
	case err != nil:
		return r, err
	case len(routes) == 0:
		return r, errors.New("the kernel gives no route")
	}

	route := routes[0]
	r.Table = route.Table
	r.Via, _ = netip.AddrFromSlice(route.Gw)
	r.Via = r.Via.Unmap()
	name, known := k.names[route.LinkIndex]
	if !known {
		link, err := k.handle.LinkByIndex(route.LinkIndex)
		if err != nil {
			return r, err
		}
		name = link.Attrs().Name
		k.names[route.LinkIndex] = name
	}
	r.Dev = name
	return r, nil
}

// docker reads the rules of Docker about each bridge that has the subnet of this host. If the rules of a
// firewall cannot be read, it takes them for rules that drop nothing.
func docker(ctx context.Context, r status.Report, bridges []doctor.Bridge) []doctor.Docker {
	var all []doctor.Docker
	for _, subnet := range r.Lease.Subnets {
		network := slices.IndexFunc(r.Network.Prefixes, func(n netip.Prefix) bool { return prefix.Contains(n, subnet) })
		bridge := slices.IndexFunc(bridges, func(b doctor.Bridge) bool { return b.In(subnet).IsValid() })
		if network < 0 || bridge < 0 {
			continue
		}

		d := doctor.Docker{
			Program: iptables.Default.Program(prefix.FamilyOf(subnet.Addr())),
			Bridge: firewall.DockerBridge{
				Network: r.Network.Prefixes[network], Subnet: subnet, Name: bridges[bridge].Name,
				From: append(slices.Clone(r.Network.Devices), r.Interface.Name),
			},
		}

		d.IPTables, _ = iptables.Docker(ctx, d.Bridge)
		d.NFTables, _ = nftables.Docker(d.Bridge)
		all = append(all, d)
	}
	return all
}

// packets returns the packets that no firewall may drop: those of the backend from and to another host, and
// those between pods for each pair of devices.
func packets(r status.Report, ways []doctor.Way) []firewall.Packet {
	var all []firewall.Packet
	for _, own := range r.Interface.Addresses {
		other := peerAddress(r, own.Local.Is4())
		for _, carrier := range carriers(r.Network, own.Local.Is4()) {
			if other.IsValid() {
				all = append(all,
					firewall.Packet{In: r.Interface.Name, Src: other, Dst: own.Local, Protocol: carrier.Protocol, Port: carrier.Port},
					firewall.Packet{Out: r.Interface.Name, Src: own.Local, Dst: other, Protocol: carrier.Protocol, Port: carrier.Port})
			}
		}
	}

	pods := len(all)
	for _, w := range ways {
		route := w.Route
		if route.Err != nil {
			route = w.Sent // a rule that drops packets is the next cause as soon as the host forwards them again
		}
		if route.Err != nil || w.Part.IsValid() {
			continue
		}
		own, ok := prefix.OfFamily(r.Lease.Subnets, prefix.FamilyOf(w.Subnet.Addr()))
		if !ok {
			continue
		}

		// These addresses are hardly those of pods, which may have rules of their own. Nothing uses TCP port 1.
		p := firewall.Packet{In: w.In, Out: route.Dev, Src: prefix.Last(own).Prev(), Dst: prefix.Last(w.Subnet).Prev(), Protocol: firewall.TCP, Port: 1}
		if w.Back {
			p.Src, p.Dst = p.Dst, p.Src
		}

		same := func(other firewall.Packet) bool {
			return other.In == p.In && other.Out == p.Out && other.Src.Is4() == p.Src.Is4()
		}
		if !slices.ContainsFunc(all, same) {
			all = append(all, p)
		}
	}
	for _, p := range all[pods:] {
		p.Protocol = firewall.UDP
		all = append(all, p)
	}
	return append(all, checks(r, ways)...)
}

// carriers returns the packets in which the backend carries others.
func carriers(n status.Network, ip4 bool) (all []firewall.Payload) {
	for _, port := range n.Ports {
		all = append(all, firewall.Payload{Protocol: firewall.UDP, Port: uint16(port)})
	}
	if n.BackendType == "ipip" {
		all = append(all, firewall.Payload{Protocol: map[bool]uint8{true: unix.IPPROTO_IPIP, false: unix.IPPROTO_IPV6}[ip4]})
	}
	return all
}

// checks returns the packets by which other hosts check whether they reach this one, one for each family.
func checks(r status.Report, ways []doctor.Way) (all []firewall.Packet) {
	for _, w := range ways {
		own, ok := prefix.OfFamily(r.Lease.Subnets, prefix.FamilyOf(w.Subnet.Addr()))
		if !w.Back || !ok || slices.ContainsFunc(all, func(p firewall.Packet) bool { return p.Src.Is4() == own.Addr().Is4() }) {
			continue
		}
		p := firewall.Packet{In: w.In, Src: w.Subnet.Masked().Addr(), Dst: own.Masked().Addr(), Protocol: firewall.TCP, Port: 1}
		if len(r.Network.Devices) == 0 { // they send from their public addresses to the bridge
			p.Src = peerAddress(r, own.Addr().Is4())
			p.Dst = p.Dst.Next()
		}
		if p.Src.IsValid() {
			all = append(all, p)
		}
	}
	return all
}

// peerAddress returns the public address of a peer, or the zero Addr if there is none of that family.
func peerAddress(r status.Report, v4 bool) netip.Addr {
	for _, p := range r.Peers {
		for _, a := range p.PublicIPs {
			if p.State.Served() && a.Is4() == v4 {
				return a
			}
		}
	}
	return netip.Addr{}
}

func toPrefix(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(a.Unmap(), bits), ok
}
