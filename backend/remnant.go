package backend

import "fmt"

// Remnant is a thing in the kernel that a backend makes and no Scope covers,
// because it is no object of the data plane. Its text says what it is; two with
// the same text are the same thing.
type Remnant interface {
	fmt.Stringer
	// Present reports whether the kernel has it.
	Present() (bool, error)
	// Remove removes it. It is no error if it is not there.
	Remove() error
}

// Leaver is implemented by backends that may leave remnants.
type Leaver interface {
	// Remnants returns those that may be there. It is pure.
	Remnants() []Remnant
}

// Remnants returns what b may leave besides what is in its Scope: nothing for
// most backends.
func Remnants(b Backend) []Remnant {
	if l, ok := b.(Leaver); ok {
		return l.Remnants()
	}
	return nil
}
