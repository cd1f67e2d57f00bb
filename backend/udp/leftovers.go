// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"context"
	"fmt"

	"github.com/flanneld/flanneld/backend"
)

// Leftovers implements backend.Cleaner. It returns the FOU port and the nftables table of the
// kernel path, unless the configuration or the options of this host exclude that path. The
// device is not a leftover, because it belongs to the Scope.
func (b *Backend) Leftovers() []backend.Leftover {
	if b.config.Mode == modeUserspace || b.kernelSupported() != nil {
		return nil
	}
	return []backend.Leftover{portLeftover{b.receiver()}, filterLeftover{}}
}

// portLeftover is the FOU port with the number of the receiver, on any address, because the
// address of the host may have changed.
type portLeftover struct{ receiver }

func (p portLeftover) String() string { return fmt.Sprintf("FOU port %d", p.local.Port()) }

// Present implements backend.Leftover.
func (p portLeftover) Present() (bool, error) {
	if fouMissing() != nil {
		return false, nil // without FOU there is no port
	}
	ports, err := p.list()
	return len(ports) > 0, err
}

// Remove implements backend.Leftover.
func (p portLeftover) Remove(context.Context) error { return p.remove() }

// filterLeftover is the nftables table of a senderFilter.
type filterLeftover struct{}

func (filterLeftover) String() string { return "nftables rules of the backend udp" }

// Present implements backend.Leftover.
func (filterLeftover) Present() (bool, error) {
	exists, _, err := filterState()
	return exists, err
}

// Remove implements backend.Leftover.
func (filterLeftover) Remove(context.Context) error { return removeFilter() }
