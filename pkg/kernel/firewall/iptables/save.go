// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"slices"
	"strings"
)

// dump contains the chains of each table, with their rules.
type dump map[string]chains

type chains map[string][]rule

// rule is an existing rule of any program.
type rule struct {
	spec   string // in the form of iptables-save, without "-A" and the chain; empty if iptables-save does not print it
	target string // the chain or target of its jump or goto
	always bool   // it applies to every packet
}

// parseSave parses the output of iptables-save, or the name of a table and the output of iptables -S.
func parseSave(text string) dump {
	d := dump{}
	var table chains
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		switch {
		case strings.HasPrefix(line, "*"):
			table = chains{}
			d[line[1:]] = table
		case table == nil:
		case strings.HasPrefix(line, ":"), strings.HasPrefix(line, "-N "):
			name, _, _ := strings.Cut(strings.TrimPrefix(line[1:], "N "), " ")
			table[name] = slices.Clip(table[name])
		case strings.HasPrefix(line, "-A "):
			name, spec, _ := strings.Cut(line[len("-A "):], " ")
			target, always := leadsTo(spec)
			table[name] = append(table[name], rule{spec, target, always})
		}
	}
	return d
}

// leadsTo returns the chain or target of a rule's jump or goto, and whether it applies to every packet.
func leadsTo(spec string) (target string, always bool) {
	words, ok := split(spec)
	if !ok {
		return "", false
	}

	always = true
	for i := 0; i < len(words); i++ {
		switch {
		case (words[i] == "-j" || words[i] == "-g") && i+1 < len(words):
			return words[i+1], always
		case words[i] == "-m" && i+3 < len(words) && words[i+1] == "comment":
			i += 3
		default:
			always = false
		}
	}
	return "", false
}

// blocks reports whether no packet passes the rule, or the chain to which it jumps.
func (c chains) blocks(r rule) bool { return c.blocksAll(r, map[string]bool{}) }

func (c chains) blocksAll(r rule, seen map[string]bool) bool {
	if !r.always {
		return false
	}
	if r.target == "DROP" || r.target == "REJECT" {
		return true
	}
	if seen[r.target] {
		return false
	}

	seen[r.target] = true
	for _, inner := range c[r.target] {
		if inner.always && (inner.target == "RETURN" || inner.target == "ACCEPT") {
			return false
		}
		if c.blocksAll(inner, seen) {
			return true
		}
	}
	return false
}
