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
	spec       string // in the form of iptables-save, without "-A" and the chain; empty if iptables-save does not print it
	conditions []condition
	target     string // the chain or target of its jump or goto
	jump       string // the jump or goto with its options, such as "-j MASQUERADE --random-fully"
	always     bool   // it applies to every packet
}

// condition is a condition of a rule, such as "! -i docker0". A match with several options is several
// conditions.
type condition struct {
	not           bool
	module        string // the last one before the option
	option, value string // empty if it is not understood
}

// parseRule parses a rule in the form of iptables-save.
func parseRule(spec string) rule {
	r := rule{spec: spec}
	words := split(spec)
	var c condition
	for i := 0; i < len(words); i++ {
		var next string
		if i+1 < len(words) {
			next = words[i+1]
		}
		switch w := words[i]; w {
		case "-j", "-g":
			r.target = next
			r.jump = strings.Join(words[i:], " ")
			r.always = !slices.ContainsFunc(r.conditions, func(c condition) bool { return c.option != "--comment" })
			return r

		case "!":
			c.not = true
		case "-m":
			c.module = next
			i++
			options := i+1 < len(words) && (words[i+1] == "!" || strings.HasPrefix(words[i+1], "--"))
			if !options && next != "tcp" && next != "udp" { // these are after "-p tcp" and "-p udp"
				r.conditions = append(r.conditions, c)
			}

		default:
			if strings.HasPrefix(w, "-") {
				c.option = w
			} else if n := len(r.conditions); n > 0 && r.conditions[n-1].option == "--tcp-flags" { // it has two values
				r.conditions[n-1].value += " " + w
				continue
			}
			if c.option == "--comment" || c.option != "" && next != "!" && !strings.HasPrefix(next, "-") {
				c.value = next
				i++
			}
			r.conditions = append(r.conditions, c)
			c = condition{module: c.module}
		}
	}
	return r
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
			table[name] = append(table[name], parseRule(spec))
		}
	}
	return d
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
