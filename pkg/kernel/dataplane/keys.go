// SPDX-License-Identifier: Apache-2.0

package dataplane

import "net/netip"

// Keys is a set of keys of objects. If State.Only selects by the same Keys from two states,
// Plan compares only the neighbours, FDB entries and routes with these keys, and all links
// and addresses. The zero Keys is empty.
type Keys struct {
	links  map[string]struct{}
	addrs  map[Addr]struct{}
	neighs map[NeighKey]struct{}
	fdb    map[FDBKey]struct{}
	dsts   map[netip.Prefix]struct{}
}

// Add adds the keys of objects. The key of a route is its destination.
func (k *Keys) Add(objects ...Object) {
	for _, o := range objects {
		switch o := o.(type) {
		case Link:
			addKey(&k.links, o.Name)
		case Addr:
			addKey(&k.addrs, o)
		case Neigh:
			addKey(&k.neighs, o.NeighKey)
		case FDB:
			addKey(&k.fdb, o.FDBKey)
		case Route:
			addKey(&k.dsts, o.Dst)
		}
	}
}

func addKey[K comparable](set *map[K]struct{}, k K) {
	if *set == nil {
		*set = map[K]struct{}{}
	}
	(*set)[k] = struct{}{}
}

func (k *Keys) merge(other Keys) {
	addKeys(&k.links, other.links)
	addKeys(&k.addrs, other.addrs)
	addKeys(&k.neighs, other.neighs)
	addKeys(&k.fdb, other.fdb)
	addKeys(&k.dsts, other.dsts)
}

func addKeys[K comparable](set *map[K]struct{}, other map[K]struct{}) {
	for k := range other {
		addKey(set, k)
	}
}

func (k Keys) has(o Object) (ok bool) {
	switch o := o.(type) {
	case Link:
		_, ok = k.links[o.Name]
	case Addr:
		_, ok = k.addrs[o]
	case Neigh:
		_, ok = k.neighs[o.NeighKey]
	case FDB:
		_, ok = k.fdb[o.FDBKey]
	case Route:
		_, ok = k.dsts[o.Dst]
	}
	return ok
}

// Only returns the part of the state that has the keys in k. The part always contains all
// links and addresses, because they are few and other objects depend on them. It shares
// their maps with s.
func (s State) Only(k Keys) State {
	return State{
		Links: s.Links, Addrs: s.Addrs,
		Neighs: only(s.Neighs, k.neighs), FDB: only(s.FDB, k.fdb), Routes: only(s.Routes, k.dsts),
	}
}

func only[K comparable, V any](m map[K]V, keys map[K]struct{}) map[K]V {
	part := make(map[K]V, len(keys))
	for k := range keys {
		if v, ok := m[k]; ok {
			part[k] = v
		}
	}
	return part
}
