// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
)

// targetsFunc returns the targets of a chain's rules, according to nftables. exists is
// false if there is no such chain.
type targetsFunc func(f prefix.Family, table, chain string) (targets []nftables.Target, exists bool, err error)

// correct corrects d for flanneld's chains and their parents. Of the rules that other programs have
// created with nft, iptables-save prints some without their conditions, and it prints nothing about a
// table with a rule that it does not understand. hidden are the names of such tables. A table that
// cannot be read is nil in d.
func (a *Applier) correct(ctx context.Context, f prefix.Family, d dump) (hidden []string, err error) {
	hidden, errs := a.readMissing(ctx, f, d)
	for _, p := range places {
		have := d[p.table]
		suspicious := func(r rule) bool {
			_, _, ours := parse(r)
			return ours || have.blocks(r)
		}
		if have == nil || !slices.Contains(hidden, p.table) && !slices.ContainsFunc(have[p.parent], suspicious) {
			continue // it cannot be read, or no rule blocks all packets or looks like one of flanneld
		}

		s := resolver{place: p, targets: a.targets, family: f, have: have, seen: map[string]bool{}}
		if err := s.resolve(p.parent); err != nil {
			d[p.table] = nil
			errs = append(errs, err)
		}
	}
	return hidden, oneline.Join(errs...)
}

// readMissing adds the tables that are missing in d. iptables-save hides those in which one of
// flanneld's chains, or a parent, exists.
func (a *Applier) readMissing(ctx context.Context, f prefix.Family, d dump) (hidden []string, errs []error) {
	for _, table := range Tables() {
		if d[table] != nil {
			continue
		}
		var text strings.Builder
		var err error
		for _, p := range places {
			if p.table == table && err == nil {
				var more string
				more, err = a.list(ctx, f, p)
				text.WriteString(more)
			}
		}

		switch d[table] = parseSave("*" + table + "\n" + text.String())[table]; {
		case err != nil:
			d[table] = nil
			errs = append(errs, a.refused(f, []string{table}, err))
		case text.Len() > 0:
			hidden = append(hidden, table)
		}
	}
	slices.Sort(hidden)
	return hidden, errs
}

// list returns flanneld's chain and its parent in the form of iptables -S. It ignores a parent that
// iptables cannot print.
func (a *Applier) list(ctx context.Context, f prefix.Family, p place) (text string, err error) {
	for _, chain := range []string{p.chain, p.parent} {
		_, exists, err := a.targets(f, p.table, chain)
		if err != nil {
			return "", err
		}
		if !exists {
			continue
		}
		rules, err := run(ctx, "", a.programs.variant.Program(f), "-t", p.table, "-S", chain)
		if err != nil && chain == p.chain {
			return "", err
		}
		text += rules + "\n"
	}
	return text, nil
}

// refused adds to err the tables that iptables-save hides, if any, and a remedy.
func (a *Applier) refused(f prefix.Family, hidden []string, err error) error {
	if len(hidden) == 0 {
		return err
	}
	return fmt.Errorf("%s cannot read table %s: move the rules that were made with nft to a table of their own, or set EnableNFTables: %w",
		a.programs.variant.Program(f), strings.Join(hidden, ", table "), err)
}

// resolver reads the targets of rules from nftables, independently of iptables-save. have
// contains the chains of the table.
type resolver struct {
	place
	targets targetsFunc
	family  prefix.Family
	have    chains
	seen    map[string]bool
}

// resolve replaces the rules of a chain in have, and of the chains to which it sends all packets, by
// those that nftables shows.
func (s resolver) resolve(chain string) error {
	if chain == s.chain || s.seen[chain] {
		return nil
	}

	s.seen[chain] = true
	targets, exists, err := s.targets(s.family, s.table, chain)
	if err != nil || !exists {
		return err
	}

	// A rule keeps the text of iptables-save if that shows the jumps to flanneld's chain in the same
	// places, and all conditions of the rule. Otherwise a jump to flanneld's chain gets the text of the
	// one that flanneld creates. If the jump in the kernel is another one, its removal fails.
	listed := s.have[chain]
	same := slices.EqualFunc(listed, targets, func(r rule, l nftables.Target) bool { return (r.target == s.chain) == (l.Name == s.chain) })
	rules := make([]rule, len(targets))
	for i, l := range targets {
		var r rule
		if same && (!l.Hidden || l.Name == s.chain) {
			r = listed[i]
		} else if l.Name == s.chain {
			r = parseRule(s.jump())
		}

		r.target = l.Name
		r.always = l.Always
		rules[i] = r
		if r.always {
			if err := s.resolve(r.target); err != nil {
				return err
			}
		}
	}
	s.have[chain] = rules
	return nil
}
