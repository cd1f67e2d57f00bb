// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/flanneld/flanneld/pkg/base/oneline"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// The names of Docker's table, of its chain that precedes all others, and of its chain
// for packets that are forwarded to a bridge, without the bridge's name.
const (
	dockerTable   = "docker-bridges"
	dockerRaw     = "raw-PREROUTING"
	dockerForward = "filter-forward-in__"
)

// Docker returns which rules of a Docker that uses nftables keep the other hosts of the
// network from the containers behind b. The result is zero if Docker has no rules in
// nftables.
func Docker(b firewall.DockerBridge) (cut firewall.DockerCut, err error) {
	c, err := nftables.New()
	if err != nil {
		return cut, err
	}
	f := prefix.FamilyOf(b.Subnet.Addr())
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamily(protocols[f]))
	if lacksNFTables(err) {
		return cut, nil
	}
	if err != nil {
		return cut, err
	}

	var errs []error
	drops := func(chain *nftables.Chain, dst netip.Addr) bool {
		return b.Drops(dst, func(p firewall.Packet) bool {
			o, err := follower{conn: c, packet: p, raw: encodePacket(p)}.follow(chain)
			errs = append(errs, err)
			return o.Blocks() && !o.Doubtful // an earlier rule may accept the marks that an operator sets
		})
	}

	for _, chain := range chains {
		switch {
		case chain.Table.Name != dockerTable:
		case chain.Name == dockerForward+b.Name:
			cut.Forward = drops(chain, b.Container())
		case chain.Name == dockerRaw:
			rules, err := c.GetRules(chain.Table, chain)
			errs = append(errs, err)
			for _, dst := range destinations(f, rules) { // of running containers
				cut.Direct = cut.Direct || b.Subnet.Contains(dst) && drops(chain, dst)
			}
		}
	}
	return cut, oneline.Join(errs...)
}

// destinations returns the addresses that rules compare with the destination of a packet.
func destinations(f prefix.Family, rules []*nftables.Rule) (all []netip.Addr) {
	for _, r := range rules {
		loaded := false // the register contains the destination
		for _, e := range r.Exprs {
			switch e := e.(type) {
			case *expr.Payload:
				loaded = e.Base == expr.PayloadBaseNetworkHeader && e.Offset == headers[f].dst
			case *expr.Cmp:
				if dst, ok := netip.AddrFromSlice(e.Data); ok && loaded {
					all = append(all, dst)
				}
			}
		}
	}
	return all
}
