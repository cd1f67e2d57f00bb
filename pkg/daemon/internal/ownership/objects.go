// SPDX-License-Identifier: Apache-2.0

// Package ownership tells which kernel objects belong to a configuration, and lets only one network on
// a host use a device. It removes the objects of former configurations.
package ownership

import (
	"context"
	"fmt"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/kernel/dataplane"
)

// Objects describes which kernel objects a configuration can have led to: those in the scope of
// its backend, and others that the backend names. It tells what an earlier configuration may
// have left in the kernel.
type Objects struct {
	Scope     dataplane.Scope
	Leftovers []backend.Leftover
}

// Of returns the objects of a backend.
func Of(be backend.Backend) Objects { return Objects{be.Scope(), be.Describe().Leftovers} }

// Covers reports whether o includes everything in other.
func (o Objects) Covers(other Objects) bool {
	return o.Scope.Covers(other.Scope) && len(o.Beyond(other)) == 0
}

// Beyond returns the leftovers that only other has.
func (o Objects) Beyond(other Objects) []backend.Leftover {
	return slices.DeleteFunc(slices.Clone(other.Leftovers), func(l backend.Leftover) bool {
		return slices.ContainsFunc(o.Leftovers, func(own backend.Leftover) bool { return own.String() == l.String() })
	})
}

// discard removes the leftovers that exist, and returns their number. It stops at the first error.
func discard(ctx context.Context, leftovers []backend.Leftover) (removed int, err error) {
	for _, r := range leftovers {
		present, err := r.Present()
		if err == nil && present {
			removed++
			err = r.Remove(ctx)
		}
		if err != nil {
			return removed, fmt.Errorf("remove %s: %w", r, err)
		}
	}
	return removed, nil
}
