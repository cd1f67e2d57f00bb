// SPDX-License-Identifier: Apache-2.0

// Package dataplane makes the kernel's network state equal to a wanted state. A State
// describes links, addresses, neighbours, FDB entries and routes. Plan computes the
// changes between two states. A Reconciler applies them, and repeats until no change is
// left. Retire removes the objects of a former configuration. The package reads and changes
// the kernel only through the interface Kernel.
package dataplane

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
)

// Object is a Link, Addr, Neigh, FDB or Route.
type Object interface {
	fmt.Stringer
	// Device returns the name of the device that the object is on. It returns "" for a Link
	// and for a route without a device.
	Device() string

	kind() string
	key() any // identifies the object; all routes to a destination have the same key
	addTo(State)
	removeFrom(State)
	in(State) bool // the state contains exactly this object
	belongsTo(Scope) bool
}

// State is the part of the kernel's network configuration that flanneld manages: either
// as the kernel has it, or as it is wanted. Devices are identified by name and not by
// index.
type State struct {
	Links  map[string]Link
	Addrs  map[Addr]struct{}
	Neighs map[NeighKey]Neigh
	FDB    map[FDBKey]FDB
	// Routes contains the routes of each destination, including duplicates.
	Routes map[netip.Prefix][]Route
}

// NewState returns an empty state.
func NewState() State {
	return State{
		Links:  map[string]Link{},
		Addrs:  map[Addr]struct{}{},
		Neighs: map[NeighKey]Neigh{},
		FDB:    map[FDBKey]FDB{},
		Routes: map[netip.Prefix][]Route{},
	}
}

// StateOf returns a state with the objects of all lists. Its maps have room for them from the start,
// because a map that grows allocates several times what it needs in the end.
func StateOf(lists [][]Object) State {
	var neighs, fdb, routes int
	for _, objects := range lists {
		for _, o := range objects {
			switch o.(type) {
			case Neigh:
				neighs++
			case FDB:
				fdb++
			case Route:
				routes++
			}
		}
	}

	s := NewState()
	s.Neighs = make(map[NeighKey]Neigh, neighs)
	s.FDB = make(map[FDBKey]FDB, fdb)
	s.Routes = make(map[netip.Prefix][]Route, routes)
	for _, objects := range lists {
		s.Add(objects...)
	}
	return s
}

// Add adds objects to the state. An object replaces another one with the same key. A route
// is added beside the other routes to its destination, unless an equal one exists.
func (s State) Add(objects ...Object) {
	for _, o := range objects {
		o.addTo(s)
	}
}

// AddState adds all objects of other, like Add.
func (s State) AddState(other State) {
	maps.Copy(s.Links, other.Links)
	maps.Copy(s.Addrs, other.Addrs)
	maps.Copy(s.Neighs, other.Neighs)
	maps.Copy(s.FDB, other.FDB)
	for r := range other.AllRoutes() {
		s.AddRoute(r)
	}
}

// AddRoute adds one route, like Add.
func (s State) AddRoute(r Route) {
	if routes := s.Routes[r.Dst]; !slices.Contains(routes, r) {
		s.Routes[r.Dst] = append(routes, r)
	}
}

// Remove removes the objects with the same keys as objects, and the routes that equal a
// route in objects.
func (s State) Remove(objects ...Object) {
	for _, o := range objects {
		o.removeFrom(s)
	}
}

// len counts the destinations of routes instead of the routes.
func (s State) len() int {
	return len(s.Links) + len(s.Addrs) + len(s.Neighs) + len(s.FDB) + len(s.Routes)
}

// AllRoutes iterates over the routes of all destinations. The caller may change the state
// during the iteration.
func (s State) AllRoutes() iter.Seq[Route] {
	return func(yield func(Route) bool) {
		for _, routes := range s.Routes {
			for _, r := range routes {
				if !yield(r) {
					return
				}
			}
		}
	}
}

// usesDevices reports false if there are only routes such as unreachable ones.
func (s State) usesDevices() bool {
	for r := range s.AllRoutes() {
		if r.Dev != "" {
			return true
		}
	}
	return false
}

// All iterates over all objects, parents before children.
func (s State) All() iter.Seq[Object] {
	return func(yield func(Object) bool) {
		more := true
		for _, l := range s.Links {
			more = more && yield(l)
		}
		for a := range s.Addrs {
			more = more && yield(a)
		}
		for _, n := range s.Neighs {
			more = more && yield(n)
		}
		for _, e := range s.FDB {
			more = more && yield(e)
		}
		for r := range s.AllRoutes() {
			more = more && yield(r)
		}
	}
}

// serves reports whether the state has o, or an object that differs from it only by what the Reconciler
// leaves as it is.
func (s State) serves(o Object) bool {
	switch o := o.(type) {
	case Link:
		return s.Links[o.Name].same(o)
	case Route:
		return slices.ContainsFunc(s.Routes[o.Dst], func(have Route) bool { return have.same(o) })
	}
	return s.Has(o)
}

// Has reports whether the state contains exactly o.
func (s State) Has(o Object) bool { return o.in(s) }

// Device implements Object.
func (Link) Device() string { return "" }

// Device implements Object.
func (a Addr) Device() string { return a.Dev }

// Device implements Object.
func (n Neigh) Device() string { return n.Dev }

// Device implements Object.
func (f FDB) Device() string { return f.Dev }

// Device implements Object.
func (r Route) Device() string { return r.Dev }

func (Link) kind() string  { return "link" }
func (Addr) kind() string  { return "address" }
func (Neigh) kind() string { return "neighbour" }
func (FDB) kind() string   { return "fdb" }
func (Route) kind() string { return "route" }

func (l Link) key() any  { return l.Name }
func (a Addr) key() any  { return a }
func (n Neigh) key() any { return n.NeighKey }
func (f FDB) key() any   { return f.FDBKey }
func (r Route) key() any { return r.Dst }

func (l Link) in(s State) bool { return s.Links[l.Name] == l }
func (a Addr) in(s State) bool {
	_, ok := s.Addrs[a]
	return ok
}
func (n Neigh) in(s State) bool { return s.Neighs[n.NeighKey] == n }
func (f FDB) in(s State) bool   { return s.FDB[f.FDBKey] == f }
func (r Route) in(s State) bool { return slices.Contains(s.Routes[r.Dst], r) }

func (l Link) addTo(s State)  { s.Links[l.Name] = l }
func (a Addr) addTo(s State)  { s.Addrs[a] = struct{}{} }
func (n Neigh) addTo(s State) { s.Neighs[n.NeighKey] = n }
func (f FDB) addTo(s State)   { s.FDB[f.FDBKey] = f }
func (r Route) addTo(s State) { s.AddRoute(r) }

func (l Link) removeFrom(s State)  { delete(s.Links, l.Name) }
func (a Addr) removeFrom(s State)  { delete(s.Addrs, a) }
func (n Neigh) removeFrom(s State) { delete(s.Neighs, n.NeighKey) }
func (f FDB) removeFrom(s State)   { delete(s.FDB, f.FDBKey) }
func (r Route) removeFrom(s State) {
	routes := s.Routes[r.Dst]
	i := slices.Index(routes, r)
	if i < 0 {
		return
	}
	if len(routes) == 1 {
		delete(s.Routes, r.Dst)
	} else {
		s.Routes[r.Dst] = slices.Concat(routes[:i], routes[i+1:]) // a caller may be iterating over the old slice
	}
}
