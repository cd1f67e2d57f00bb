// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"github.com/flanneld/flanneld/pkg/firewall"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// Tunneler is implemented by backends whose hosts accept tunnel packets without
// authenticating the sender.
type Tunneler interface {
	// Tunnel returns the packets in which hosts carry the network's packets between
	// addresses of family f. It is pure.
	Tunnel(f prefix.Family) firewall.Payload
}

// Tunnel returns the tunnel packets of b that hosts accept without authenticating the
// sender, or the zero Payload if there are none.
func Tunnel(b Backend, f prefix.Family) firewall.Payload {
	if t, ok := b.(Tunneler); ok {
		return t.Tunnel(f)
	}
	return firewall.Payload{}
}
