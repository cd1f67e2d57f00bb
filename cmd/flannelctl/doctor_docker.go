// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	mathbits "math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	rules "github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/firewall/iptables"
	"github.com/flanneld/flanneld/pkg/firewall/nftables"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// dockerCuts is the dockerFunc that reads the rules in the kernel. If the rules of a firewall
// cannot be read, it takes them for rules that drop nothing.
func dockerCuts(ctx context.Context, b rules.DockerBridge) (inIPTables, inNFTables rules.DockerCut) {
	inIPTables, _ = iptables.Docker(ctx, b)
	inNFTables, _ = nftables.Docker(b)
	return inIPTables, inNFTables
}

// dockers checks whether Docker drops packets from other hosts to its containers in this
// host's subnet.
func (h host) dockers(ctx context.Context) []finding {
	if h.report == nil {
		return nil
	}
	var fs []finding
	for _, subnet := range h.report.Lease.Subnets {
		i := slices.IndexFunc(h.report.Network.Prefixes, func(n netip.Prefix) bool { return prefix.Contains(n, subnet) })
		bridge, ok := h.bridgeOf(subnet)
		if i < 0 || !ok {
			continue
		}
		b := rules.DockerBridge{
			Network: h.report.Network.Prefixes[i], Subnet: subnet, Name: bridge,
			From: append(slices.Clone(h.report.Network.Devices), h.report.Interface.Name),
		}
		inIPTables, inNFTables := h.docker(ctx, b)
		if inIPTables.Direct || inNFTables.Direct {
			fs = append(fs, finding{
				fmt.Sprintf("Docker drops packets from other hosts to containers in %s before they are routed", subnet),
				`put "allow-direct-routing": true into /etc/docker/daemon.json (Docker 28.2 or later) and restart Docker; see docker.md`, true,
			})
		}
		const unpublished = "Docker drops forwarded packets from other hosts to %s, except to published ports"
		if inIPTables.Forward {
			fs = append(fs, finding{
				fmt.Sprintf(unpublished, bridge),
				fmt.Sprintf("%s -I DOCKER-USER -s %s -d %s -j ACCEPT (the drop-in of docker.md does so at each start)",
					iptables.Default.Program(prefix.FamilyOf(subnet.Addr())), b.Network, subnet), true,
			})
		}
		if inNFTables.Forward {
			fs = append(fs, finding{
				fmt.Sprintf(unpublished, bridge),
				`put "bridge-accept-fwmark" into /etc/docker/daemon.json, mark the packets from the network, and restart Docker; see docker.md`, true,
			})
		}
	}
	return fs
}

// bridgeOf returns the bridge of the first route that leads to a subnet, or to a part of it,
// through a bridge. ok is false if there is none.
func (h host) bridgeOf(subnet netip.Prefix) (name string, ok bool) {
	file, read := "proc/net/route", route4
	if subnet.Addr().Is6() {
		file, read = "proc/net/ipv6_route", route6
	}
	text, _ := h.text(file)
	for line := range strings.Lines(text) {
		to, dev, ok := read(strings.Fields(line))
		if ok && prefix.Contains(subnet, to) && h.exists("sys/class/net/"+dev+"/bridge") {
			return dev, true
		}
	}
	return "", false
}

// route4 parses the fields of a line of /proc/net/route. ok is false if they are no
// route.
func route4(fields []string) (to netip.Prefix, dev string, ok bool) {
	if len(fields) < 8 {
		return to, "", false
	}
	addr, err := strconv.ParseUint(fields[1], 16, 32)
	mask, e := strconv.ParseUint(fields[7], 16, 32)
	if err != nil || e != nil {
		return to, "", false
	}
	var a [4]byte
	binary.NativeEndian.PutUint32(a[:], uint32(addr))
	return netip.PrefixFrom(netip.AddrFrom4(a), mathbits.OnesCount32(uint32(mask))), fields[0], true
}

// route6 parses the fields of a line of /proc/net/ipv6_route. ok is false if they are no
// route.
func route6(fields []string) (to netip.Prefix, dev string, ok bool) {
	if len(fields) < 10 {
		return to, "", false
	}
	addr, err := hex.DecodeString(fields[0])
	length, e := strconv.ParseUint(fields[1], 16, 8)
	a, ok := netip.AddrFromSlice(addr)
	if err != nil || e != nil || !ok {
		return to, "", false
	}
	return netip.PrefixFrom(a, int(length)), fields[9], true
}
