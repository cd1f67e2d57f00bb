// SPDX-License-Identifier: Apache-2.0

package main

import "slices"

// bits is a set of small numbers, from 0. Each number takes one bit, because N hosts
// that each know N leases store N² numbers.
type bits []uint64

func (b *bits) set(i int) (changed bool) {
	for len(*b) <= i/64 {
		*b = append(*b, 0)
	}
	before := (*b)[i/64]
	(*b)[i/64] |= 1 << (i % 64)
	return before != (*b)[i/64]
}

func (b *bits) clear(i int) (changed bool) {
	if len(*b) <= i/64 {
		return false
	}
	before := (*b)[i/64]
	(*b)[i/64] &^= 1 << (i % 64)
	return before != (*b)[i/64]
}

func (b bits) has(i int) bool { return b.word(i/64)&(1<<(i%64)) != 0 }

func (b bits) equal(other bits) bool {
	for i := range max(len(b), len(other)) {
		if b.word(i) != other.word(i) {
			return false
		}
	}
	return true
}

// equalWithout reports whether b is equal to other after i is removed from other.
func (b bits) equalWithout(other bits, i int) bool {
	for at := range max(len(b), len(other)) {
		want := other.word(at)
		if at == i/64 {
			want &^= 1 << (i % 64)
		}
		if b.word(at) != want {
			return false
		}
	}
	return true
}

func (b bits) word(i int) uint64 {
	if i < len(b) {
		return b[i]
	}
	return 0
}

func (b bits) clone() bits { return slices.Clone(b) }
