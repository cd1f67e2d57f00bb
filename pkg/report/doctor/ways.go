// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/report/status"
)

// Bridge is a bridge with an address in the network.
type Bridge struct {
	Name      string
	MTU       int            // in bytes
	PortMTU   int            // the largest MTU of its ports; 0 if it has none
	Addresses []netip.Prefix // in the network
	Down      bool
	CNI       bool // it is the one that the CNI plugins make, with pods: it needs an address in each subnet of this host
}

// In returns the address of the bridge in p, or the zero Prefix.
func (b Bridge) In(p netip.Prefix) (address netip.Prefix) {
	for _, a := range b.Addresses {
		if p.Contains(a.Addr()) {
			return a
		}
	}
	return address
}

// hasFamily reports whether the bridge has an address in the network of the family of p.
func (b Bridge) hasFamily(p netip.Prefix) bool {
	return slices.ContainsFunc(b.Addresses, func(a netip.Prefix) bool { return a.Addr().Is4() == p.Addr().Is4() })
}

// Way is the kernel's decision about a packet between a pod of this host and a pod of a peer.
type Way struct {
	Subnet netip.Prefix // of the peer
	Back   bool         // the packet comes from the peer
	// Part is the destination of a route to a part of the subnet of the peer or, with Back, of this host. The packet
	// is one for that route. Part is zero if the packet is one for a usual pod.
	Part     netip.Prefix
	In       string // the device on which the packet arrives
	Bridge   string // of the pod of this host
	From, To netip.Addr
	Route    Route // the decision
	// Sent is the decision about a packet of this host itself to the same address. It shows
	// whether only packets that arrive on a device are refused. It is set only if Route has an error.
	Sent Route
}

// Route is an answer of the kernel.
type Route struct {
	Err   error // why the packet is refused, or nil
	Dev   string
	Via   netip.Addr // zero if there is no gateway
	Table int
}

// String describes the route in the form of ip(8).
func (r Route) String() string {
	switch {
	case errors.Is(r.Err, syscall.EINVAL):
		return "drops them (blackhole)"
	case r.Err != nil:
		return "refuses them: " + r.Err.Error()
	}
	s := "leads to"
	if r.Via.IsValid() {
		s += " " + r.Via.String()
	}
	return s + " dev " + r.Dev
}

// Rule is a rule for the choice of a routing table.
type Rule struct {
	Family   prefix.Family
	Priority int
	From, To netip.Prefix // zero for all addresses
	In       string       // the device on which packets arrive; empty for all
	Table    int
	Refuses  bool // packets are dropped or refused without a table
	// Partly means that the rule has other conditions, such as a mark. It is not known whether it applies.
	Partly bool
}

// Refusal is a route that drops or refuses packets.
type Refusal struct {
	To    netip.Prefix
	Table int
}

// The kernel looks up the tables default, main and local for all packets. flanneld's routes are in main.
const (
	tableDefault = 253
	tableLocal   = 255
)

// takes reports whether a rule is the reason for the kernel's decision about a packet.
func (h Facts) takes(r Rule, w Way) bool {
	switch {
	case r.Partly, r.Table >= tableDefault && r.Table <= tableLocal, !r.about(w):
		return false
	case w.Route.Err == nil:
		return r.Table == w.Route.Table
	}
	return r.Refuses || slices.ContainsFunc(h.Refusals, func(f Refusal) bool { return f.Table == r.Table && f.To.Contains(w.To) })
}

// about reports whether the addresses and the device of a packet are those of the rule.
func (r Rule) about(w Way) bool {
	return r.Family == prefix.FamilyOf(w.To) && (r.In == "" || r.In == w.In) &&
		(!r.From.IsValid() || r.From.Contains(w.From)) && (!r.To.IsValid() || r.To.Contains(w.To))
}

// partly finds rules that drop some packets of pods, such as those of one protocol.
func (h Facts) partly(found finder) {
	for _, r := range h.Rules {
		var subnets []netip.Prefix
		for _, w := range h.Ways {
			if r.Partly && r.Refuses && r.about(w) && !slices.Contains(subnets, w.Subnet) {
				subnets = append(subnets, w.Subnet)
			}
		}
		if len(subnets) > 0 {
			f := note(fmt.Sprintf("a rule with priority %d may drop packets of pods: those of one protocol, port or mark", r.Priority), "ip rule show; ip -6 rule show")
			f.Subnets = subnets
			found(f)
		}
	}
}

