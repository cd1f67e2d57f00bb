// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Policy is a policy of the kernel's IPsec about packets from Src to Dst.
type Policy struct {
	Direction string // "out", "in" or "fwd", as in ip-xfrm(8)
	Src, Dst  netip.Prefix
	Protocol  int // 0 for all
	Port      int // destination; 0 for all
	Blocks    bool
	// Lacks means that packets need a security association which does not exist.
	Lacks bool
}

// String describes the policy in the form of ip-xfrm(8).
func (p Policy) String() string {
	return fmt.Sprintf("src %s dst %s dir %s", p.Src, p.Dst, p.Direction)
}

// policy returns the policy that drops packets from src to dst. It is the first one about them that decides. port is 0
// for packets of pods, which may be of any protocol, and otherwise that of UDP packets.
func (h Facts) policy(direction string, src, dst netip.Addr, port int) (p Policy, drops bool) {
	i := slices.IndexFunc(h.Policies, func(p Policy) bool {
		protocol := p.Protocol == 0 || port != 0 && p.Protocol == syscall.IPPROTO_UDP
		return p.Direction == direction && p.Src.Contains(src) && p.Dst.Contains(dst) && protocol && (p.Port == 0 || p.Port == port)
	})
	if i < 0 {
		return p, false
	}
	return h.Policies[i], h.Policies[i].Blocks || h.Policies[i].Lacks
}

// negotiates reports whether a program makes security associations when the kernel asks for them, as the daemon of a
// VPN does. The kernel asks when the first packet needs one, so that one may be missing only because there was no packet.
func (h Facts) negotiates() bool {
	const xfrm, acquire = "6", 1 // NETLINK_XFRM, and the bit of XFRMNLGRP_ACQUIRE
	text, _ := h.text("proc/net/netlink")
	for line := range strings.Lines(text) {
		fields := strings.Fields(line) // sk Eth Pid Groups …
		if len(fields) > 3 && fields[1] == xfrm {
			if groups, err := strconv.ParseUint(fields[3], 16, 32); err == nil && groups&acquire != 0 {
				return true
			}
		}
	}
	return false
}

// policyFinding returns a finding about a policy that drops packets. whose says which packets.
func (h Facts) policyFinding(p Policy, whose string, subnets ...netip.Prefix) Finding {
	fix := "let the VPN leave the network out, or: ip xfrm policy delete " + p.String()
	switch {
	case p.Blocks:
		return cut("ipsec", fmt.Sprintf("an IPsec policy (%s) blocks %s", p, whose), fix, subnets...)
	case h.negotiates():
		f := cut("ipsec", fmt.Sprintf("an IPsec policy (%s) encrypts %s, which are dropped until there is a security association", p, whose), "ip xfrm state; "+fix, subnets...)
		f.Serious = false
		return f
	}
	return cut("ipsec", fmt.Sprintf("an IPsec policy (%s) drops %s: there is no security association for it, and no program that makes one", p, whose), "start the VPN; "+fix, subnets...)
}

// ipsec finds each policy that drops packets of the backend.
func (h Facts) ipsec(found finder) {
	judge := func(direction string, src, dst netip.Addr, port int, subnets []netip.Prefix) {
		if p, drops := h.policy(direction, src, dst, port); drops {
			found(h.policyFinding(p, fmt.Sprintf("packets from %s to UDP port %d of %s", src, port, dst), subnets...))
		}
	}
	for _, peer := range h.Report.Peers {
		for _, own := range h.Report.Interface.Addresses {
			for _, other := range peer.PublicIPs {
				if own.Local.Is4() != other.Is4() {
					continue
				}
				for _, port := range h.Report.Network.Ports {
					judge("out", own.Local, other, port, peer.Subnets)
					judge("in", other, own.Local, port, peer.Subnets)
				}
			}
		}
	}
}
