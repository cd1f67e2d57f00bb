// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// SeveralTunneler is implemented by backends that consist of others, and so may have several kinds
// of tunnel packets.
type SeveralTunneler interface {
	// Tunnels returns the results of Tunnel of these other backends. It is pure.
	Tunnels(f prefix.Family) []firewall.Payload
}

// Tunneler is implemented by backends whose hosts accept tunnel packets without
// authenticating the sender.
type Tunneler interface {
	// Tunnel returns the packets in which hosts carry the network's packets between
	// addresses of family f. It is pure.
	Tunnel(f prefix.Family) firewall.Payload
}

// IPIPHolder is implemented by backends that may have an ipip device from the host's address to any
// other address. The kernel allows one such device for each address of the host.
type IPIPHolder interface {
	// HoldsIPIP reports whether the backend has the device. It is pure.
	HoldsIPIP() bool
}

// HoldsIPIP reports whether b has an ipip device from the host's address to any other address.
func HoldsIPIP(b Backend) bool {
	h, ok := b.(IPIPHolder)
	return ok && h.HoldsIPIP()
}

// Tunnels returns the tunnel packets of b that hosts accept without authenticating the
// sender.
func Tunnels(b Backend, f prefix.Family) []firewall.Payload {
	switch t := b.(type) {
	case SeveralTunneler:
		return t.Tunnels(f)
	case Tunneler:
		return []firewall.Payload{t.Tunnel(f)}
	}
	return nil
}
