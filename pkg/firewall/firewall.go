// Package firewall says which rules let pods talk to the world and be
// forwarded: one neutral table, which firewall/iptables and firewall/nftables
// render. It also says whose a rule is, because several daemons share chains.
// It is pure.
package firewall

import (
	"context"
	"net/netip"
	"slices"

	"flanneld/pkg/prefix"
)

// Chain is one of the chains that hold rules of ours.
type Chain int

// The chains.
const (
	// Postrouting decides what is masqueraded.
	Postrouting Chain = iota
	// Forward accepts what is forwarded.
	Forward
	// GuardForward drops what pods send to the tunnels of other hosts.
	GuardForward
	// GuardInput drops what pods send to the tunnel of this host.
	GuardInput
)

// Chains returns all chains.
func Chains() []Chain { return []Chain{Postrouting, Forward, GuardForward, GuardInput} }

// Action is what a rule does with a packet.
type Action uint8

// The actions.
const (
	Return Action = iota + 1
	Accept
	Drop
	Masquerade
	// MasqueradeRandom picks source ports at random.
	MasqueradeRandom
)

// Mark is the bit of the packet mark by which kube-proxy asks for masquerading
// of its own. Rules look at no other bit.
const Mark = 0x4000

// Match is a condition on an address. The zero Match holds for all.
type Match struct {
	Prefix netip.Prefix // masked
	Not    bool
}

// In matches the addresses of p, masked; all addresses if its length is 0.
func In(p netip.Prefix) Match {
	if p.Bits() == 0 {
		return Match{}
	}
	return Match{Prefix: p.Masked()}
}

func notIn(p netip.Prefix) Match { return Match{Prefix: p.Masked(), Not: true} }

// Payload is a condition on what a packet carries. The zero Payload holds for all.
type Payload struct {
	Protocol uint8  // of IP; UDP has the number UDP
	Port     uint16 // destination port of UDP; 0 is any
}

// UDP is the number of that protocol.
const UDP = 17

// Rule is one rule of a chain.
type Rule struct {
	Marked   bool // only packets with Mark
	Src, Dst Match
	Payload  Payload
	Action   Action
}

// Network is the flat network of one family and this host's part of it.
type Network struct {
	Network, Subnet netip.Prefix
	// Tunnel is what carries packets of the network between hosts, if hosts accept it
	// without proof of who has sent it.
	Tunnel Payload
	// HostsInside is set if hosts send to each other at addresses inside of the network.
	HostsInside bool
}

// Policy is what the rules should come to.
type Policy struct {
	Networks []Network // at most one for each family
	// Masquerade hides what leaves the networks behind this host's address,
	// but for destinations in NonMasquerade. Random picks source ports at
	// random.
	Masquerade, Random bool
	NonMasquerade      []netip.Prefix
	// Forward accepts what is forwarded from and to the networks.
	Forward bool
	// Guard drops what pods send to the tunnels of hosts: such packets would pass for
	// those of the pod's host. Without Masquerade and Forward there are no rules at all.
	Guard bool
	// Former are networks of which no rule may be left.
	Former []netip.Prefix
}

// Applier makes the kernel hold the rules of one flavour.
type Applier interface {
	// Apply makes the kernel hold what p says: all of it, and of what names
	// p's networks or former ones nothing else. It writes only what differs,
	// and reports whether it wrote; with an error because ctx has ended,
	// whether it may have.
	Apply(ctx context.Context, p Policy) (changed bool, err error)
}

// Place is a chain of nftables by the name of its table and its own.
type Place struct{ Table, Chain string }

// Wanted reports whether there should be any rules.
func (p Policy) Wanted() bool { return len(p.Networks) > 0 && (p.Masquerade || p.Forward) }

// Cleanup is the policy under which nothing is left of p.
func (p Policy) Cleanup() Policy {
	c := Policy{Former: slices.Clone(p.Former)}
	for _, n := range p.Networks {
		c.Former = append(c.Former, n.Network)
	}
	return c
}

