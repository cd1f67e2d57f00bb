// SPDX-License-Identifier: Apache-2.0

package subnet

import (
	"net/netip"
	"slices"
	"time"

	"github.com/gaissmai/bart"
)

// knownLease is a lease and the time when the ledger got it, or when Follow last applied a change
// of it.
type knownLease struct {
	*Lease
	since time.Time
}

// detached returns k with a copy of its lease. All leases of one listing are in one block of memory.
// The copy does not keep that block in use.
func (k knownLease) detached() knownLease {
	l := *k.Lease
	return knownLease{&l, k.since}
}

// heldPeers are the peers that a Ledger holds. A changed lease contradicts a held peer by its subnet
// or by its public IP. The peers are indexed by both, so that a changed lease need not be compared
// with all of them. The zero heldPeers has no peers.
type heldPeers struct {
	until map[string]time.Time // end of the hold, by key
	// All times in until lie between earliest and latest, which need not be among them.
	earliest, latest time.Time

	bySubnet   *bart.Table[[]string]   // keys, sorted, by subnet
	byPublicIP map[netip.Addr][]string // keys, sorted, by public IP
	locations  map[location]int        // how many endpoints of all peers of the ledger, held or not, have this location; nil while no peer is held, and before Apply
}

// location is the pair of an endpoint's public IP and subnet. It has nothing to do with the locations
// of hosts, whose names CheckLocation checks.
type location struct {
	public netip.Addr
	subnet netip.Prefix
}

func locationOf(e Endpoint) location { return location{e.PublicIP, e.Subnet} }

// isSpecified reports whether a can be a public address. A lease without a public address has the
// zero Addr, 0.0.0.0 or ::.
func isSpecified(a netip.Addr) bool { return a.IsValid() && !a.IsUnspecified() }

// add holds a peer until the given time. The peer must not be held already.
func (h *heldPeers) add(l *Lease, until time.Time) {
	if len(h.until) == 0 {
		*h = heldPeers{until: map[string]time.Time{}, bySubnet: new(bart.Table[[]string]), byPublicIP: map[netip.Addr][]string{}, earliest: until, latest: until}
	}

	h.until[l.Key] = until
	if until.Before(h.earliest) {
		h.earliest = until
	}
	if until.After(h.latest) {
		h.latest = until
	}

	for _, e := range l.Endpoints {
		h.bySubnet.Modify(e.Subnet, func(keys []string, _ bool) ([]string, bool) { return with(keys, l.Key), false })
		h.byPublicIP[e.PublicIP] = with(h.byPublicIP[e.PublicIP], l.Key)
	}
}

// remove ends the hold of a peer, if it is held.
func (h *heldPeers) remove(l *Lease) {
	if _, held := h.until[l.Key]; !held {
		return
	}
	if len(h.until) == 1 {
		*h = heldPeers{}
		return
	}

	delete(h.until, l.Key)
	for _, e := range l.Endpoints {
		h.bySubnet.Modify(e.Subnet, func(keys []string, _ bool) ([]string, bool) {
			keys = without(keys, l.Key)
			return keys, len(keys) == 0
		})
		if keys := without(h.byPublicIP[e.PublicIP], l.Key); len(keys) > 0 {
			h.byPublicIP[e.PublicIP] = keys
		} else {
			delete(h.byPublicIP, e.PublicIP)
		}
	}
}

// countAll counts the endpoints of all peers of the ledger, if at least one peer is held.
func (h *heldPeers) countAll(peers map[string]knownLease) {
	if len(h.until) == 0 {
		return
	}
	h.locations = make(map[location]int, len(peers))
	for _, p := range peers {
		h.count(p.Lease, 1)
	}
}

// count counts the endpoints of a peer that the ledger has added, with n = 1, or removed, with
// n = -1.
func (h *heldPeers) count(l *Lease, n int) {
	if h.locations == nil {
		return
	}
	for _, e := range l.Endpoints {
		if h.locations[locationOf(e)] += n; h.locations[locationOf(e)] == 0 {
			delete(h.locations, locationOf(e))
		}
	}
}

// contradictedBy returns the sorted keys of held peers that the changed leases in u contradict, by the
// rules of the function contradictions. It does not compare unchanged leases, because Apply and
// earlier calls have compared these. It leaves out peers that the store has again with u.
func (h *heldPeers) contradictedBy(u Update) []string {
	if len(h.until) == 0 {
		return nil
	}

	var found []string
	for _, lease := range u.Changed {
		if lease == nil {
			continue
		}

		for _, e := range lease.Endpoints {
			for _, keys := range h.bySubnet.Supernets(e.Subnet) {
				found = append(found, keys...)
			}
			for _, keys := range h.bySubnet.Subnets(e.Subnet) {
				found = append(found, keys...)
			}
			if isSpecified(e.PublicIP) && h.locations[locationOf(e)] == 0 {
				found = append(found, h.byPublicIP[e.PublicIP]...)
			}
		}
	}

	slices.Sort(found)
	return slices.DeleteFunc(slices.Compact(found), func(key string) bool {
		return u.Changed[key] != nil || slices.Contains(u.Undecodable, key)
	})
}

// shorten limits all times to one TTL from now, because the clock may have been set back.
func (h *heldPeers) shorten(now time.Time) {
	latest := now.Add(TTL)
	if !h.latest.After(latest) {
		return
	}

	for key, until := range h.until {
		if until.After(latest) {
			h.until[key] = latest
		}
	}

	h.latest = latest
	if h.earliest.After(latest) {
		h.earliest = latest
	}
}

// expired returns the keys of the peers whose hold is over. The caller must remove these peers.
func (h *heldPeers) expired(now time.Time) (keys []string) {
	if len(h.until) == 0 || now.Before(h.earliest) {
		return nil
	}

	h.earliest = h.latest
	for key, until := range h.until {
		switch {
		case !now.Before(until):
			keys = append(keys, key)
		case until.Before(h.earliest):
			h.earliest = until
		}
	}
	return keys
}

// with inserts key into the sorted slice keys, unless the slice has it, and returns the result. It may
// change the array of the slice.
func with(keys []string, key string) []string {
	i, found := slices.BinarySearch(keys, key)
	if found { // another endpoint of the same lease has added it
		return keys
	}
	return slices.Insert(keys, i, key)
}

// without removes key from the sorted slice keys, and returns the result. It may change the array of
// the slice.
func without(keys []string, key string) []string {
	if i, found := slices.BinarySearch(keys, key); found {
		return slices.Delete(keys, i, i+1)
	}
	return keys
}
