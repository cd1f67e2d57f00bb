// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/flanneld/flanneld/pkg/kernel/firewall"
	"github.com/flanneld/flanneld/pkg/kernel/firewall/nftables"
)

var effects = map[string]firewall.Effect{
	"ACCEPT": firewall.Accepts, "DROP": firewall.Drops, "REJECT": firewall.Drops, "RETURN": firewall.Returns,
	"DNAT": firewall.Redirects, "REDIRECT": firewall.Redirects, "NETMAP": firewall.Redirects,
	"SNAT": firewall.Rewrites, "MASQUERADE": firewall.Rewrites,
}

// follow returns what becomes of p in a chain.
func (c chains) follow(chain string, p firewall.Packet) firewall.Outcome {
	o, _ := firewall.Steps(func(chain string, each func(firewall.Step) bool) error {
		for _, r := range c[chain] {
			s := firewall.Step{Met: meetsAll(r, p), Effect: effects[r.target], Chain: r.target, Rule: strings.TrimSpace(r.spec)}
			if _, jump := c[r.target]; jump {
				s.Effect = firewall.Jumps
			}
			if r.target == "NFQUEUE" {
				var first, last int
				if n, _ := fmt.Sscanf(r.jump, "-j NFQUEUE --queue-balance %d:%d", &first, &last); n < 2 {
					_, _ = fmt.Sscanf(r.jump, "-j NFQUEUE --queue-num %d", &first)
					last = first
				}
				s = nftables.Queue(s, first, last, strings.Contains(r.jump, "--queue-bypass"))
			}
			if !each(s) {
				break
			}
		}
		return nil
	}).Follow(chain)
	return o
}

// meetsAll reports whether the packet meets all conditions of a rule.
func meetsAll(r rule, p firewall.Packet) firewall.Answer {
	all := firewall.Yes
	for _, c := range r.conditions {
		a := meets(c, p)
		if c.not && (a == firewall.Yes || a == firewall.No) {
			a = firewall.Yes + firewall.No - a
		}
		if a == firewall.No {
			return firewall.No
		}
		if a == firewall.Seldom || a == firewall.Unknown && all == firewall.Yes {
			all = a
		}
	}
	return all
}

func is(met bool) firewall.Answer {
	return map[bool]firewall.Answer{false: firewall.No, true: firewall.Yes}[met]
}

// covers reports whether the network in text contains a.
func covers(text string, a netip.Addr) firewall.Answer {
	m, ok := match(text, false)
	if !ok {
		return firewall.Unknown
	}
	return is(m.Prefix.Contains(a))
}
