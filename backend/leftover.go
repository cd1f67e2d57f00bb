// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"fmt"
)

// Leftover is something that a backend creates outside of its Scope: a kernel object of a kind that
// the data plane does not know, or what commands have done. When another configuration replaces that
// of the backend, it stays on the host. String describes it. Two leftovers with the same text are
// the same.
type Leftover interface {
	fmt.Stringer
	// Present reports whether it exists.
	Present() (bool, error)
	// Remove removes it. It returns nil if it does not exist. If ctx ends before, Remove returns an
	// error, and the next call continues.
	Remove(ctx context.Context) error
}
