// SPDX-License-Identifier: Apache-2.0

package backend

import "fmt"

// Leftover is a kernel object of a kind that the data plane does not know, so the backend creates
// it outside of its Scope. When another configuration replaces that of the backend, the object
// stays in the kernel. String describes the object. Two leftovers with the same text are the same
// object.
type Leftover interface {
	fmt.Stringer
	// Present reports whether the object exists in the kernel.
	Present() (bool, error)
	// Remove removes the object from the kernel. It returns nil if the object does not exist.
	Remove() error
}

// Cleaner is implemented by backends that may have leftovers.
type Cleaner interface {
	// Leftovers returns the leftovers that may exist. It is pure.
	Leftovers() []Leftover
}

// Leftovers returns the leftovers of b, or nil if b is not a Cleaner.
func Leftovers(b Backend) []Leftover {
	if c, ok := b.(Cleaner); ok {
		return c.Leftovers()
	}
	return nil
}