// ways finds each reason why the kernel does not carry packets of pods. Packets to many peers usually have the same
// reason.
func (h Facts) ways(found finder) {
	expected := map[netip.Prefix][]Route{}
	for _, p := range h.Report.Peers {
		for i, s := range p.Subnets {
			routes := RoutesTo(p)
			for _, dev := range h.Report.Network.Devices {
				if len(routes) > 0 && h.migrates() { // the backend that carries the packets may have one route for all peers
					routes = append(routes, Route{Dev: dev})
				}
			}
			if len(routes) > 0 && i < len(p.PublicIPs) {
				// Without flanneld's route, a packet to the host itself usually arrives as well.
				routes = append(routes, Route{Via: p.PublicIPs[i]})
			}
			expected[s] = routes
		}
	}

	var reasons []Finding
	down := slices.ContainsFunc(h.Bridges, func(b Bridge) bool { return b.Down })
	for _, w := range h.Ways {
		f, wrong := h.wayFinding(w, expected[w.Subnet])
		if !wrong || w.Back && down {
			continue
		}
		same := slices.IndexFunc(reasons, func(other Finding) bool { return other.Problem == f.Problem })
		if same >= 0 {
			reasons[same].Subnets = append(reasons[same].Subnets, w.Subnet)
			continue
		}
		reasons = append(reasons, f)
	}

	for _, f := range reasons {
		reach := "do not reach"
		if !f.Serious {
			reach = "may not reach"
		}
		f.Problem = fmt.Sprintf("pods %s %s: %s", reach, oneline.List(oneline.Strings(f.Subnets), ", "), f.Problem)
		found(f)
	}
}

// wayFinding returns the reason why a packet does not arrive. wrong is false if nothing is wrong, or if
// forwarding returns the reason.
func (h Facts) wayFinding(w Way, expected []Route) (f Finding, wrong bool) {
	r := w.Route
	if f, wrong := h.strayed(w); wrong {
		return f, true
	}
	switch {
	case r.Err == nil && w.Back && slices.ContainsFunc(h.Bridges, func(b Bridge) bool { return b.Name == r.Dev }),
		r.Err == nil && !w.Back && (len(expected) == 0 || slices.ContainsFunc(expected, r.like)):
		return h.dropped(w)
	case r.Err != nil && prefix.FamilyOf(w.To) == prefix.IPv4:
		if v, ok := h.sysctl("net/ipv4/conf/" + w.In + "/forwarding"); ok && v == 0 {
			return f, false
		}
	}

	whose := w.whose()
	if i := slices.IndexFunc(h.Rules, func(rule Rule) bool { return h.takes(rule, w) }); i >= 0 {
		rule := h.Rules[i]
		to := fmt.Sprintf("a rule with priority %d looks up %s in table %d, which %s", rule.Priority, whose, rule.Table, r)
		if rule.Refuses {
			to = fmt.Sprintf("a rule with priority %d drops or refuses %s", rule.Priority, whose)
		}
		return cut("rule", to, h.ruleFix(w, rule), w.Subnet), true
	}

	// Before Linux 6.13 the filter has an error of its own, EXDEV. Later versions return EINVAL, as for a blackhole.
	if r.Err != nil && w.Sent.Err == nil && h.strict(w.In) && (errors.Is(r.Err, syscall.EXDEV) || errors.Is(r.Err, syscall.EINVAL)) {
		origin := "the pods of this host"
		if w.Back {
			origin = "the pods of other hosts"
		}
		return cut("rp_filter", fmt.Sprintf("rp_filter is strict on %s, and the route back to %s leads elsewhere", w.In, origin),
			fmt.Sprintf("sysctl -w net/ipv4/conf/all/rp_filter=2 net/ipv4/conf/%s/rp_filter=2 (and lines in /etc/sysctl.d)", w.In), w.Subnet), true
	}
	fix := fmt.Sprintf("ip route get %s from %s iif %s; ip rule; ip route show table all; a running flanneld puts its own routes back", w.To, w.From, w.In)
	if w.Part.IsValid() {
		fix = fmt.Sprintf("ip route show table all root %s; if nothing needs the route, delete it", w.Part)
	}
	return cut("route", fmt.Sprintf("the route of %s %s", whose, r), fix, w.Subnet), true
}

// strayed finds packets to pods that go to another bridge, because that has an address in the same subnet and the kernel
// uses the route that was there first. A bridge without ports has no pods that need them.
func (h Facts) strayed(w Way) (f Finding, wrong bool) {
	if !w.Back || w.Part.IsValid() || w.Route.Err != nil || w.Route.Dev == w.Bridge {
		return f, false
	}

	at := func(name string) int {
		return slices.IndexFunc(h.Bridges, func(b Bridge) bool { return b.Name == name })
	}
	own, other := at(w.Bridge), at(w.Route.Dev)
	if own < 0 || other < 0 || h.Bridges[own].PortMTU == 0 {
		return f, false
	}
	for _, a := range h.Bridges[other].Addresses {
		if a.Contains(w.To) {
			return cut("bridge", fmt.Sprintf("packets to pods at %s go to %s, which has the address %s in the same subnet", w.Bridge, w.Route.Dev, a),
				fmt.Sprintf("ip addr del %s dev %s, and give %[2]s another subnet", a, w.Route.Dev), w.Subnet), true
		}
	}
	return f, false
}