// Table holds the rules of one family.
type Table struct {
	Family prefix.Family
	// Own are the networks whose rules are ours to judge.
	Own   []netip.Prefix
	rules map[Chain][]Rule
}

// Concerns reports whether there is anything to see to.
func (t Table) Concerns() bool { return len(t.Own) > 0 }

// Wanted reports whether there should be any rules.
func (t Table) Wanted() bool { return len(t.rules) > 0 }

// Rules returns the rules of a chain when nobody else has any in it.
func (t Table) Rules(c Chain) []Rule {
	if len(t.rules[c]) == 0 {
		return nil
	}
	return slices.Concat(common(c), t.rules[c])
}

// multicast is never masqueraded.
func multicast(f prefix.Family) netip.Prefix {
	if f == prefix.IPv4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{224}), 4)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xff}), 8)
}

// Table returns the rules of family f.
func (p Policy) Table(f prefix.Family) Table {
	t := Table{Family: f, rules: map[Chain][]Rule{}}
	for _, n := range p.Networks {
		if prefix.FamilyOf(n.Network.Addr()) != f {
			continue
		}
		t.Own = append(t.Own, n.Network.Masked())
		if p.Masquerade {
			t.rules[Postrouting] = p.postrouting(n)
		}
		if p.Forward {
			t.rules[Forward] = []Rule{{Src: In(n.Network), Action: Accept}, {Dst: In(n.Network), Action: Accept}}
		}
		if p.Guard && p.Wanted() && n.Tunnel != (Payload{}) {
			t.rules[GuardForward] = n.guard()
			t.rules[GuardInput] = append(n.guard(), Rule{Src: In(n.Network), Dst: In(n.Subnet), Payload: n.Tunnel, Action: Drop})
		}
	}
	for _, n := range p.Former {
		if prefix.FamilyOf(n.Addr()) == f && !slices.Contains(t.Own, n.Masked()) {
			t.Own = append(t.Own, n.Masked())
		}
	}
	return t
}

// postrouting keeps the address of pods that talk to pods, hides that of pods
// that talk to others, and of others that talk to pods of other hosts: their
// answers must come back through this host.
func (p Policy) postrouting(n Network) []Rule {
	masquerade := Masquerade
	if p.Random {
		masquerade = MasqueradeRandom
	}
	network, subnet := In(n.Network), In(n.Subnet)
	rules := []Rule{
		{Src: subnet, Dst: network, Action: Return},
		{Src: network, Dst: subnet, Action: Return},
		{Src: notIn(n.Network), Dst: subnet, Action: Return},
	}
	f := prefix.FamilyOf(n.Network.Addr())
	for _, cidr := range p.NonMasquerade {
		r := Rule{Src: network, Dst: In(cidr), Action: Return}
		if prefix.FamilyOf(cidr.Addr()) == f && !slices.Contains(rules, r) {
			rules = append(rules, r)
		}
	}
	return append(rules,
		Rule{Src: network, Dst: notIn(multicast(f)), Action: masquerade},
		Rule{Src: notIn(n.Network), Dst: network, Action: masquerade},
	)
}

// guard drops tunnel packets from this host's pods to hosts. Pods may have tunnels between
// each other, unless hosts cannot be told from them. Each host drops in addition what any pod
// sends to its own addresses in its subnet. No rule drops what is from a host: that may
// have an address in the network, but not in a subnet.
func (n Network) guard() []Rule {
	rules := []Rule{{Src: In(n.Subnet), Dst: notIn(n.Network), Payload: n.Tunnel, Action: Drop}}
	if n.HostsInside {
		rules = append(rules, Rule{Src: In(n.Subnet), Dst: In(n.Network), Payload: n.Tunnel, Action: Drop})
	}
	return rules
}

// common are the rules at the head of a chain that are nobody's alone.
func common(c Chain) []Rule {
	if c == Postrouting {
		return []Rule{{Marked: true, Action: Return}}
	}
	return nil
}
