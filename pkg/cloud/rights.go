// SPDX-License-Identifier: Apache-2.0

package cloud

import (
	"errors"
	"slices"
)

// Rights collects the rights that this host lacks. The zero Rights is usable.
type Rights struct{ missing []string }

// Lack adds rights that this host lacks.
func (r *Rights) Lack(names ...string) {
	for _, name := range names {
		if !slices.Contains(r.missing, name) {
			r.missing = append(r.missing, name)
		}
	}
}

// Note records the result of a call that checks a right and changes nothing. If the cloud has
// refused the right, Note adds it to the missing ones and returns nil. If err leaves open whether
// this host has the right, Note returns err. Any other error means that the call was permitted,
// for example that a route does not exist. Note then returns nil.
func (r *Rights) Note(err error) error {
	if missing, ok := errors.AsType[*MissingError](err); ok {
		r.Lack(missing.Permissions...)
		return nil
	}
	if Transient(err) || errors.Is(err, ErrKeys) {
		return err
	}
	return nil
}

// Missing returns a MissingError that names all rights that this host lacks, with the path of the
// page about them. It returns nil if there are none.
func (r *Rights) Missing(page string) error {
	if len(r.missing) == 0 {
		return nil
	}
	return &MissingError{Permissions: r.missing, Page: page}
}
