// SPDX-License-Identifier: Apache-2.0

package extension

import (
	"context"
	"path/filepath"
	"strings"

	"github.com/flanneld/flanneld/backend"
)

// Describe implements backend.Backend. The scope contains no devices, because only the commands manage the devices that
// they create.
func (b *Backend) Describe() backend.Description {
	return backend.Description{
		Scope: b.env.Scope(), LeaseType: Type, MTU: b.env.Underlay.MTU, Leftovers: b.host.Leftovers(),
	}
}

// Leftovers returns what commands have done on this host, as one leftover.
func (h *Host) Leftovers() []backend.Leftover { return []backend.Leftover{effects{h}} }

// Recorded returns what the commands of all daemons with this state directory have done, as far as
// their files say.
func Recorded(stateDir string) (all []backend.Leftover, err error) {
	paths, err := filepath.Glob(filepath.Join(stateDir, "flanneld-*-commands.json"))
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), ".json")
		all = append(all, NewHost(Settings{StateDir: stateDir, Name: name}).Leftovers()...)
	}
	return all, err
}

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
