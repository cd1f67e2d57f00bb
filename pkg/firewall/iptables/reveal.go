package iptables

import (
	"slices"

	"flanneld/pkg/firewall"
	"flanneld/pkg/firewall/nftables"
	"flanneld/pkg/prefix"
)

// leadsFunc asks nftables where the rules of a chain lead.
type leadsFunc func(f prefix.Family, table, chain string) (leads []nftables.Lead, exists bool, err error)

// reveal puts right what iptables-save says of the chains concerned: rules that
// others have made with nft it prints without some of their conditions.
func (a *Applier) reveal(f prefix.Family, d dump) error {
	for _, c := range firewall.Chains() {
		p := placeOf(c)
		if d[p.table] == nil {
			continue
		}
		s := survey{place: p, leads: a.leads, family: f, have: d[p.table], seen: map[string]bool{}}
		if err := s.look(p.parent); err != nil {
			return err
		}
	}
	return nil
}

// survey sees where rules really lead.
type survey struct {
	place
	leads  leadsFunc
	family prefix.Family
	have   chains
	seen   map[string]bool
}

// look looks at a chain, and at those that all of its packets may go through. If
// the jumps to ours are not where they were listed what is there now counts, and
// they are taken for such as we make: the removal of others fails.
func (s survey) look(chain string) error {
	if chain == s.chain || s.seen[chain] {
		return nil
	}
	s.seen[chain] = true
	leads, exists, err := s.leads(s.family, s.table, chain)
	if err != nil || !exists {
		return err
	}
	listed := s.have[chain]
	same := slices.EqualFunc(listed, leads, func(r rule, l nftables.Lead) bool { return (r.target == s.chain) == (l.Target == s.chain) })
	rules := make([]rule, len(leads))
	for i, l := range leads {
		r := rule{target: l.Target, always: l.Always}
		switch {
		case same:
			r.spec = listed[i].spec
		case r.target == s.chain:
			r.spec = s.jump()
		}
		rules[i] = r
		if r.always {
			if err := s.look(r.target); err != nil {
				return err
			}
		}
	}
	s.have[chain] = rules
	return nil
}
