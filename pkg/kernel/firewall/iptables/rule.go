// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// place contains the names that a firewall.Chain has in iptables: its table, the built-in chain
// parent, the chain of flanneld to which parent jumps, and the comment of the rules.
type place struct {
	table, parent, chain string
	comment              string
}

// places contains the place of each chain. Other programs know these names, so they must not change.
var places = [...]place{
	firewall.Postrouting: {"nat", "POSTROUTING", "FLANNEL-POSTRTG", "flanneld masq"},
	firewall.Forward:     {"filter", "FORWARD", "FLANNEL-FWD", "flanneld forward"},
	// In the table filter a rule of another program could accept a packet before the guard.
	firewall.GuardForward: {"mangle", "FORWARD", "FLANNEL-GUARD-FWD", "flanneld guard"},
	firewall.GuardInput:   {"mangle", "INPUT", "FLANNEL-GUARD-IN", "flanneld guard"},
}

// Tables returns the tables that contain flanneld's chains.
func Tables() []string { return []string{"nat", "filter", "mangle"} }

// Places returns flanneld's chains and their parents in the variant NFT. Apply must run
// again when they change.
func Places() []firewall.Place {
	var all []firewall.Place
	for _, p := range places {
		all = append(all, firewall.Place{Table: p.table, Chain: p.parent}, firewall.Place{Table: p.table, Chain: p.chain})
	}
	return all
}

// jump is the rule of the parent chain, in the form of iptables-save without "-A" and the chain.
func (p place) jump() string {
	return fmt.Sprintf("-m comment --comment %q -j %s", p.comment, p.chain)
}

// render returns a rule in the form of iptables-save, without "-A" and the chain.
func (p place) render(r firewall.Rule) string {
	var b strings.Builder
	match := func(flag string, m firewall.Match) {
		if !m.Prefix.IsValid() {
			return
		}
		if m.Not {
			b.WriteString("! ")
		}
		fmt.Fprintf(&b, "%s %s ", flag, m.Prefix)
	}

	match("-s", r.Src)
	match("-d", r.Dst)
	switch r.Payload.Protocol {
	case 0:
	case firewall.UDP:
		b.WriteString("-p udp ")
	default:
		fmt.Fprintf(&b, "-p %d ", r.Payload.Protocol)
	}
	if r.Payload.Port != 0 {
		fmt.Fprintf(&b, "-m udp --dport %d ", r.Payload.Port)
	}
	if r.Marked {
		fmt.Fprintf(&b, "-m mark --mark %#x/%#x ", firewall.Mark, firewall.Mark)
	}
	fmt.Fprintf(&b, "-m comment --comment %q -j %s", p.comment, targets[r.Action])
	return b.String()
}

var targets = map[firewall.Action]string{
	firewall.Return: "RETURN", firewall.Accept: "ACCEPT", firewall.Drop: "DROP",
	firewall.Masquerade: "MASQUERADE", firewall.MasqueradeRandom: "MASQUERADE --random-fully",
}

// parse reports whether render can return the rule, with any comment.
func parse(have rule) (r firewall.Rule, comment string, ok bool) {
	for a, text := range targets {
		if have.jump == "-j "+text {
			r.Action = a
		}
	}

	ok = r.Action != 0
	for _, c := range have.conditions {
		fits := false
		switch {
		case c.option == "-s":
			r.Src, fits = match(c.value, c.not)
		case c.option == "-d":
			r.Dst, fits = match(c.value, c.not)
		case c.not:
		case c.option == "-p":
			r.Payload.Protocol, fits = parseProtocol(c.value)
		case c.option == "--comment":
			comment = c.value
			fits = true
		case c.option == "--mark" && c.module == "mark":
			r.Marked = true
			fits = c.value == fmt.Sprintf("%#x/%#x", firewall.Mark, firewall.Mark)
		case c.option == "--dport" && c.module == "udp":
			port, err := strconv.ParseUint(c.value, 10, 16)
			r.Payload.Port = uint16(port)
			fits = err == nil
		}
		ok = ok && fits
	}
	return r, comment, ok
}

// protocols contains names that iptables-save may use.
var protocols = map[string]uint8{
	"udp": firewall.UDP, "tcp": firewall.TCP, "ipencap": 4, "ipv4": 4, "ipip": 4, "ipv6": 41, "icmp": 1, "ipv6-icmp": 58, "icmpv6": 58,
}

func parseProtocol(text string) (number uint8, ok bool) {
	if number, ok := protocols[text]; ok {
		return number, true
	}
	n, err := strconv.ParseUint(text, 10, 8)
	return uint8(n), err == nil
}

func match(s string, not bool) (firewall.Match, bool) {
	p, err := netip.ParsePrefix(s)
	if err != nil { // a single address has no length
		a, err := netip.ParseAddr(s)
		return firewall.Match{Prefix: netip.PrefixFrom(a, a.BitLen()), Not: not}, err == nil && a.Zone() == ""
	}
	return firewall.Match{Prefix: p.Masked(), Not: not}, true
}

// split splits a line of iptables-save into words, which may be quoted. It returns nil if a quote is not closed.
func split(line string) (words []string) {
	for {
		line = strings.TrimLeft(line, " ")
		if line == "" {
			return words
		}
		if line[0] != '"' {
			w, rest, _ := strings.Cut(line, " ")
			words = append(words, w)
			line = rest
			continue
		}

		var w strings.Builder
		i := 1
		for ; i < len(line) && line[i] != '"'; i++ {
			if line[i] == '\\' && i+1 < len(line) {
				i++
			}
			w.WriteByte(line[i])
		}
		if i >= len(line) {
			return nil
		}
		words = append(words, w.String())
		line = line[i+1:]
	}
}
