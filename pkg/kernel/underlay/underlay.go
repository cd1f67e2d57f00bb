// SPDX-License-Identifier: Apache-2.0

// Package underlay chooses the external interface, and watches whether the choice
// changes. Peers send to the address of this interface.
package underlay

import (
	"net"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Interface is the chosen external interface.
type Interface struct {
	Name  string
	Index int
	MTU   int // bytes; never 0
	// Addrs has one entry for each enabled address family, IPv4 first.
	Addrs []Address
	// Reason says briefly why this interface was chosen.
	Reason string
	// VRF is the name of the VRF to which the interface belongs; empty if it belongs to none.
	VRF string `json:",omitempty"`
	// Hardware is a hardware address of the host, by which a host that got another IP address differs from one
	// with a cloned disk. It is that of the interface if that has one. It is empty if the host has none.
	Hardware string `json:",omitempty"`
}

// Address is the address of the interface in one family.
type Address struct {
	// Local is assigned on this host. It is the source address of packets.
	Local netip.Addr
	// Public is the address that peers send to. It differs from Local behind 1:1 NAT.
	Public netip.Addr
}

func (i Interface) uses(local netip.Addr) bool {
	return slices.ContainsFunc(i.Addrs, func(a Address) bool { return a.Local == local })
}

// Family returns the address of family f; ok is false if the family is not enabled.
func (i Interface) Family(f prefix.Family) (a Address, ok bool) {
	for _, a := range i.Addrs {
		if prefix.FamilyOf(a.Local) == f {
			return a, true
		}
	}
	return Address{}, false
}

// NodeIP stands in Options.Ifaces for the addresses that the Node of this host has in Kubernetes.
const NodeIP = "node-ip"

// Options holds what decides the choice of the external interface, besides the facts that are
// read from the kernel: the operator's settings, the enabled families, the pod subnets and the
// current choice.
type Options struct {
	// Ifaces are interface names, addresses or NodeIP, tried in order.
	Ifaces []string
	// NodeIPs returns the addresses for which NodeIP stands, at most one for each family, as far as they are known. It
	// may be nil.
	NodeIPs func() []netip.Addr
	// IfaceRegexes are unanchored regular expressions for an address or a
	// name, tried in order after Ifaces.
	IfaceRegexes []string
	// CanReach is an address. The interface of the route to it is tried last.
	CanReach string
	// PublicIP and PublicIPv6 are the addresses that peers send to. Zero means the
	// interface's own address. The address of a disabled family has no effect.
	PublicIP, PublicIPv6 netip.Addr
	// Families are the enabled address families, IPv4 first; never empty.
	Families []prefix.Family
	// Pods are the pod subnets of this host, if known. An interface with an address in
	// them leads to pods, not to peers, so only Ifaces choose it.
	Pods []netip.Prefix
	// Peers returns the public addresses of other hosts, as far as known. It may be nil.
	Peers func() []netip.Addr
	// Published are addresses that this host has published before according to the store, such as
	// those of a flannel that ran here until now.
	Published []netip.Addr
	// InUse is the current choice, if there is one. It is preferred to other interfaces
	// that are as good. Its usable addresses are kept even if the interface has others that
	// would rank higher.
	InUse Interface
	// Reader is shared by all networks of a process, so that they share reads of the facts.
	// If it is nil, this network reads alone.
	Reader *Reader
}

// named is an address together with the option that set it.
type named struct {
	option string
	addr   netip.Addr
}

func (n named) String() string { return n.option + " " + n.addr.String() }

// public returns an invalid addr if the option is not set.
func (o Options) public(f prefix.Family) named {
	return map[prefix.Family]named{prefix.IPv4: {"--public-ip", o.PublicIP}, prefix.IPv6: {"--public-ipv6", o.PublicIPv6}}[f]
}

// asksForInterface reports whether an option selects an interface.
func (o Options) asksForInterface() bool {
	// Manifests contain --iface=$(IFACE), which may be empty.
	given := func(v string) bool { return v != "" }
	return slices.ContainsFunc(o.Ifaces, given) || slices.ContainsFunc(o.IfaceRegexes, given) || o.CanReach != ""
}

// Broadcasts returns the broadcast addresses of the networks to which this host belongs. A packet to one
// of them reaches all hosts of the network, so it is never the address of a host.
func Broadcasts() []netip.Addr {
	addrs, _ := net.InterfaceAddrs()
	var all []netip.Addr
	for _, a := range addrs {
		p, err := netip.ParsePrefix(a.String())
		if err == nil && p.Addr().Is4() && p.Bits() < 31 {
			all = append(all, prefix.Last(p))
		}
	}
	return all
}
