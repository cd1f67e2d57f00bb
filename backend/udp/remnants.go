// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"fmt"

	"github.com/flanneld/flanneld/backend"
)

// Remnants implements backend.Leaver. Besides its device the kernel path has a port and a
// filter.
func (b *Backend) Remnants() []backend.Remnant {
	if b.config.Mode == modeUserspace || b.possible() != nil {
		return nil
	}
	return []backend.Remnant{port{b.receiver()}, filterTableLeftover{}}
}

// port is the FOU port, on any address, because a host's address may change.
type port struct{ receiver }

func (p port) String() string { return fmt.Sprintf("FOU port %d", p.local.Port()) }

// Present implements backend.Remnant.
func (p port) Present() (bool, error) {
	if fouMissing() != nil {
		return false, nil // without FOU there is no port
	}
	ports, err := p.list()
	return len(ports) > 0, err
}

// Remove implements backend.Remnant.
func (p port) Remove() error { return p.remove() }

// filterTableLeftover is the nftables table of a senderFilter.
type filterTableLeftover struct{}

func (filterTableLeftover) String() string { return "nftables rules of the backend udp" }

// Present implements backend.Remnant.
func (filterTableLeftover) Present() (bool, error) {
	exists, _, err := filterState()
	return exists, err
}

// Remove implements backend.Remnant.
func (filterTableLeftover) Remove() error { return removeFilter() }
