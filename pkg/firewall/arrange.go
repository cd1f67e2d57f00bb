package firewall

import (
	"net/netip"
	"slices"

	"flanneld/pkg/prefix"
)

// Arrangement is what should become of a chain: the common rules at its head,
// the rules of other daemons as they are, and the own ones in their order.
type Arrangement struct {
	Common, Own []Rule
	Others      []int // indices of the rules that stay, because other daemons have them
	// Exact is set if there is nothing to do.
	Exact bool
}

// Empty reports whether nobody needs the chain.
func (a Arrangement) Empty() bool { return len(a.Own)+len(a.Others) == 0 }

// Arrange judges a chain that holds have, where nil is a rule that no daemon
// makes. Every rule of a daemon names its network; so the rules that name ours
// are ours, and where a chain masquerades for another network, or accepts both
// what comes from and what goes to it, the rules that name that one belong to
// another daemon. All else is out of place. Where others' rules stand between
// ours does not matter: they are about other packets.
func (t Table) Arrange(c Chain, have []*Rule) Arrangement {
	a := Arrangement{Own: t.rules[c]}
	neighbours := neighbours(c, have)
	var own, rest []Rule // what is not another's, and of this what is behind the common rules
	for i, r := range have {
		if r == nil {
			rest = append(rest, Rule{})
			continue
		}
		if n := owner(*r, slices.Concat(t.Own, neighbours)); n.IsValid() && !slices.Contains(t.Own, n) {
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

// owner returns which of the networks r belongs to; the zero prefix if none.
func owner(r Rule, networks []netip.Prefix) netip.Prefix {
	for _, m := range []Match{r.Src, r.Dst} {
		if m.Prefix.IsValid() && slices.Contains(networks, m.Prefix) {
			return m.Prefix
		}
	}
	return netip.Prefix{}
}

// neighbours returns the networks that the rules of a chain serve.
func neighbours(c Chain, have []*Rule) []netip.Prefix {
	var networks []netip.Prefix
	for _, r := range have {
		if r == nil || !r.Src.Prefix.IsValid() || r.Src.Not {
			continue
		}
		n := r.Src.Prefix
		switch {
		case c == Postrouting && r.Action >= Masquerade && r.Dst == notIn(multicast(prefix.FamilyOf(n.Addr()))):
			networks = append(networks, n)
		case c == Forward && *r == Rule{Src: In(n), Action: Accept} && contains(have, Rule{Dst: In(n), Action: Accept}):
			networks = append(networks, n)
		case (c == GuardForward || c == GuardInput) && r.Action == Drop && r.Payload != (Payload{}) && r.Dst.Not:
			networks = append(networks, r.Dst.Prefix)
		}
	}
	return networks
}

func contains(have []*Rule, r Rule) bool {
	return slices.ContainsFunc(have, func(h *Rule) bool { return h != nil && *h == r })
}

// Legacy reports whether r, found outside our chains, is one that flannel
// before v0.20 put there for one of t's networks. Where operators may have
// written the same by hand it must carry our comment, unless the rules in our
// own chain come to the same.
func (t Table) Legacy(c Chain, r Rule, commented bool) bool {
	n := owner(r, t.Own)
	if !n.IsValid() || r.Marked {
		return false
	}
	if c == GuardForward || c == GuardInput {
		return false
	}
	if c == Forward {
		same := slices.Contains(t.rules[Forward], r)
		return (commented || same) && (r == Rule{Src: In(n), Action: Accept} || r == Rule{Dst: In(n), Action: Accept})
	}
	subnetOf := func(m Match) bool { return m.Prefix.IsValid() && !m.Not && prefix.Contains(n, m.Prefix) }
	switch {
	case r.Action == Return && r.Src == In(n):
		return subnetOf(r.Dst)
	case r.Action == Return && r.Src == notIn(n):
		return subnetOf(r.Dst)
	case r.Action >= Masquerade && r.Src == In(n):
		return r.Dst == notIn(multicast(prefix.FamilyOf(n.Addr())))
	case r.Action >= Masquerade && r.Src == notIn(n):
		return r.Dst == In(n)
	}
	return false
}
