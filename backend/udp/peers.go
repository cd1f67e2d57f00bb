// SPDX-License-Identifier: Apache-2.0

package udp

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/tunnel"
	"github.com/flanneld/flanneld/subnet"
)

// peers contains the peers of this host, for both modes.
type peers struct {
	table   *tunnel.Table            // used by the tunnel in user space
	byLease map[string][]tunnel.Peer // peers in the table, by lease key
}

func newPeers() peers {
	return peers{table: tunnel.NewTable(), byLease: map[string][]tunnel.Peer{}}
}

// apply makes the table contain the peers of set, and returns the changes. A changed peer is
// in both results. If set is not complete, no peer is removed because its lease is missing.
// The cost depends on the number of changed leases, unless set.All is set.
func (p *peers) apply(set backend.Set) (removed, added []tunnel.Peer) {
	visit := func(key string) {
		lease := set.Leases[key]
		if lease == nil && !set.Complete {
			return
		}
		have, want := p.byLease[key], peersOf(lease)
		if slices.Equal(have, want) {
			return
		}
		removed, added = append(removed, have...), append(added, want...)
		if len(want) == 0 {
			delete(p.byLease, key)
		} else {
			p.byLease[key] = want
		}
	}
	if set.All {
		for key := range set.Leases {
			visit(key)
		}
		for _, key := range slices.Collect(maps.Keys(p.byLease)) {
			visit(key)
		}
	} else {
		for _, key := range set.Changed {
			visit(key)
		}
	}
	if len(removed)+len(added) > 0 {
		p.table.Update(removed, added)
	}
	return removed, added
}

// list returns the peers in the table, in any order.
func (p *peers) list() []tunnel.Peer { return slices.Concat(slices.Collect(maps.Values(p.byLease))...) }

// publicAddrs returns the public addresses of peers.
func publicAddrs(peers []tunnel.Peer) []netip.Addr {
	addrs := make([]netip.Addr, len(peers))
	for i, p := range peers {
		addrs[i] = p.Public
	}
	return addrs
}

// peersOf returns one peer for each endpoint of l, or nil if l is nil.
func peersOf(l *subnet.Lease) []tunnel.Peer {
	if l == nil {
		return nil
	}
	var all []tunnel.Peer
	for _, e := range l.Endpoints {
		all = append(all, tunnel.Peer{Subnet: e.Subnet, Public: e.PublicIP})
	}
	return all
}

// objects describes the peers of a lease for the report. All of them are present, because they
// are in memory.
func (p *peers) objects(key string, port int) []backend.ObjectReport {
	var hs []backend.ObjectReport
	for _, peer := range p.byLease[key] {
		hs = append(hs, backend.ObjectReport{Object: fmt.Sprintf("%s in datagrams to %s port %d", peer.Subnet, peer.Public, port), Present: true})
	}
	return hs
}
