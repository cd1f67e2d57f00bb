// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"slices"
	"time"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/prefix"
)

// device is a tunnel with the state that the passes have written to it and read from it.
type device struct {
	tunnel
	userspace       *userspaceDevice // nil if the kernel implements it
	index           int              // index of the interface; if it changes, the device is a new one, without any peers
	peers           map[string]peer  // wanted peers, by lease key
	unwantedRemoved bool             // peers without a lease were removed from this device
	waiting         int              // number of peers that do not have the present preshared key yet

	handshakes handshakes
	seen       observations    // peers behind NAT
	trials     trials          // searches for endpoints of peers without a session
	named      map[string]bool // names of the wanted peers that have one
	read       time.Duration   // when the device was last read, on the steady clock
}

func newDevice(t tunnel) *device {
	return &device{tunnel: t, peers: map[string]peer{}, seen: observations{}, trials: trials{}, named: map[string]bool{}}
}

// serves reports whether the device sends to addresses of family f.
func (d *device) serves(f prefix.Family) bool { return slices.Contains(d.outer, f) }

// setPeers stores what a pass has written. full is set if next contains the wanted peers of all
// leases, and not only those of the changed ones.
func (d *device) setPeers(index int, full bool, set backend.Set, next map[string]peer) {
	d.index = index
	if full {
		d.peers, d.unwantedRemoved = next, set.Complete
		return
	}
	for _, key := range set.Changed {
		delete(d.peers, key)
		if p, ok := next[key]; ok {
			d.peers[key] = p
		}
	}
}

// pass contains the input of one pass over the devices.
type pass struct {
	set  backend.Set
	now  instant
	read bool // every device has to be read
}