func (w Way) whose() string {
	switch {
	case w.Back && w.Part.IsValid():
		return "packets to pods in " + w.Part.String()
	case w.Back:
		return "packets to pods"
	case w.Part.IsValid():
		return "packets from pods to " + w.Part.String()
	}
	return "packets from pods"
}

// dropped returns the policy of IPsec that drops a packet with the right route.
func (h Facts) dropped(w Way) (f Finding, wrong bool) {
	for _, direction := range []string{"fwd", "out"} {
		if p, drops := h.policy(direction, w.From, w.To, 0); drops {
			return h.policyFinding(p, w.whose(), w.Subnet), true
		}
	}
	return f, false
}

// ruleFix returns a command that makes the packets of pods use the main table.
func (h Facts) ruleFix(w Way, r Rule) string {
	ip := "ip"
	if w.To.Is6() {
		ip = "ip -6"
	}
	return fmt.Sprintf("%s rule add pref %d to %s lookup main (and make it permanent)", ip, max(r.Priority-1, 1), h.networkOf(w.To))
}

// RoutesTo returns the routes of flanneld to a peer. It returns nil if there are none, or if flanneld wants the host
// to refuse the packets.
func RoutesTo(p status.Peer) (routes []Route) {
	for _, o := range p.Objects {
		words := strings.Fields(o.Text)
		if len(words) == 0 || words[0] != "route" {
			continue
		}

		var r Route
		for i, word := range words[:len(words)-1] {
			switch word {
			case "dev":
				r.Dev = words[i+1]
			case "via":
				r.Via, _ = netip.ParseAddr(words[i+1])
			}
		}
		if r.Dev == "" {
			return nil
		}
		routes = append(routes, r)
	}
	return routes
}

// like reports whether the route has the gateway and the device of another. An empty device stands for all.
func (r Route) like(other Route) bool {
	return r.Via == other.Via && (r.Dev == other.Dev || other.Dev == "")
}

// bridges checks the state, the addresses and the MTUs of the bridges of pods.
func (h Facts) bridges(found finder) {
	mtu := h.Report.Network.MTU
	external := h.Report.Interface
	for _, b := range h.Bridges {
		if b.Down { // the kernel has also removed its routes, and its addresses of IPv6
			found(cut("bridge", b.Name+" is down: its pods are not reached",
				"ip link set "+b.Name+" up, and look for the program that has set it down"))
			continue
		}
		for _, own := range h.Report.Lease.Subnets {
			if b.CNI && !slices.ContainsFunc(h.Bridges, func(other Bridge) bool { return other.hasFamily(own) }) {
				fix := fmt.Sprintf("ip addr add %s dev %s", netip.PrefixFrom(own.Masked().Addr().Next(), own.Bits()), b.Name)
				key := "net/ipv6/conf/" + b.Name + "/disable_ipv6"
				if v, ok := h.sysctl(key); ok && v == 1 && own.Addr().Is6() {
					fix = "sysctl -w " + key + "=0; " + fix
				}
				found(cut("bridge", fmt.Sprintf("%s has pods and no address: pods of %s are not reached", b.Name, own),
					fix+", and look for the program that has removed it", h.subnetsOf(prefix.FamilyOf(own.Addr()))...))
			}
			for _, n := range h.Report.Network.Prefixes {
				if former := b.In(n); former.IsValid() && n.Overlaps(own) && !b.In(own).IsValid() {
					found(cut("bridge",
						fmt.Sprintf("%s has the address %s, but this host's subnet is %s: its pods are not reached", b.Name, former, own),
						fmt.Sprintf("ip link delete %s, and restart the pods: the CNI plugin creates the bridge again", b.Name), h.subnetsOf(prefix.FamilyOf(own.Addr()))...,
					))
				}
			}
		}

		switch {
		case mtu > 0 && b.PortMTU > 0 && b.MTU > mtu: // without ports the kernel sets 1500
			found(cut("mtu",
				fmt.Sprintf("%s has MTU %d, the network carries %d (%s has %d): large packets are lost or slow", b.Name, b.MTU, mtu, external.Name, external.MTU),
				fmt.Sprintf("ip link set %s mtu %d, and restart the pods; or set the MTU of %s", b.Name, mtu, external.Name)))
		case mtu > 0 && b.PortMTU > mtu:
			found(cut("mtu",
				fmt.Sprintf("pods at %s have MTU %d, the network carries %d: large packets are lost or slow", b.Name, b.PortMTU, mtu),
				"restart the pods: they keep the MTU with which they were created"))
		case b.PortMTU > b.MTU:
			found(cut("mtu",
				fmt.Sprintf("%s has MTU %d, its pods have %d: large packets to them are lost", b.Name, b.MTU, b.PortMTU),
				fmt.Sprintf("ip link set %s mtu %d", b.Name, b.PortMTU)))
		}
	}
}
