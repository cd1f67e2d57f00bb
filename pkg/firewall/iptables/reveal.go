package iptables

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"flanneld/pkg/firewall"
	"flanneld/pkg/firewall/nftables"
	"flanneld/pkg/oneline"
	"flanneld/pkg/prefix"
)

// leadsFunc asks nftables where the rules of a chain lead.
type leadsFunc func(f prefix.Family, table, chain string) (leads []nftables.Lead, exists bool, err error)

// reveal puts right what iptables-save says of the chains concerned. Where others
// have made rules with nft it prints some without their conditions, and says
// nothing of a table that has one which it does not understand. reveal returns
// such tables. Those of which err is about are nil in d.
func (a *Applier) reveal(ctx context.Context, f prefix.Family, d dump) (hidden []string, err error) {
	var errs []error
	for _, c := range firewall.Chains() {
		p := placeOf(c)
		if d[p.table] == nil {
			text, err := a.list(ctx, f, p)
			if err != nil {
				d[p.table] = nil
				errs = append(errs, a.refused(f, []string{p.table}, err))
				continue
			}
			if text != "" {
				hidden = append(hidden, p.table)
			}
			d[p.table] = parseSave("*" + p.table + "\n" + text)[p.table]
		} else if have := d[p.table]; !slices.ContainsFunc(have[p.parent], func(r rule) bool { return have.blocks(r) || likeOurs(r) }) {
			continue // there is nothing to go ahead of, or to take for an old one of ours
		}
		s := survey{place: p, leads: a.leads, family: f, have: d[p.table], seen: map[string]bool{}}
		if err := s.look(p.parent); err != nil {
			d[p.table] = nil
			errs = append(errs, err)
		}
	}
	return hidden, oneline.Join(errs...)
}

func likeOurs(r rule) bool {
	_, _, ok := parse(r.spec)
	return ok
}

// list returns the rules of our chain and its parent in the form of iptables-save,
// one chain at a time. The parent's may be missing.
func (a *Applier) list(ctx context.Context, f prefix.Family, p place) (text string, err error) {
	for _, chain := range []string{p.chain, p.parent} {
		_, exists, err := a.leads(f, p.table, chain)
		if err != nil {
			return "", err
		}
		if !exists {
			continue
		}
		rules, err := run(ctx, "", a.variant.Program(f), "-t", p.table, "-S", chain)
		if err != nil && chain == p.chain {
			return "", err
		}
		text += rules + "\n"
	}
	return text, nil
}

// refused is err, about tables that iptables-save hides.
func (a *Applier) refused(f prefix.Family, hidden []string, err error) error {
	if len(hidden) == 0 {
		return err
	}
	return fmt.Errorf("%s cannot read table %s: move the rules that were made with nft to a table of their own, or set EnableNFTables: %w",
		a.variant.Program(f), strings.Join(hidden, ", table "), err)
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
		case same && (!l.Hidden || r.target == s.chain):
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
