package iptables

import (
	"slices"
	"strings"
)

// dump is what iptables-save says: the rules of each chain of each table, in
// its form, without "-A" and the chain.
type dump map[string]map[string][]string

// parseSave reads the output of iptables-save. Lines that mean nothing here
// are skipped.
func parseSave(text string) dump {
	d := dump{}
	var table map[string][]string
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		switch {
		case strings.HasPrefix(line, "*"):
			table = map[string][]string{}
			d[line[1:]] = table
		case table == nil:
		case strings.HasPrefix(line, ":"):
			name, _, _ := strings.Cut(line[1:], " ")
			table[name] = slices.Clip(table[name])
		case strings.HasPrefix(line, "-A "):
			name, spec, _ := strings.Cut(line[len("-A "):], " ")
			table[name] = append(table[name], spec)
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
func blocks(table map[string][]string, spec string) bool {
	return blocksAll(table, spec, map[string]bool{})
}

func blocksAll(table map[string][]string, spec string, seen map[string]bool) bool {
	target, always := leadsTo(spec)
	if !always {
		return false
	}
	if target == "DROP" || target == "REJECT" {
		return true
	}
	if seen[target] {
		return false
	}
	seen[target] = true
	for _, inner := range table[target] {
		if to, always := leadsTo(inner); always && (to == "RETURN" || to == "ACCEPT") {
			return false
		}
		if blocksAll(table, inner, seen) {
			return true
		}
	}
	return false
}
