// SPDX-License-Identifier: Apache-2.0

package firewall

import "net/netip"

// DockerBridge is a bridge of Docker whose containers have addresses of this host's
// subnet.
type DockerBridge struct {
	Network, Subnet netip.Prefix
	Name            string   // name of the bridge
	From            []string // interfaces on which packets of other hosts arrive
}

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
