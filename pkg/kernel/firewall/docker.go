// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// DockerBridge is a bridge of Docker whose containers have addresses of this host's
// subnet.
type DockerBridge struct {
	Network, Subnet netip.Prefix
	Name            string   // name of the bridge
	From            []string // interfaces on which packets of other hosts arrive
}

// Drops reports whether dropped returns true for the first packet of a connection from another host to dst,
// a container, on whichever interface it arrives. The packet has an address and a port for which there
// are hardly rules of their own.
func (b DockerBridge) Drops(dst netip.Addr, dropped func(Packet) bool) bool {
	return !slices.ContainsFunc(b.From, func(in string) bool {
		return !dropped(Packet{In: in, Out: b.Name, Src: prefix.Last(b.Network).Prev(), Dst: dst, Protocol: TCP, Port: 1})
	})
}

// Container returns an address of the subnet for which there are hardly rules of their own.
func (b DockerBridge) Container() netip.Addr { return prefix.Last(b.Subnet).Prev() }

// DockerCut describes which rules of Docker drop packets from other hosts of the network
// to containers behind a bridge.
type DockerCut struct {
	// Direct is set if Docker drops packets to addresses of containers before they are
	// routed. Later rules cannot accept these packets.
	Direct bool
	// Forward is set if Docker drops packets that are forwarded to the bridge, except to
	// published ports.
	Forward bool
}
