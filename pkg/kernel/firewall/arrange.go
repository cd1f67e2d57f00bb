// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Arrangement is the content that a chain should have: the common rules at its head, the
// rules of other daemons unchanged, and this host's rules in their order. The rules of other
// daemons may be anywhere after the common rules.
type Arrangement struct {
	Common, Own []Rule
	Others      []int // indexes, from 0, of the existing rules that belong to other daemons and stay
	// Exact is set if the chain has this content already.
	Exact bool
}

// Empty reports whether no daemon needs the chain.
func (a Arrangement) Empty() bool { return len(a.Own)+len(a.Others) == 0 }

// Arrange decides which rules of chain c stay. have contains the existing rules in their
// order, with nil for a rule that no daemon creates.
//
// Apart from the common rules, every rule of a daemon contains the daemon's network. So a rule
// that contains one of t's networks belongs to t. Another daemon's network is recognised by
// its rules: the chain masquerades packets from the network, accepts both the packets from it
// and the packets to it, or drops tunnel packets to destinations outside of the network. All
// rules that contain such a network belong to that daemon. Any other rule must go. The rules
// of other daemons may be anywhere between the own ones, because they match other packets.
func (t Table) Arrange(c Chain, have []*Rule) Arrangement {
	a := Arrangement{Own: t.rules[c]}
	networks := map[netip.Prefix]bool{} // true for t's networks, false for networks of other daemons
	for _, n := range neighbours(c, have) {
		networks[n] = false
	}
	for _, n := range t.Own {
		networks[n] = true
	}
	known := func(n netip.Prefix) bool { _, ok := networks[n]; return ok }

	// Apart from the rules of other daemons, the chain should contain own and now contains rest.
	var own, rest []Rule
	for i, r := range have {
		if r == nil {
			rest = append(rest, Rule{})
			continue
		}
		if n := owner(*r, known); n.IsValid() && !networks[n] {
			a.Others = append(a.Others, i)
			continue
		}
		rest = append(rest, *r)
	}
	if !a.Empty() {
		a.Common = common(c)
	}

	own = slices.Concat(a.Common, a.Own)
	a.Exact = slices.Equal(rest, own) && (len(a.Others) == 0 || a.Others[0] >= len(a.Common))
	return a
}

// owner returns the first known network that r contains, or the zero prefix.
func owner(r Rule, known func(netip.Prefix) bool) netip.Prefix {
	for _, m := range [2]Match{r.Src, r.Dst} {
		if m.Prefix.IsValid() && known(m.Prefix) {
			return m.Prefix
		}
	}
	return netip.Prefix{}
}

// neighbours returns the networks of all daemons that the rules of a chain show, as Arrange explains.
func neighbours(c Chain, have []*Rule) []netip.Prefix {
	var networks []netip.Prefix
	for _, r := range have {
		if r == nil || !r.Src.Prefix.IsValid() || r.Src.Not {
			continue
		}
		n := r.Src.Prefix
		switch {
		case c == Postrouting && r.Action >= Masquerade && r.Dst == notMulticast[prefix.FamilyOf(n.Addr())]:
			networks = append(networks, n)
		case c == Forward && *r == Rule{Src: In(n), Action: Accept} && slices.ContainsFunc(have, func(h *Rule) bool { return h != nil && *h == Rule{Dst: In(n), Action: Accept} }):
			networks = append(networks, n)
		case (c == GuardForward || c == GuardInput) && r.Action == Drop && r.Payload != (Payload{}) && r.Dst.Not:
			networks = append(networks, r.Dst.Prefix)
		}
	}
	return networks
}

// Legacy reports whether r, found in the parent of chain c, was created there by flannel
// before v0.20 for one of t's networks. An operator may have written an equal rule by hand.
// So a rule in the parent of Forward must have flannel's comment (commented), unless t puts
// an equal rule into flanneld's own chain. Legacy returns false for the guards, which
// flannel did not have.
func (t Table) Legacy(c Chain, r Rule, commented bool) bool {
	n := owner(r, func(n netip.Prefix) bool { return slices.Contains(t.Own, n) })
	if !n.IsValid() || r.Marked || c == GuardForward || c == GuardInput {
		return false
	}
	if c == Forward {
		same := slices.Contains(t.rules[Forward], r)
		return (commented || same) && (r == Rule{Src: In(n), Action: Accept} || r == Rule{Dst: In(n), Action: Accept})
	}

	subnetOf := func(m Match) bool { return m.Prefix.IsValid() && !m.Not && prefix.Contains(n, m.Prefix) }
	switch {
	case r.Action == Return && (r.Src == In(n) || r.Src == notIn(n)):
		return subnetOf(r.Dst)
	case r.Action >= Masquerade && r.Src == In(n):
		return r.Dst == notMulticast[prefix.FamilyOf(n.Addr())]
	case r.Action >= Masquerade && r.Src == notIn(n):
		return r.Dst == In(n)
	}
	return false
}
