// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// Blocks returns the rules and policies of all installed variants that drop or redirect one of packets. It
// omits rules of Docker: the function Docker reads them.
func Blocks(ctx context.Context, packets []firewall.Packet) (blocks []firewall.Block, err error) {
	var errs []error
	for _, f := range families() {
		of := slices.DeleteFunc(slices.Clone(packets), func(p firewall.Packet) bool { return prefix.FamilyOf(p.Src) != f })
		if len(of) == 0 {
			continue
		}

		for _, v := range Present(f) {
			text, err := run(ctx, "", v.Program(f)+"-save")
			if err != nil {
				errs = append(errs, err)
				continue
			}
			for i, p := range slices.Concat(of, firewall.ToPorts(of, parseSave(text)["nat"].redirected())) {
				if b, ok := blocked(text, p); ok && (b.Redirects || i < len(of)) {
					b.Program = v.Program(f)
					blocks = append(blocks, b)
				}
			}
		}
	}
	return blocks, oneline.Join(errs...)
}

// Present returns the variants NFT and Legacy, as far as they are installed and have tables, or Default if neither is
// installed.
func Present(f prefix.Family) []Variant {
	all := slices.DeleteFunc(slices.Clone(variants), func(v Variant) bool { return !installed(v.Program(f) + "-save") })
	if len(all) == 0 && installed(Default.Program(f)+"-save") {
		return []Variant{Default}
	}
	return slices.DeleteFunc(all, func(v Variant) bool { return v == Legacy && len(legacyTables(f)) == 0 }) // the program would create the tables
}

// blocked says what drops or redirects a packet according to the output of iptables-save, or else what may.
func blocked(text string, p firewall.Packet) (b firewall.Block, ok bool) {
	d := parseSave(text)
	first := "PREROUTING"
	last := "FORWARD"
	if p.In == "" {
		first = "OUTPUT"
		last = "OUTPUT"
	} else if p.Out == "" {
		last = "INPUT"
	}

	after := "" // no chain
	source := ""
	if p.Out != "" {
		after = "POSTROUTING"
	}
	if p.Forwarded() {
		source = after
	}

	for _, at := range []struct{ table, hook string }{
		{"raw", first}, {"mangle", first}, {"nat", first}, {"mangle", last}, {"filter", last}, {"mangle", after}, {"nat", source},
	} {
		found, blocks := d[at.table].follow(at.hook, p).Block(p, at.hook, policyOf(text, at.table, at.hook))
		if blocks && !strings.HasPrefix(found.Chain, dockerChains) && (!ok || !found.Doubtful) {
			b = found
			b.Table = at.table
			ok = true
			if !b.Doubtful {
				break
			}
		}
	}
	return b, ok
}

// redirected returns the ports whose packets a rule redirects, and of a range the first.
func (c chains) redirected() (ports []firewall.Payload) {
	for _, name := range slices.Sorted(maps.Keys(c)) {
		for _, r := range c[name] {
			var to firewall.Payload
			for _, condition := range r.conditions {
				switch condition.option {
				case "-p":
					to.Protocol, _ = parseProtocol(condition.value)
				case "--dport", "--dports":
					first, _, _ := strings.Cut(strings.ReplaceAll(condition.value, ":", ","), ",")
					port, _ := strconv.ParseUint(first, 10, 16)
					to.Port = uint16(port)
				}
			}
			if to.Port != 0 && effects[r.target] == firewall.Redirects && !slices.Contains(ports, to) {
				ports = append(ports, to)
			}
		}
	}
	return ports
}

func policyOf(text, table, chain string) string {
	_, rest, _ := strings.Cut("\n"+text, "\n*"+table+"\n")
	rest, _, _ = strings.Cut(rest, "\nCOMMIT")
	_, policy, _ := strings.Cut("\n"+rest, "\n:"+chain+" ")
	policy, _, _ = strings.Cut(policy, " ")
	return policy
}

// meets ignores the "!" of a condition.
func meets(c condition, p firewall.Packet) firewall.Answer {
	switch c.option {
	case "-s":
		return covers(c.value, p.Src)
	case "-d":
		return covers(c.value, p.Dst)
	case "-i":
		return matchesDevice(c.value, p.In)
	case "-o":
		return matchesDevice(c.value, p.Out)
	case "-p":
		number, ok := parseProtocol(c.value)
		return is(ok && number == p.Protocol)
	case "--dport", "--dports":
		return hasPort(c.value, p.Port)
	case "--tcp-flags": // of the first packet: SYN
		mask, flags, _ := strings.Cut(c.value, " ")
		has := mask == "ALL" || slices.Contains(strings.Split(mask, ","), "SYN")
		return is(has && flags == "SYN" || !has && flags == "NONE")
	case "--pkt-type":
		return is(c.value == "unicast")
	case "-f", "--rt-type", "--physdev-is-bridged": // it is neither a later fragment nor has a routing header, and it is routed
		return firewall.No

	case "--ctstate", "--state":
		return is(slices.Contains(strings.Split(c.value, ","), "NEW"))
	case "--mark":
		// The packet has no mark, but an earlier rule may set one. A rule with "!" is usually about that, unless it is that of
		// kube-proxy, which does not masquerade without its mark.
		value, _, _ := strings.Cut(c.value, "/")
		if value != "0x0" && value != "0" && (!c.not || c.value == fmt.Sprintf("%#[1]x/%#[1]x", firewall.Mark)) {
			return firewall.No
		}

	case "--dst-type":
		return is(c.value == "UNICAST" || c.value == "LOCAL" && p.Out == "")
	case "--comment":
		return firewall.Yes
	}
	if slices.Contains(seldom, c.module) || strings.HasPrefix(c.option, "--sport") {
		return firewall.Seldom
	}
	return firewall.Unknown
}

// seldom contains the matches for which Seldom is the answer. Rules of healthy hosts drop packets with them.
var seldom = []string{"mark", "connmark", "conntrack", "rpfilter", "limit", "hashlimit", "connlimit", "recent", "set", "owner", "cgroup"}

// hasPort reports whether a list of ports and ranges contains a port.
func hasPort(list string, port uint16) firewall.Answer {
	for one := range strings.SplitSeq(list, ",") {
		low, high, ranged := strings.Cut(one, ":")
		if !ranged {
			high = low
		}
		from, err := strconv.ParseUint(low, 10, 16)
		to, e := strconv.ParseUint(high, 10, 16)
		if err != nil || e != nil {
			return firewall.Unknown
		}
		if uint64(port) >= from && uint64(port) <= to {
			return firewall.Yes
		}
	}
	return firewall.No
}

func matchesDevice(pattern, name string) firewall.Answer {
	begin, open := strings.CutSuffix(pattern, "+")
	return is(open && strings.HasPrefix(name, begin) || pattern == name)
}
