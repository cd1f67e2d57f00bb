package firewall

import "net/netip"

// DockerBridge is a bridge of Docker whose containers have addresses of this
// host's subnet.
type DockerBridge struct {
	Network, Subnet netip.Prefix
	Name            string   // of the bridge
	From            []string // interfaces by which packets of other hosts arrive
}

// DockerCut says which rules of Docker drop packets that come from other hosts
// of the network and go to containers behind a bridge.
type DockerCut struct {
	// Direct is set if Docker drops packets to addresses of containers before
	// they are routed. Later rules cannot accept them.
	Direct bool
	// Forward is set if Docker drops what is forwarded to the bridge, except to
	// published ports.
	Forward bool
}
