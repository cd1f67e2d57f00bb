// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"net/netip"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// Docker returns which rules of Docker keep the other hosts of the network from the
// containers behind b. It reads the rules of the variants NFT and Legacy that are installed,
// or of Default if neither is. If rules cannot be read it returns an error, and cut may be
// incomplete.
func Docker(ctx context.Context, b firewall.DockerBridge) (cut firewall.DockerCut, err error) {
	f := prefix.FamilyOf(b.Subnet.Addr())
	for _, v := range Present(f) {
		d, _, err := New(v).save(ctx, f, kind{nft: v == NFT})
		if err != nil {
			return cut, err
		}
		c := dockerCut(d, b)
		cut.Direct = cut.Direct || c.Direct
		cut.Forward = cut.Forward || c.Forward
	}
	return cut, nil
}

// dockerCut follows a packet from another host to the containers behind b.
func dockerCut(d dump, b firewall.DockerBridge) (cut firewall.DockerCut) {
	o := d["filter"].follow("FORWARD", packet{DockerBridge: b, dst: b.Subnet, routed: true}.meets, nil)
	cut.Forward = o.verdict == no && strings.HasPrefix(o.chain, dockerChains) && !acceptsMark(d["filter"])

	// Docker creates a rule for the address of each running container, so follow a packet to each.
	for _, r := range d["raw"]["PREROUTING"] {
		for _, c := range conditions(r) {
			if to, ok := match(c.value, c.not); c.option == "-d" && ok && !to.Not && prefix.Contains(b.Subnet, to.Prefix) {
				o := d["raw"].follow("PREROUTING", packet{DockerBridge: b, dst: to.Prefix}.meets, nil)
				cut.Direct = cut.Direct || o.verdict == no
			}
		}
	}
	return cut
}

const dockerChains = "DOCKER" // start of the names

// acceptsMark reports whether Docker has its option --bridge-accept-fwmark.
func acceptsMark(filter chains) bool {
	return slices.ContainsFunc(filter["DOCKER-FORWARD"], func(r rule) bool {
		return r.target == "ACCEPT" && slices.ContainsFunc(conditions(r), func(c condition) bool { return c.option == "--mark" && !c.not })
	})
}

// packet is the first packet of a connection from another host to any port. It arrives on
// another interface than the bridge.
type packet struct {
	firewall.DockerBridge
	dst    netip.Prefix
	routed bool // the routing decision is made: it leaves through the bridge
}

// meets ignores the "!" of a condition.
func (p packet) meets(c condition) answer {
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
