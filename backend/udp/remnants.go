package udp

import (
	"fmt"

	"flanneld/backend"
	"flanneld/pkg/firewall/nftables"
)

// Remnants implements backend.Leaver: the kernel path is more than its device.
func (b *Backend) Remnants() []backend.Remnant {
	if b.config.Mode == modeUserspace || b.possible() != nil {
		return nil
	}
	return []backend.Remnant{port{b.receiver()}, gate{}}
}

// port is the FOU port, at whichever address: hosts change theirs.
type port struct{ receiver }

func (p port) String() string { return fmt.Sprintf("FOU port %d", p.local.Port()) }

// Present implements backend.Remnant.
func (p port) Present() (bool, error) {
	if fouMissing() != nil {
		return false, nil // then there is none
	}
	ports, err := p.list()
	return len(ports) > 0, err
}

// Remove implements backend.Remnant.
func (p port) Remove() error { return p.remove() }

// gate is who may send to it.
type gate struct{}

func (gate) String() string { return "nftables rules of the backend udp" }

// Present implements backend.Remnant.
func (gate) Present() (bool, error) { return nftables.HasGate() }

// Remove implements backend.Remnant.
func (gate) Remove() error { return nftables.RemoveGate() }
