// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"

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
	c, err := dial(prefix.FamilyOf(b.Subnet.Addr()))
	if err != nil {
		return cut, err
	}
	defer c.close()

	for range attempts {
		if cut, err = c.docker(b); !errors.Is(err, errRaced) {
			break
		}
	}
	return cut, err
}

func (c *conn) docker(b firewall.DockerBridge) (cut firewall.DockerCut, err error) {
	raw, err := c.dockerRules(dockerRaw)
	if err != nil {
		return cut, err
	}
	cut.Direct = slices.ContainsFunc(raw, func(r dockerRule) bool {
		return r.Name == "DROP" && r.dst.IsValid() && b.Subnet.Contains(r.dst) && !r.trusts
	})

	forward, err := c.dockerRules(dockerForward + b.Name)
	if err != nil {
		return cut, err
	}
	accepted := slices.ContainsFunc(forward, func(r dockerRule) bool { return r.Name == "ACCEPT" && (r.Always || r.mark) })
	dropped := slices.ContainsFunc(forward, func(r dockerRule) bool { return r.Name == "DROP" && r.Always })
	cut.Forward = dropped && !accepted
	return cut, nil
}

func (c *conn) dockerRules(chain string) (rules []dockerRule, err error) {
	_, exists, err := c.targets(dockerTable, chain)
	if err != nil || !exists {
		return nil, err
	}
	err = c.eachRule(dockerTable, chain, func(r ruleState) { rules = append(rules, readDockerRule(c.family, r.raw)) })
	return rules, err
}

// dockerRule contains the parts of one of Docker's rules that matter here.
type dockerRule struct {
	Target
	dst    netip.Addr // zero if the rule matches any or several addresses
	mark   bool       // it matches packets with a mark
	trusts bool       // it exempts a set of interfaces, which Docker trusts
}

func readDockerRule(f prefix.Family, raw []byte) dockerRule {
	r := dockerRule{Target: targetOf(f, raw)}
	destination := false // the register contains the destination address
	_ = eachExpression(raw, func(name string, data []byte) bool {
		switch name {
		case "meta":
			var e expr.Meta
			if expr.Unmarshal(protocol(f), data, &e) == nil && e.Key == expr.MetaKeyMARK {
				r.mark = true
			}

		case "lookup":
			r.trusts = true
		case "payload":
			var e expr.Payload
			destination = expr.Unmarshal(protocol(f), data, &e) == nil && e.Base == expr.PayloadBaseNetworkHeader &&
				e.Offset == headerOf(f).dst && e.Len == headerOf(f).length

		case "cmp":
			var e expr.Cmp
			if destination && expr.Unmarshal(protocol(f), data, &e) == nil && e.Op == expr.CmpOpEq {
				r.dst, _ = netip.AddrFromSlice(e.Data)
			}
			destination = false
		}
		return true
	})
	return r
}
