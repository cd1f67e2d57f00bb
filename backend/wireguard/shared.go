// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/subnet"
)

// A lease has at most maxShared shared endpoints of each family, in a JSON object of at most
// maxSharedSize bytes. A larger object is ignored.
const (
	maxShared     = 32
	maxSharedSize = 4 << 10
)

// maxCandidates is the maximum number of shared endpoints that are tried for one peer.
const maxCandidates = 3

// sharedEndpoint identifies a shared endpoint in a lease, which has at most one for each peer
// and family.
type sharedEndpoint struct {
	peer   wgtypes.Key
	family prefix.Family
}

// sharedEndpoints are the endpoints at which a host sees peers that are behind NAT. The host
// publishes them in its lease, so that other hosts can try them.
type sharedEndpoints map[sharedEndpoint]netip.AddrPort

func (s sharedEndpoints) add(peer wgtypes.Key, endpoint netip.AddrPort) {
	s[sharedEndpoint{peer, prefix.FamilyOf(endpoint.Addr())}] = endpoint
}

// encode returns the JSON object with the endpoints of family f, or nil if there are none.
func (s sharedEndpoints) encode(f prefix.Family) (json.RawMessage, error) {
	texts := map[string]string{}
	for of, endpoint := range s {
		if of.family == f {
			texts[of.peer.String()] = endpoint.String()
		}
	}
	if len(texts) == 0 {
		return nil, nil
	}
	raw, err := json.Marshal(texts) // sorted by key, so that equal endpoints have equal texts
	if err != nil {
		return nil, fmt.Errorf("encode endpoints of peers: %w", err)
	}
	return raw, nil
}

// sharedField is the JSON key of leaseData.PeerEndpoints.
const sharedField = "PeerEndpoints"

// decodeShared adds the shared endpoints in raw, the backend data for family f, to the map into.
// Another host has written the data. So decodeShared skips an endpoint that encode would not write,
// and an endpoint for whose address usable returns false. If there are more than maxShared
// endpoints, or their object is too large, it skips all of them.
func decodeShared(raw json.RawMessage, f prefix.Family, usable func(netip.Addr) bool, into sharedEndpoints) {
	if !bytes.Contains(raw, []byte(sharedField)) { // as in nearly all leases
		return
	}
	var d struct{ PeerEndpoints json.RawMessage }
	if json.Unmarshal(raw, &d) != nil || len(d.PeerEndpoints) > maxSharedSize {
		return
	}
	var texts map[string]string
	if json.Unmarshal(d.PeerEndpoints, &texts) != nil || len(texts) > maxShared {
		return
	}
	for peer, text := range texts {
		key, err := wgtypes.ParseKey(peer)
		if err != nil || key.String() != peer {
			continue
		}
		endpoint, err := netip.ParseAddrPort(text)
		if err != nil || endpoint.String() != text || endpoint.Port() == 0 || prefix.FamilyOf(endpoint.Addr()) != f || !usable(endpoint.Addr()) {
			continue
		}
		into.add(key, endpoint)
	}
}

// sharedIn returns the shared endpoints in lease l for whose addresses usable returns true.
func sharedIn(l subnet.Lease, usable func(netip.Addr) bool) sharedEndpoints {
	shared := sharedEndpoints{}
	for _, e := range l.Endpoints {
		decodeShared(e.Data, prefix.FamilyOf(e.PublicIP), usable, shared)
	}
	return shared
}

// sharedIndex contains the endpoints that other hosts share. The zero sharedIndex is empty.
type sharedIndex struct {
	byLease map[string]sharedEndpoints
	byPeer  map[sharedEndpoint]map[netip.AddrPort]int // number of leases with each endpoint
}

// set replaces the endpoints that a lease shares, and reports whether they have changed.
func (x *sharedIndex) set(lease string, now sharedEndpoints) (changed bool) {
	before := x.byLease[lease]
	if maps.Equal(before, now) {
		return false
	}
	if x.byLease == nil {
		x.byLease, x.byPeer = map[string]sharedEndpoints{}, map[sharedEndpoint]map[netip.AddrPort]int{}
	}
	for of, endpoint := range before {
		if x.byPeer[of][endpoint]--; x.byPeer[of][endpoint] == 0 {
			delete(x.byPeer[of], endpoint)
		}
		if len(x.byPeer[of]) == 0 {
			delete(x.byPeer, of)
		}
	}
	delete(x.byLease, lease)
	for of, endpoint := range now {
		if x.byPeer[of] == nil {
			x.byPeer[of] = map[netip.AddrPort]int{}
		}
		x.byPeer[of][endpoint]++
	}
	if len(now) > 0 {
		x.byLease[lease] = now
	}
	return true
}

// retain removes the endpoints of leases for which keep returns false. It reports whether there
// were any.
func (x *sharedIndex) retain(keep func(lease string) bool) (changed bool) {
	for lease := range x.byLease {
		if !keep(lease) {
			x.set(lease, nil)
			changed = true
		}
	}
	return changed
}

// hosts returns the number of other hosts that share endpoint for a peer. of contains the peer and
// the family of the endpoint.
func (x *sharedIndex) hosts(of sharedEndpoint, endpoint netip.AddrPort) int {
	return x.byPeer[of][endpoint]
}

// candidates returns at most maxCandidates shared endpoints of these families to try for a peer.
// Endpoints that more hosts share come first. Among those that equally many hosts share, the lower
// address comes first, so that the order is the same in each call.
func (x *sharedIndex) candidates(peer wgtypes.Key, families []prefix.Family) []netip.AddrPort {
	var all []netip.AddrPort
	hosts := map[netip.AddrPort]int{}
	for _, f := range families {
		for endpoint, n := range x.byPeer[sharedEndpoint{peer, f}] {
			all, hosts[endpoint] = append(all, endpoint), n
		}
	}
	slices.SortFunc(all, func(a, b netip.AddrPort) int {
		if hosts[a] != hosts[b] {
			return hosts[b] - hosts[a]
		}
		return a.Compare(b)
	})
	return all[:min(len(all), maxCandidates)]
}

// empty reports whether no host shares an endpoint.
func (x *sharedIndex) empty() bool { return len(x.byLease) == 0 }
