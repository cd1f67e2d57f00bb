// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// answer says whether a packet meets a condition or passes a chain. It is unknown if the
// rules do not tell.
type answer int

const (
	unknown answer = iota
	no
	yes
)

// outcome is what becomes of a packet in a chain.
type outcome struct {
	verdict answer // yes if the packet is accepted, no if it is dropped or redirected, unknown if no rule decides
	chain   string // the chain whose rule decides; empty if none does
	rule    rule   // the rule that decides
	// doubtful means that an earlier rule may have decided. It is not known whether the packet meets its conditions.
	doubtful bool
}

// follow returns what becomes of p in the chain called name. through are the chains that led to this one,
// so that a loop of chains ends.
func (c chains) follow(name string, p firewall.Packet, through []string) (o outcome) {
	if slices.Contains(through, name) {
		return o
	}

	for _, r := range c[name] {
		_, jump := c[r.target]
		met := meetsAll(r, p)
		if met == no {
			continue
		}
		if met == unknown { // it does not apply, but may
			o.doubtful = o.doubtful || jump || r.target == "ACCEPT" || r.target == "RETURN"
			continue
		}

		switch {
		case r.target == "ACCEPT":
			return outcome{yes, name, r, o.doubtful}
		case r.target == "DROP", r.target == "REJECT", redirects(r.target):
			return outcome{no, name, r, o.doubtful}
		case r.target == "RETURN":
			return o
		}

		inner := c.follow(r.target, p, append(through, name))
		inner.doubtful = inner.doubtful || o.doubtful
		if inner.verdict != unknown {
			return inner
		}
		o.doubtful = inner.doubtful
	}
	return o
}

// meetsAll reports whether the packet meets all conditions of a rule.
func meetsAll(r rule, p firewall.Packet) answer {
	all := yes
	for _, c := range r.conditions {
		a := meets(c, p)
		if c.not && a != unknown {
			a = yes + no - a
		}
		if a == no {
			return no
		}
		if a == unknown {
			all = unknown
		}
	}
	return all
}

func is(met bool) answer {
	return map[bool]answer{false: no, true: yes}[met]
}

// covers reports whether the network in text contains a.
func covers(text string, a netip.Addr) answer {
	m, ok := match(text, false)
	if !ok {
		return unknown
	}
	return is(m.Prefix.Contains(a))
}
