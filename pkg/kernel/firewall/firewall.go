// SPDX-License-Identifier: Apache-2.0

// Package firewall computes the rules that masquerade, accept and drop packets of pods, as
// one table that firewall/iptables and firewall/nftables render. Because several daemons
// share chains, it also decides which daemon a rule belongs to. It is pure: it neither reads
// nor writes the kernel's rules.
package firewall

import (
	"context"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Chain is one of the chains that contain flanneld's rules.
type Chain int

// The chains.
const (
	// Postrouting decides which packets are masqueraded.
	Postrouting Chain = iota
	// Forward accepts forwarded packets from and to pods.
	Forward
	// GuardForward drops packets that pods send to the tunnels of other hosts.
	GuardForward
	// GuardInput drops packets that pods send to the tunnel of this host.
	GuardInput
)

// Chains returns all chains.
func Chains() []Chain { return []Chain{Postrouting, Forward, GuardForward, GuardInput} }

// Action is the action of a rule on a packet.
type Action uint8

// The actions.
const (
	Return Action = iota + 1
	Accept
	Drop
	Masquerade
	// MasqueradeRandom masquerades with a random source port.
	MasqueradeRandom
)

// Mark is the bit of the packet mark with which kube-proxy requests its own masquerading.
// Rules ignore the other bits.
const Mark = 0x4000

// Match is a condition on an address. The zero Match matches every address.
type Match struct {
	Prefix netip.Prefix // masked
	Not    bool
}

// In returns the condition that an address is in p. It matches every address if the length
// of p is 0.
func In(p netip.Prefix) Match {
	if p.Bits() == 0 {
		return Match{}
	}
	return Match{Prefix: p.Masked()}
}

func notIn(p netip.Prefix) Match { return Match{Prefix: p.Masked(), Not: true} }

// Payload is a condition on the content of a packet. The zero Payload matches every
// packet.
type Payload struct {
	Protocol uint8  // IP protocol number, such as UDP; 0 matches every protocol
	Port     uint16 // UDP destination port, if Protocol is UDP; 0 matches every port
}

// UDP is the IP protocol number of UDP.
const UDP = 17

// Rule is one rule of a chain.
type Rule struct {
	Marked   bool // match only packets with Mark
	Src, Dst Match
	Payload  Payload
	Action   Action
}

// Network is the flat network of one family, and this host's subnet of it.
type Network struct {
	Network, Subnet netip.Prefix
	// Tunnels match the packets in which hosts carry the network's packets to each other,
	// if a host accepts them without authenticating the sender. There are two during a
	// migration between backends.
	Tunnels []Payload
	// HostsInside is set if hosts send to each other at addresses inside of the network.
	HostsInside bool
}

// Policy describes the effect that the rules should have.
type Policy struct {
	Networks []Network // at most one per family
	// Masquerade replaces the source address of packets that leave the networks by this
	// host's address, except to destinations in NonMasquerade. It also does so for packets
	// from outside of a network to pods of other hosts. Random makes the kernel choose
	// source ports at random.
	Masquerade, Random bool
	NonMasquerade      []netip.Prefix
	// Forward accepts forwarded packets from and to the networks.
	Forward bool
	// Guard drops packets that pods send to the tunnels of hosts, because the receiver
	// would take them for packets of the pod's host. Guard has no effect without
	// Masquerade or Forward.
	Guard bool
	// Former contains networks whose rules are removed, unless they are in Networks too.
	Former []netip.Prefix
	// Several is set if the daemon has more policies, for other networks. Packets between
	// two networks of the daemon are then masqueraded in both directions or, if
	// NonMasquerade of each policy contains the other network, in neither direction.
	Several bool
}

// Applier makes the kernel's rules equal to those of policies, with one flavour of firewall.
type Applier interface {
	// Apply makes the kernel contain all rules of the policies, and no other rule that
	// contains one of their present or former networks. It writes only differences. changed
	// reports whether it has written, even if it then fails. If it fails because ctx has
	// ended, changed reports whether it may have written.
	Apply(ctx context.Context, policies ...Policy) (changed bool, err error)
}

// ApplyFamilies implements Applier.Apply: it calls apply with the table of each family that the policies concern.
func ApplyFamilies(policies []Policy, apply func(t Table) (changed bool, err error)) (changed bool, err error) {
	var errs []error
	for _, f := range []prefix.Family{prefix.IPv4, prefix.IPv6} {
		if t := TableOf(f, policies...); t.Concerns() {
			wrote, err := apply(t)
			changed = changed || wrote
			errs = append(errs, err)
		}
	}
	return changed, oneline.Join(errs...)
}

// Place identifies a chain of nftables by the name of its table and its own name.
type Place struct{ Table, Chain string }

// Wanted reports whether the policy needs any rules.
func (p Policy) Wanted() bool { return len(p.Networks) > 0 && (p.Masquerade || p.Forward) }

// Cleanup returns the policy that removes all rules of p.
func (p Policy) Cleanup() Policy {
	c := Policy{Former: slices.Clone(p.Former)}
	for _, n := range p.Networks {
		c.Former = append(c.Former, n.Network)
	}
	return c
}

// Table contains the rules of one family.
type Table struct {
	Family prefix.Family
	// Own contains the networks, present and former, whose rules belong to this daemon.
	Own   []netip.Prefix
	rules map[Chain][]Rule
}

// Concerns reports whether the policies name a network of this family, with rules to write
// or to remove.
func (t Table) Concerns() bool { return len(t.Own) > 0 }

// Wanted reports whether the table contains any rules.
func (t Table) Wanted() bool { return len(t.rules) > 0 }

// notMulticast leaves out multicast addresses, which are never masqueraded.
var notMulticast = map[prefix.Family]Match{
	prefix.IPv4: notIn(netip.MustParsePrefix("224.0.0.0/4")), prefix.IPv6: notIn(netip.MustParsePrefix("ff00::/8")),
}

// TableOf returns the rules of family f of several policies, each with networks of its own.
func TableOf(f prefix.Family, policies ...Policy) Table {
	t := Table{Family: f, rules: map[Chain][]Rule{}}
	// A packet from one of the networks to another one must first pass the rules of the network
	// that it is from, whichever policy comes first.
	var fromPods, fromOthers []Rule
	for _, p := range policies {
		action := Masquerade
		if p.Random {
			action = MasqueradeRandom
		}
		for _, n := range p.Networks {
			if prefix.FamilyOf(n.Network.Addr()) != f {
				continue
			}
			t.add(p, n)
			if !p.Masquerade {
				continue
			}

			// Packets from pods for which no rule of keepSource precedes this one.
			fromPods = append(fromPods, Rule{Src: In(n.Network), Dst: notMulticast[f], Action: action})
			if p.Several {
				fromOthers = append(fromOthers, toOwnPods(n))
			}
			// Packets from outside of the network to pods of other hosts, because the answers of these pods must
			// come back through this host.
			fromOthers = append(fromOthers, Rule{Src: notIn(n.Network), Dst: In(n.Network), Action: action})
		}
	}

	t.append(Postrouting, append(fromPods, fromOthers...)...)
	for _, p := range policies {
		for _, n := range p.Former {
			if prefix.FamilyOf(n.Addr()) == f && !slices.Contains(t.Own, n.Masked()) {
				t.Own = append(t.Own, n.Masked())
			}
		}
	}
	return t
}

// add adds the rules of a network, except for those that masquerade.
func (t *Table) add(p Policy, n Network) {
	t.Own = append(t.Own, n.Network.Masked())
	if p.Masquerade {
		t.append(Postrouting, p.keepSource(n)...)
	}
	if p.Forward {
		t.append(Forward, Rule{Src: In(n.Network), Action: Accept}, Rule{Dst: In(n.Network), Action: Accept})
	}
	if !p.Guard || !p.Wanted() {
		return
	}

	for _, tunnel := range n.Tunnels {
		t.append(GuardForward, n.guard(tunnel)...)
		t.append(GuardInput, append(n.guard(tunnel), Rule{Src: In(n.Network), Dst: In(n.Subnet), Payload: tunnel, Action: Drop})...)
	}
}

func (t *Table) append(c Chain, rules ...Rule) {
	if len(rules) > 0 {
		t.rules[c] = append(t.rules[c], rules...)
	}
}

// keepSource returns the rules that keep the source address of packets.
func (p Policy) keepSource(n Network) []Rule {
	network := In(n.Network)
	subnet := In(n.Subnet)
	rules := []Rule{
		{Src: subnet, Dst: network, Action: Return},
		{Src: network, Dst: subnet, Action: Return},
	}
	if !p.Several { // otherwise TableOf adds this rule, after those of other networks
		rules = append(rules, toOwnPods(n))
	}

	f := prefix.FamilyOf(n.Network.Addr())
	for _, cidr := range p.NonMasquerade {
		r := Rule{Src: network, Dst: In(cidr), Action: Return}
		if prefix.FamilyOf(cidr.Addr()) == f && !slices.Contains(rules, r) {
			rules = append(rules, r)
		}
	}
	return rules
}

// toOwnPods keeps the source address of packets from outside to pods of this host.
func toOwnPods(n Network) Rule {
	return Rule{Src: notIn(n.Network), Dst: In(n.Subnet), Action: Return}
}

// guard returns rules that drop tunnel packets from this host's pods to hosts. Pods may have tunnels
// between each other, unless pods and hosts share addresses (HostsInside). Packets that hosts send to
// each other pass: the address of a host may be in the network, but not in a subnet.
func (n Network) guard(tunnel Payload) []Rule {
	rules := []Rule{{Src: In(n.Subnet), Dst: notIn(n.Network), Payload: tunnel, Action: Drop}}
	if n.HostsInside {
		rules = append(rules, Rule{Src: In(n.Subnet), Dst: In(n.Network), Payload: tunnel, Action: Drop})
	}
	return rules
}

// common returns the rules at the head of a chain, which all daemons share.
func common(c Chain) []Rule {
	if c == Postrouting { // packets with Mark belong to kube-proxy
		return []Rule{{Marked: true, Action: Return}}
	}
	return nil
}
