// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"encoding/json"
	"net/netip"

	"github.com/flanneld/flanneld/pkg/prefix"
)

// Config is the network configuration that all nodes share.
type Config struct {
	Networks []Network // one for each enabled family, IPv4 first
	NFTables bool
	// NonMasquerade are the destinations, besides the networks, that see the addresses of pods
	// unchanged; masked.
	NonMasquerade []netip.Prefix  `json:",omitempty"`
	BackendType   string          // lower case; "udp" if the configuration has no Backend
	Backend       json.RawMessage // nil if the configuration has no Backend
}

// Network is the flat network of one address family.
type Network struct {
	Prefix netip.Prefix // masked
	// SubnetLen, Min and Max are zero unless they are configured. Pool derives the values that are
	// used.
	SubnetLen int
	Min, Max  netip.Addr
}

// Family returns the network's address family.
func (n Network) Family() prefix.Family { return prefix.FamilyOf(n.Prefix.Addr()) }

// Network returns the network of family f; ok is false if it is not enabled.
func (c Config) Network(f prefix.Family) (n Network, ok bool) {
	for _, n := range c.Networks {
		if prefix.FamilyOf(n.Prefix.Addr()) == f {
			return n, true
		}
	}
	return Network{}, false
}

// Prefixes returns the networks of all families. It is not nil.
func (c Config) Prefixes() []netip.Prefix {
	ps := []netip.Prefix{}
	for _, n := range c.Networks {
		ps = append(ps, n.Prefix)
	}
	return ps
}
