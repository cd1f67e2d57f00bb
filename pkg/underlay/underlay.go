// SPDX-License-Identifier: Apache-2.0

// Package underlay chooses the external interface, and watches whether the choice
// changes. Peers send to the address of this interface.
package underlay

import (
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// Interface is the chosen external interface.
type Interface struct {
	Name  string
	Index int
	MTU   int // bytes; never 0
	// Addrs has one entry for each enabled address family, IPv4 first.
	Addrs []Address
	// Reason says briefly why this interface was chosen.
	Reason string
	// VRF is the name of the VRF to which the interface belongs; empty if it belongs to none.
	VRF string `json:",omitempty"`
	// Hardware is the hardware address, by which a host that got another IP address differs from one
	// with a cloned disk. It is empty or zero if the interface has none.
	Hardware string `json:",omitempty"`
}

// Address is the address of the interface in one family.
type Address struct {
	// Local is assigned on this host. It is the source address of packets.
	Local netip.Addr
	// Public is the address that peers send to. It differs from Local behind 1:1 NAT.
	Public netip.Addr
}

// uses reports whether local is one of the interface's local addresses.
func (i Interface) uses(local netip.Addr) bool {
	return slices.ContainsFunc(i.Addrs, func(a Address) bool { return a.Local == local })
}

// Family returns the address of family f; ok is false if the family is not enabled.
func (i Interface) Family(f prefix.Family) (a Address, ok bool) {
	for _, a := range i.Addrs {
		if prefix.FamilyOf(a.Local) == f {
			return a, true
		}
	}
	return Address{}, false
}
