// SPDX-License-Identifier: Apache-2.0

package extension

import (
	"context"

	"github.com/flanneld/flanneld/backend"
)

// Leftovers implements backend.Cleaner.
func (b *Backend) Leftovers() []backend.Leftover { return b.host.Leftovers() }

// Leftovers returns what commands have done on this host, as one leftover.
func (h *Host) Leftovers() []backend.Leftover { return []backend.Leftover{effects{h}} }

// effects is what all commands since the boot have done, together with the state file.
type effects struct{ host *Host }

func (effects) String() string { return "what the commands of the backend extension have done" }

// Present implements backend.Leftover. A file that cannot be read counts, so that Retire reports it.
func (e effects) Present() (bool, error) {
	exists, err := e.host.store.exists()
	return exists || err != nil, nil
}

// Remove implements backend.Leftover.
func (e effects) Remove(ctx context.Context) error { return e.host.Retire(ctx) }
