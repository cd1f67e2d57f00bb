// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"encoding/json"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

// Config is the network configuration that all nodes share.
type Config struct {
	Networks []Network // one for each enabled family, IPv4 first
	NFTables bool
	// NonMasquerade has the destinations, besides the networks, that see the addresses of pods
	// unchanged. Their host bits are zero.
	NonMasquerade []netip.Prefix  `json:",omitempty"`
	BackendType   string          // lower case; "udp" if the configuration has no Backend, empty if Backend has no Type
	Backend       json.RawMessage // nil if the configuration has no Backend
	// NextType and NextBackend describe the backend to which the network migrates. They are
	// zero unless the network migrates.
	NextType    string          `json:",omitempty"`
	NextBackend json.RawMessage `json:",omitempty"`
	// Warnings are about keys at the top level that ParseConfig did not use, one line each. The backend
	// checks the keys inside Backend.
	Warnings []string `json:"-"`
	// Stage is set while this host goes step by step toward the configuration in the store, which has no Stage.
	Stage Stage `json:",omitempty"`
}

// Stage is a step of a host that has read the end of a migration, or another NextBackend. X is the next
// backend:
//
//	{W, X}  --store has {X}-->     Finished  --no peer by W-->  Leaving  --no lease names W first-->  {X}
//	 lease W, X                    lease W, X                   lease X, W                            lease X
//
//	{W, X}  --store has {W, Y}-->  Withdrawn  --all hosts had time to see that-->  {W, Y}
//	 lease W, X                    lease W                                         lease W, Y
type Stage string

// The stages. A host that is Finished sends by both backends, one that is Leaving sends only by the next one, and
// one that is Withdrawn has only the present one.
const (
	Finished  Stage = "finished"
	Leaving   Stage = "leaving"
	Withdrawn Stage = "withdrawn"
)

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

// Migrates reports whether the network migrates from one backend to another.
func (c Config) Migrates() bool { return c.NextBackend != nil && c.Stage != Withdrawn }

// Present returns the configuration with the present backend alone.
func (c Config) Present() Config {
	c.NextType = ""
	c.NextBackend = nil
	c.Stage = ""
	return c
}

// Next returns the configuration with the next backend alone.
func (c Config) Next() Config {
	c.BackendType, c.Backend = c.NextType, c.NextBackend
	return c.Present()
}

// Without returns the configuration without the network of family f.
func (c Config) Without(f prefix.Family) Config {
	c.Networks = slices.DeleteFunc(slices.Clone(c.Networks), func(n Network) bool { return n.Family() == f })
	return c
}

// Toward returns the configuration that a host with c uses when the store has stored: stored itself, unless the host
// must go through stages because its peers do not read stored at the same moment.
func (c Config) Toward(stored Config) Config {
	stays := sameBackend(c.Present(), stored.Present())
	differs := stays && !sameBackend(c.Next(), stored.Next())

	// With other networks a host may get a lease with another key. Peers read that lease before this host has
	// changed its routes. At this time it must not send over a next backend that the lease does not have, and
	// the lease must not have one that does not run yet. So the networks change in a step of their own.
	if differs && !slices.Equal(c.Networks, stored.Networks) {
		switch {
		case c.Migrates():
			stored.Networks = c.Networks
		case c.NextBackend == nil:
			return stored.Present()
		}
	}

	switch {
	case c.NextBackend == nil:
	case !stays && sameBackend(c.Next(), stored.Present()) && stored.NextBackend == nil:
		stored.NextType = c.NextType
		stored.NextBackend = c.NextBackend
		stored.BackendType = c.BackendType
		stored.Backend = c.Backend
		stored.Stage = Finished
		if c.Stage == Leaving {
			stored.Stage = Leaving
		}
	case stored.NextBackend != nil && (differs || stays && c.Stage == Withdrawn):
		stored.Stage = Withdrawn
	}
	return stored
}

// sameBackend reports whether two configurations without a next backend have the same backend.
func sameBackend(a, b Config) bool {
	return a.BackendType == b.BackendType && len(backendChanges("Backend", a.Backend, b.Backend)) == 0
}

// Step returns the configuration after the next step. c must have a Stage.
func (c Config) Step() Config {
	switch c.Stage {
	case Finished:
		c.Stage = Leaving
	case Leaving:
		return c.Next()
	case Withdrawn:
		fallthrough
	default:
		c.Stage = ""
	}
	return c
}

// Goal returns the configuration after the last step. Without a Stage, that is c.
func (c Config) Goal() Config {
	for c.Stage != "" {
		c = c.Step()
	}
	return c
}

// Network returns the network of family f; ok is false if it is not enabled.
func (c Config) Network(f prefix.Family) (n Network, ok bool) {
	for i := range c.Networks { // by index: the checks of thousands of leases call this
		if c.Networks[i].Family() == f {
			return c.Networks[i], true
		}
	}
	return Network{}, false
}

// Spares returns an error if a host could be given a subnet of c that contains one of addrs, because routes
// to that subnet would take the packets to the address. owner describes whose addresses they are. used is
// the configuration in use, or zero: an address in its range too is no reason to refuse c.
func (c Config) Spares(used Config, owner string, addrs ...netip.Addr) error {
	now, _ := used.Pools() // without pools no address is in its range
	pools, err := c.Pools()
	if err != nil {
		return err
	}

	for _, p := range pools {
		f := prefix.FamilyOf(p.first.Addr())
		for _, a := range addrs {
			within := func(p Pool) bool { return p.overlaps(prefix.Host(a)) }
			if within(p) && !slices.ContainsFunc(now, within) {
				return invalid("%s: a host could get the subnet with %s, an address of %s: leave it out by %s and %s, or want another range",
					keyName(f, "Network"), a, owner, keyName(f, "SubnetMin"), keyName(f, "SubnetMax"))
			}
		}
	}
	return nil
}

// Prefixes returns the networks of all families. The slice is never nil.
func (c Config) Prefixes() []netip.Prefix {
	ps := []netip.Prefix{}
	for _, n := range c.Networks {
		ps = append(ps, n.Prefix)
	}
	return ps
}
