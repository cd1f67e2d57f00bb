// SPDX-License-Identifier: Apache-2.0

package dataplane

import "net/netip"

// keys is a set of keys of objects. If State.only selects by the same keys from two states,
// Plan compares only the neighbours, FDB entries and routes with these keys, and all links
// and addresses.
type keys map[any]struct{}

func (k keys) add(o Object) { k[o.key()] = struct{}{} }

func (k keys) has(o Object) bool {
	_, ok := k[o.key()]
	return ok
}

// only returns the part of the state that has the keys in k. The part always contains all
// links and addresses, because they are few and other objects depend on them. It shares
// their maps with s.
func (s State) only(k keys) State {
	part := NewState()
	part.Links = s.Links
	part.Addrs = s.Addrs
	for key := range k {
		switch key := key.(type) {
		case NeighKey:
			copyEntry(part.Neighs, s.Neighs, key)
		case FDBKey:
			copyEntry(part.FDB, s.FDB, key)
		case netip.Prefix:
			copyEntry(part.Routes, s.Routes, key)
		}
	}
	return part
}

func copyEntry[K comparable, V any](to, from map[K]V, key K) {
	if v, ok := from[key]; ok {
		to[key] = v
	}
}
