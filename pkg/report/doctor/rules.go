// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// Docker describes the rules of Docker that keep packets of other hosts from the containers behind a bridge.
type Docker struct {
	Bridge   firewall.DockerBridge
	Program  string // iptables or ip6tables
	IPTables firewall.DockerCut
	NFTables firewall.DockerCut
}

// dockers checks whether Docker drops packets from other hosts to its containers in this host's subnet.
func (h Facts) dockers(found finder) {
	for _, d := range h.Docker {
		b := d.Bridge
		if d.IPTables.Direct || d.NFTables.Direct {
			found(serious(
				fmt.Sprintf("Docker drops packets from other hosts to containers in %s before they are routed", b.Subnet),
				`put "allow-direct-routing": true into /etc/docker/daemon.json (Docker 28.2 or later) and restart Docker; see docker.md`,
			))
		}

		unpublished := fmt.Sprintf("Docker drops forwarded packets from other hosts to %s, except to published ports", b.Name)
		if d.IPTables.Forward {
			found(serious(unpublished,
				fmt.Sprintf("%s -I DOCKER-USER -s %s -d %s -j ACCEPT (the drop-in of docker.md does so at each start)", d.Program, b.Network, b.Subnet)))
		}
		if d.NFTables.Forward {
			found(serious(unpublished,
				`put "bridge-accept-fwmark" into /etc/docker/daemon.json, mark the packets from the network, and restart Docker; see docker.md`))
		}
	}
}

// blocks finds each rule that drops or redirects packets of the backend or of pods. One that is only about UDP or
// a port may be meant so.
func (h Facts) blocks(found finder) {
	for _, b := range h.Blocks {
		verb := "drop"
		if b.Redirects {
			verb = "redirect"
		}

		program := b.Program
		fix := h.accept(b)
		permanently := fix + " (and make it permanent in the firewall's own settings)"
		if strings.HasSuffix(b.Table, " firewalld") && !b.Redirects && !b.Rewrites {
			program = "firewalld"
			fix = h.trust()
			permanently = fix
		}

		if b.In != "" && b.Out == "" && b.Protocol == firewall.TCP {
			does := verb + "s"
			if b.Doubtful {
				does = "may " + verb
			}
			found(note(fmt.Sprintf("%s %s TCP packets of other hosts to %s in chain %s of table %s: %s: "+
				"flannelctl check there cannot tell whether the path works, although pods are reached",
				program, does, b.Dst, b.Chain, b.Table, b.Rule), fix))
			continue
		}
		kind := "packets"
		if b.Forwarded() && (b.Protocol == firewall.UDP || b.Port > 1) {
			all := b
			all.Protocol = firewall.TCP
			all.Port = 1
			if slices.Contains(h.Blocks, all) {
				continue
			}
			kind = "UDP packets"
			if b.Port > 1 {
				kind = fmt.Sprintf("packets to port %d", b.Port)
			}
			b.Doubtful = true
		}
		what := fmt.Sprintf("forwarded %s of pods from %s to %s", kind, b.In, b.Out)
		subnets := h.subnetsOf(prefix.FamilyOf(b.Src))
		if !b.Forwarded() {
			what = "packets of other hosts " + carrier(b.Packet)
			subnets = nil // the family of the hosts need not be that of the pods
		}
		if b.In == "" {
			what = "packets of this host " + carrier(b.Packet)
		}

		where := fmt.Sprintf("%s in chain %s of table %s: %s", what, b.Chain, b.Table, b.Rule)
		switch {
		case b.Rewrites:
			found(note(fmt.Sprintf("%s rewrites the source of %s: pods of other hosts see another address, and may not reach it", program, where), permanently))
		case b.Doubtful:
			found(note(fmt.Sprintf("%s may %s %s", program, verb, where), permanently))
		default:
			found(cut("firewall", fmt.Sprintf("%s %ss %s", program, verb, where), permanently, subnets...))
		}
	}
}

// carrier describes the packets in which a tunnel carries others.
func carrier(p firewall.Packet) string {
	if p.Port != 0 {
		return fmt.Sprintf("to UDP port %d", p.Port)
	}
	return fmt.Sprintf("with IP protocol %d", p.Protocol)
}

// accept returns a command that accepts a packet before the rule that drops or redirects it.
func (h Facts) accept(b firewall.Block) string {
	network := h.networkOf(b.Src)
	ip := map[bool]string{true: "ip", false: "ip6"}[network.Addr().Is4()]
	inNFTables := fmt.Sprintf("%s saddr %s", ip, network)
	inIPTables := fmt.Sprintf("-s %s", network)
	switch {
	case !b.Forwarded() && b.Protocol == firewall.TCP:
		inNFTables = fmt.Sprintf("%s daddr %s", ip, b.Dst)
		inIPTables = "-d " + b.Dst.String()
	case !b.Forwarded() && b.Port == 0:
		inNFTables = fmt.Sprintf("meta l4proto %d", b.Protocol)
		inIPTables = fmt.Sprintf("-p %d", b.Protocol)
	case !b.Forwarded():
		inNFTables = fmt.Sprintf("udp dport %d", b.Port)
		inIPTables = fmt.Sprintf("-p udp --dport %d", b.Port)
	case b.Rewrites: // packets to other networks must still be masqueraded
		inNFTables = fmt.Sprintf("%[1]s saddr %[2]s %[1]s daddr %[2]s", ip, network)
		inIPTables = fmt.Sprintf("-s %[1]s -d %[1]s", network)
	case b.Redirects: // packets from pods to services must still be redirected
		inNFTables = fmt.Sprintf("%s daddr %s", ip, network)
		inIPTables = fmt.Sprintf("-d %s", network)
	}

	if b.Program == "nft" {
		return fmt.Sprintf("nft insert rule %s %s %s accept", b.Table, b.Chain, inNFTables)
	}
	return fmt.Sprintf("%s -t %s -I %s %s -j ACCEPT", b.Program, b.Table, b.Chain, inIPTables)
}
