// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
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

// dockerCut follows packets from another host to containers behind b.
func dockerCut(d dump, b firewall.DockerBridge) (cut firewall.DockerCut) {
	cut.Forward = !acceptsMark(d["filter"]) && b.Drops(b.Container(), func(p firewall.Packet) bool {
		o := d["filter"].follow("FORWARD", p)
		return o.Blocks() && strings.HasPrefix(o.Chain, dockerChains)
	})

	// Docker creates a rule for the address of each running container, so follow a packet to each.
	for _, r := range d["raw"]["PREROUTING"] {
		for _, c := range r.conditions {
			if to, ok := match(c.value, c.not); c.option == "-d" && ok && !to.Not && prefix.Contains(b.Subnet, to.Prefix) {
				cut.Direct = cut.Direct || b.Drops(to.Prefix.Addr(), func(p firewall.Packet) bool {
					return d["raw"].follow("PREROUTING", p).Blocks()
				})
			}
		}
	}
	return cut
}

const dockerChains = "DOCKER" // start of the names

// acceptsMark reports whether Docker has its option --bridge-accept-fwmark.
func acceptsMark(filter chains) bool {
	return slices.ContainsFunc(filter["DOCKER-FORWARD"], func(r rule) bool {
		return r.target == "ACCEPT" && slices.ContainsFunc(r.conditions, func(c condition) bool { return c.option == "--mark" && !c.not })
	})
}
