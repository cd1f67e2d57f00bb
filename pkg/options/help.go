// SPDX-License-Identifier: Apache-2.0

package options

import (
	"fmt"
	"strings"
)

// Dimensions of the help text in columns, and its first lines.
const (
	helpWidth   = 100
	helpIndent  = 8
	helpEnvAt   = 46
	helpHeading = `flanneld gives every host a subnet of one flat network, and keeps the routes to the subnets of all
other hosts in the kernel, so that pods on all hosts reach each other.

Usage:
  flanneld [--flag[=value]]...

Each flag can be set by the environment variable beside it. A flag has precedence over its variable,
and an empty variable counts as not set. Booleans are negated with =false.
`
)

// Help returns the help text.
func Help() string {
	var b strings.Builder
	b.WriteString(helpHeading)
	for _, t := range topics(&Options{}) {
		fmt.Fprintf(&b, "\n%s:\n", t.title)
		for _, s := range t.settings {
			s.help(&b)
		}
	}
	fmt.Fprintf(&b, "  --help\n%*sShow this text and exit.\n", helpIndent, "")
	return b.String()
}

func (s setting) help(b *strings.Builder) {
	head := "  --" + s.name
	if s.arg != "" {
		head += "=" + s.arg
	}
	if s.name != "version" {
		head = fmt.Sprintf("%-*s %s", helpEnvAt, head, Variable(s.name))
	}

	words := strings.Fields(s.usage)
	if s.def != "" && s.name != "version" {
		words = append(words, "(default "+s.def+")")
	}

	b.WriteString(head + "\n")
	for _, line := range wrap(words, helpWidth-helpIndent) {
		fmt.Fprintf(b, "%*s%s\n", helpIndent, "", line)
	}
}

func wrap(words []string, width int) []string {
	var lines []string
	line := ""
	for _, word := range words {
		switch {
		case line == "":
			line = word
		case len(line)+1+len(word) > width:
			lines = append(lines, line)
			line = word
		default:
			line += " " + word
		}
	}
	return append(lines, line)
}
