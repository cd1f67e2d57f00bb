// SPDX-License-Identifier: Apache-2.0

package firewall

import "net/netip"

// TCP is the number of the protocol.
const TCP = 6

// Packet is the first packet of a connection, without a mark.
type Packet struct {
	In, Out  string // devices; In is empty if this host sends the packet, and Out if it is for this host
	Src, Dst netip.Addr
	Protocol uint8
	Port     uint16 // of the destination; 0 if the protocol has no ports
}

// ToPorts returns a copy of each forwarded TCP packet for each port, because a rule that redirects one port
// is not about other packets.
func ToPorts(packets []Packet, ports []Payload) (all []Packet) {
	for _, p := range packets {
		for _, to := range ports {
			if p.Forwarded() && p.Protocol == TCP {
				c := p
				c.Protocol = to.Protocol
				c.Port = to.Port
				all = append(all, c)
			}
		}
	}
	return all
}

// Forwarded reports whether the packet is neither from this host nor for it.
func (p Packet) Forwarded() bool { return p.In != "" && p.Out != "" }

// Block is a rule, or the policy of a chain, that keeps a packet from its destination.
type Block struct {
	Packet
	Program      string // the program that shows the rule, such as iptables-legacy
	Table, Chain string
	Rule         string
	Redirects    bool // it gives the packet another destination, and does not drop it
	Rewrites     bool // it gives the packet another source, and does not drop it
	Doubtful     bool // an earlier rule may accept the packet
}
