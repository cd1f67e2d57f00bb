// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/pkg/kernel/firewall"
)

// SeveralTunneler is implemented by backends that consist of others, and so may have several kinds
// of tunnel packets.
type SeveralTunneler interface {
	// Tunnels returns the result of Tunnel for each of these other backends that is a Tunneler. It
	// is pure.
	Tunnels(f prefix.Family) []firewall.Payload
}

// Tunneler is implemented by backends whose hosts accept tunnel packets without
// authenticating the sender.
type Tunneler interface {
	// Tunnel describes the packets in which hosts carry the network's packets between
	// addresses of family f. It is pure.
	Tunnel(f prefix.Family) firewall.Payload
}

// Tunnels returns the tunnel packets of b that hosts accept without authenticating the sender. It
// returns nil if there are none.
func Tunnels(b Backend, f prefix.Family) []firewall.Payload {
	switch t := b.(type) {
	case SeveralTunneler:
		return t.Tunnels(f)
	case Tunneler:
		return []firewall.Payload{t.Tunnel(f)}
	}
	return nil
}
