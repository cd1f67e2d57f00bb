package iptables

import (
	"slices"
	"strings"
)

// dump has the rules of each chain of each table.
type dump map[string]chains

type chains map[string][]rule

// rule is a rule that somebody has made.
type rule struct {
	spec   string // as iptables-save says it, without "-A" and the chain; empty if it does not
	target string // the chain or target that it jumps or goes to
	always bool   // with every packet
}

// parseSave reads the output of iptables-save, or of iptables -S behind the name
// of its table. Lines that mean nothing here are skipped.
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

// leadsTo returns the chain or target that a rule jumps or goes to, and
// whether it does so with every packet.
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

// blocks reports whether no packet gets past the rule: it rejects or drops
// all, or goes through a chain that does.
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
