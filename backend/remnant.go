// SPDX-License-Identifier: Apache-2.0

package backend

import "fmt"

// Remnant is an object in the kernel that a backend creates outside of its Scope, because
// the data plane does not know such objects. String describes it. Two remnants with the
// same text are the same object.
type Remnant interface {
	fmt.Stringer
	// Present reports whether the kernel has it.
	Present() (bool, error)
	// Remove removes it. It returns nil if the object does not exist.
	Remove() error
}

// Leaver is implemented by backends that may leave remnants.
type Leaver interface {
	// Remnants returns the remnants that may exist. It is pure.
	Remnants() []Remnant
}

// Remnants returns the remnants of b, or nil if b is not a Leaver.
func Remnants(b Backend) []Remnant {
	if l, ok := b.(Leaver); ok {
		return l.Remnants()
	}
	return nil
}
