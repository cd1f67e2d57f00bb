// SPDX-License-Identifier: Apache-2.0

package dataplane

// This file allocates the maps of a large State in one piece.
//
// Reason. A start fills three of them with thousands of objects. A map that grows copies its
// entries several times, and leaves the copies to the garbage collector.
//
// Measurement. The first pass with 5,000 peers on the real kernel, 25 processes with and
// without this file in turn, 2 busy CPUs, medians: 89 ms instead of 94 ms of CPU time, and a
// peak of 30 MB instead of 34 MB of memory.
//
// Invariant. A reserved map has the same content.

import (
	"iter"
	"maps"
)

// StateOf returns the state that contains objects. objects must support repeated
// iteration.
func StateOf(objects iter.Seq[Object]) State {
	var neighs, fdb, routes int
	for o := range objects {
		switch o.(type) {
		case Neigh:
			neighs++
		case FDB:
			fdb++
		case Route:
			routes++
		}
	}
	s := NewState()
	s.Reserve(neighs, fdb, routes)
	for o := range objects {
		s.Add(o)
	}
	return s
}

// Reserve allocates memory for that many more objects of each kind.
func (s *State) Reserve(neighs, fdb, routes int) {
	s.Neighs, s.FDB, s.Routes = roomFor(s.Neighs, neighs), roomFor(s.FDB, fdb), roomFor(s.Routes, routes)
}

// roomFor returns m, or a copy with room for n more entries if n is larger than m.
func roomFor[K comparable, V any](m map[K]V, n int) map[K]V {
	if n <= len(m) {
		return m
	}
	larger := make(map[K]V, len(m)+n)
	maps.Copy(larger, m)
	return larger
}
