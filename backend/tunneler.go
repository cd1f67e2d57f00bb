package backend

import (
	"flanneld/pkg/firewall"
	"flanneld/pkg/prefix"
)

// Tunneler is implemented by backends whose hosts take packets of the network out of what
// arrives at them, without proof of who has sent it.
type Tunneler interface {
	// Tunnel returns what carries packets between hosts with addresses of family f. It is
	// pure.
	Tunnel(f prefix.Family) firewall.Payload
}

// Tunnel returns what carries packets of b between hosts without proof of who has sent it;
// the zero Payload if nothing does.
func Tunnel(b Backend, f prefix.Family) firewall.Payload {
	if t, ok := b.(Tunneler); ok {
		return t.Tunnel(f)
	}
	return firewall.Payload{}
}
