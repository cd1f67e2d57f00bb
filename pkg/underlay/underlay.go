// Package underlay chooses the external interface: the one whose address
// peers send to.
package underlay

import (
	"net/netip"
	"slices"

	"flanneld/pkg/prefix"
)

// Interface is the external interface as chosen.
type Interface struct {
	Name  string
	Index int
	MTU   int // bytes; never 0
	// Addrs has one entry for each enabled address family, IPv4 first.
	Addrs []Address
	// Reason says in a few words why this interface was chosen.
	Reason string
}

// Address is the interface's address in one family.
type Address struct {
	// Local is assigned on this host: it is what packets carry as their source.
	Local netip.Addr
	// Public is what peers send to. It differs from Local behind 1:1 NAT.
	Public netip.Addr
}

// uses reports whether local is the address of a family.
func (i Interface) uses(local netip.Addr) bool {
	return slices.ContainsFunc(i.Addrs, func(a Address) bool { return a.Local == local })
}

// Family returns the address of family f; ok is false if it is not enabled.
func (i Interface) Family(f prefix.Family) (a Address, ok bool) {
	for _, a := range i.Addrs {
		if prefix.FamilyOf(a.Local) == f {
			return a, true
		}
	}
	return Address{}, false
}
