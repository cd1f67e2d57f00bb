// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

const kubeProxy = "KUBE-" // start of the names of its chains

// plan returns the input of iptables-restore --noflush that changes the existing rules to those of t,
// or "" if no change is needed.
func plan(have dump, t firewall.Table) string {
	var script strings.Builder
	for _, c := range firewall.Chains() {
		p := planner{place: places[c]}
		if table, known := have[p.table]; known && table == nil {
			continue // the table cannot be read
		}
		p.have = have[p.table]
		p.ownChain(c, t)
		p.parentChain(c, t)
		if len(p.lines) > 0 {
			fmt.Fprintf(&script, "*%s\n%s\nCOMMIT\n", p.table, strings.Join(p.lines, "\n"))
		}
	}
	return script.String()
}

// planner plans one of flanneld's chains and the jump to it.
type planner struct {
	place
	have   chains // chains of the table
	lines  []string
	wanted bool     // the chain is wanted
	after  []string // lines that require that no jump to the chain is left
}

func (p *planner) add(format string, args ...any) {
	p.lines = append(p.lines, fmt.Sprintf(format, args...))
}

// ownChain rewrites all of flanneld's chain, unless it has the right content. If no daemon needs the
// chain, ownChain empties it, and deletes it unless other chains than the parent jump to it.
func (p *planner) ownChain(c firewall.Chain, t firewall.Table) {
	have, exists := p.have[p.chain]
	rules := make([]*firewall.Rule, len(have))
	for i, h := range have {
		if r, comment, ok := parse(h); ok && comment == p.comment {
			rules[i] = &r
		}
	}

	a := t.Arrange(c, rules)
	p.wanted = !a.Empty()
	if p.wanted && exists && a.Exact || !p.wanted && !exists {
		return
	}

	p.add(":%s - [0:0]", p.chain) // flushes the chain, in the same commit as the new rules
	for _, r := range a.Common {
		p.add("-A %s %s", p.chain, p.render(r))
	}
	for _, i := range a.Others {
		p.add("-A %s %s", p.chain, have[i].spec)
	}
	for _, r := range a.Own {
		p.add("-A %s %s", p.chain, p.render(r))
	}
	if !p.wanted && !p.referenced() {
		p.after = append(p.after, "-X "+p.chain)
	}
}

// referenced reports whether a chain other than the parent jumps to flanneld's chain.
func (p *planner) referenced() bool {
	for chain, rules := range p.have {
		if chain != p.parent && slices.ContainsFunc(rules, p.jumpsHere) {
			return true
		}
	}
	return false
}

func (p *planner) jumpsHere(r rule) bool { return r.target == p.chain }

// parentChain ensures that there is one jump to flanneld's chain in the right position if the chain is
// wanted. It also removes the rules of flannel before v0.20.
func (p *planner) parentChain(c firewall.Chain, t firewall.Table) {
	var rest []rule // the remaining rules, without the jump
	var jumps []rule
	at := 0
	for _, h := range p.have[p.parent] {
		r, comment, ok := parse(h)
		if ok && t.Legacy(c, r, comment == p.comment) {
			p.add("-D %s %s", p.parent, h.spec)
			continue
		}
		if !p.jumpsHere(h) {
			rest = append(rest, h)
			continue
		}
		jumps = append(jumps, h)
		at = len(rest)
	}

	lo, hi := p.room(rest)
	inPlace := len(jumps) == 1 && jumps[0].spec == p.jump() && jumps[0].always && lo <= at && at <= hi
	if p.wanted && inPlace {
		jumps = nil
	}
	for _, h := range jumps {
		p.add("-D %s %s", p.parent, h.spec)
	}

	if p.wanted && !inPlace && hi == len(rest) {
		p.add("-A %s %s", p.parent, p.jump())
	} else if p.wanted && !inPlace {
		p.add("-I %s %d %s", p.parent, hi+1, p.jump())
	}
	p.lines = append(p.lines, p.after...)
}

// room returns the first and the last right position of the jump, as the number of rules in rest that
// precede it: after the jumps to chains of kube-proxy, but before the first rule that no packet passes.
func (p *planner) room(rest []rule) (lo, hi int) {
	hi = slices.IndexFunc(rest, p.have.blocks)
	if hi < 0 {
		hi = len(rest)
	}
	for i, r := range rest[:hi] {
		if strings.HasPrefix(r.target, kubeProxy) {
			lo = i + 1
		}
	}
	return lo, hi
}
