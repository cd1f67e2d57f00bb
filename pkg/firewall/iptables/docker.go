// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"net/netip"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// Docker returns which rules of Docker keep the other hosts of the network from the
// containers behind b. It reads the rules of the variants NFT and Legacy that are installed,
// or of Default if neither is. If rules cannot be read it returns an error, and cut may be
// incomplete.
func Docker(ctx context.Context, b firewall.DockerBridge) (cut firewall.DockerCut, err error) {
	f := prefix.FamilyOf(b.Subnet.Addr())
	variants := slices.DeleteFunc([]Variant{NFT, Legacy}, func(v Variant) bool { return !installed(v.Program(f) + "-save") })
	if len(variants) == 0 && installed(Default.Program(f)+"-save") {
		variants = []Variant{Default}
	}
	for _, v := range variants {
		if v == Legacy && len(legacyTables(f)) == 0 {
			continue // the program would create the tables
		}
		d, _, err := New(v).save(ctx, f, kind{nft: v == NFT})
		if err != nil {
			return cut, err
		}
		c := dockerCut(d, b)
		cut.Direct, cut.Forward = cut.Direct || c.Direct, cut.Forward || c.Forward
	}
	return cut, nil
}

// dockerCut returns what the rules of d do to packets from another host to the containers
// behind b. It follows one packet through the rules.
func dockerCut(d dump, b firewall.DockerBridge) (cut firewall.DockerCut) {
	verdict, chain := d["filter"].follow("FORWARD", packet{DockerBridge: b, dst: b.Subnet, routed: true}, nil)
	cut.Forward = verdict == no && strings.HasPrefix(chain, dockerChains) && !acceptsMark(d["filter"])
	for _, r := range d["raw"]["PREROUTING"] {
		for _, c := range conditions(r) { // Docker creates a rule for the address of each running container, so follow a packet to each
			if to, ok := match(c.value, c.not); c.option == "-d" && ok && !to.Not && prefix.Contains(b.Subnet, to.Prefix) {
				verdict, _ := d["raw"].follow("PREROUTING", packet{DockerBridge: b, dst: to.Prefix}, nil)
				cut.Direct = cut.Direct || verdict == no
			}
		}
	}
	return cut
}

// dockerChains is the prefix of the names of Docker's chains.
const dockerChains = "DOCKER"

// acceptsMark reports whether Docker accepts packets with a mark, because of its option
// --bridge-accept-fwmark.
func acceptsMark(filter chains) bool {
	return slices.ContainsFunc(filter["DOCKER-FORWARD"], func(r rule) bool {
		return r.target == "ACCEPT" && slices.ContainsFunc(conditions(r), func(c condition) bool { return c.option == "--mark" && !c.not })
	})
}

// answer says whether a packet meets a condition or passes a chain. It is unknown if the
// rules do not tell.
type answer int

const (
	unknown answer = iota
	no
	yes
)

// packet is the first packet of a connection from another host to any port. It arrives on
// another interface than the bridge.
type packet struct {
	firewall.DockerBridge
	dst    netip.Prefix
	routed bool // the routing decision is made: it leaves through the bridge
}

// condition is a condition of a rule, such as "! -i docker0".
type condition struct {
	not           bool
	option, value string
}

// conditions returns the conditions of a rule, without its target. A match with several
// options is several conditions.
func conditions(r rule) (all []condition) {
	words, _ := split(r.spec)
	c := condition{}
	for i := 0; i < len(words); i++ {
		switch w := words[i]; {
		case w == "-j" || w == "-g":
			return all
		case w == "!":
			c.not = true
		case w == "-m":
			i++ // the options of the module show the condition
		case strings.HasPrefix(w, "-"):
			c.option = w
			if i+1 < len(words) && !strings.HasPrefix(words[i+1], "-") && words[i+1] != "!" {
				i++
				c.value = words[i]
			}
			all, c = append(all, c), condition{}
		}
	}
	return all
}

// follow returns whether the chain called name accepts the packet (yes) or drops or rejects
// it (no), and the chain whose rule decides. A rule applies only if the packet certainly
// meets its conditions. If no rule decides, the verdict is unknown and the chain "".
// through contains the chains that led to this one, so that a loop of chains ends.
func (c chains) follow(name string, p packet, through []string) (verdict answer, chain string) {
	if slices.Contains(through, name) {
		return unknown, ""
	}
	for _, r := range c[name] {
		if p.meets(r) != yes {
			continue
		}
		switch r.target {
		case "ACCEPT":
			return yes, name
		case "DROP", "REJECT":
			return no, name
		case "RETURN":
			return unknown, ""
		}
		if verdict, chain := c.follow(r.target, p, append(through, name)); verdict != unknown {
			return verdict, chain
		}
	}
	return unknown, ""
}

// meets reports whether the packet meets all conditions of a rule. The answer is no if it
// certainly does not meet one of them, and otherwise unknown if that is unknown for one of
// them.
func (p packet) meets(r rule) answer {
	all := yes
	for _, c := range conditions(r) {
		a := p.meetsPositive(c)
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

// meetsPositive is like meets for one condition, and ignores a "!" before it.
func (p packet) meetsPositive(c condition) answer {
	is := func(met bool) answer {
		if met {
			return yes
		}
		return no
	}
	switch {
	case c.option == "-s":
		return covers(c.value, p.Network)
	case c.option == "-d":
		return covers(c.value, p.dst)
	case c.option == "-i" && c.value == p.Name:
		return no
	case c.option == "-i" && slices.Contains(p.From, c.value):
		return yes
	case c.option == "-o" && p.routed:
		return is(c.value == p.Name)
	case c.option == "--ctstate":
		return is(slices.Contains(strings.Split(c.value, ","), "NEW"))
	case c.option == "--comment":
		return yes
	}
	return unknown
}

// covers reports whether the network in text contains all addresses of p (yes) or none of
// them (no). The answer is unknown if it contains some of them or text is not a network.
func covers(text string, p netip.Prefix) answer {
	m, ok := match(text, false)
	switch {
	case !ok:
		return unknown
	case prefix.Contains(m.Prefix, p):
		return yes
	case !m.Prefix.Overlaps(p):
		return no
	}
	return unknown
}
