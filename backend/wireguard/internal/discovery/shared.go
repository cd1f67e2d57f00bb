// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"bytes"
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/base/prefix"
)

const (
	// enoughHosts is the number of hosts that should share an endpoint of a peer. More would not help.
	enoughHosts = 3
	// sharedFor is the time for which an endpoint stays in the lease after the last session with
	// the peer. So a peer that restarts causes no write.
	sharedFor = 10 * time.Minute
	// shareTurn, times the number of hosts in the network, is a minimum of the time between two writes
	// of one host. All hosts watch all leases, so otherwise the number of events in a second would
	// grow with the square of the number of hosts.
	shareTurn = 30 * time.Millisecond
	// maxCandidates is the maximum number of shared endpoints that are tried for one peer.
	maxCandidates = 3
)

// sighting is the endpoint at which a device sees a peer behind NAT; zero if it sees none.
type sighting struct {
	endpoint netip.AddrPort
	since    time.Duration // when the peer was first seen there
	last     time.Duration // when a reading last showed a session with the peer
}

// note takes what a reading shows of a peer. It is behind NAT if its session has an endpoint that is
// not in its lease.
func (s *sighting) note(now time.Duration, endpoint netip.AddrPort, w Peer, wanted, session bool, worth func(netip.AddrPort) bool) {
	switch {
	case wanted && !session && s.fresh(now): // the endpoint may still be right
	case !wanted, !session, endpoint == w.Endpoint, endpoint == w.Other, !worth(endpoint):
		*s = sighting{}
	case s.endpoint != endpoint:
		*s = sighting{endpoint, now, now}
	default:
		s.last = now
	}
}

func (s *sighting) fresh(now time.Duration) bool {
	return s.endpoint.IsValid() && now-s.last <= sharedFor
}

func (d *Discovery) turn() time.Duration {
	return max(d.config.Interval, time.Duration(d.hosts)*shareTurn)
}

// planShare plans a write of the lease if this host should share something else than it does. When the
// time has come, Publish decides again.
func (d *Discovery) planShare(now time.Duration) {
	d.ripe = false
	if maps.Equal(d.wanted(), d.shared) {
		d.planned = 0
		return
	}

	// Hosts that see the same peer write at random times, so that the last ones see that enough hosts
	// share its endpoint.
	if d.planned == 0 {
		d.planned = max(now, d.allowed) + d.config.Random(d.turn()/2+1)
	}
	d.ripe = now >= d.planned
	d.lookWithin(now, max(d.planned-now, LeastPause))
}

// Publish returns what this host shares in its lease from now on. changed is false if that is the same as
// before. Call it before the devices are read, and only with all leases: reading devices with thousands of
// peers takes time, in which other hosts may begin to share the same endpoints.
func (d *Discovery) Publish(now time.Duration) (shared Endpoints, changed bool) {
	if !d.ripe {
		return d.shared, false
	}
	d.ripe = false
	d.planned = 0

	want := d.wanted()
	if maps.Equal(want, d.shared) {
		return d.shared, false
	}
	d.shared = want
	d.allowed = now + d.turn()
	return want, true
}

// wanted returns the endpoints that this host should share after the last reading.
func (d *Discovery) wanted() Endpoints {
	type choice struct {
		Of
		endpoint netip.AddrPort
		rank     int // 1 for an endpoint that is not shared yet
		hosts    int // number of other hosts that share endpoint
	}

	byFamily := map[prefix.Family][]choice{}
	for _, v := range d.devices {
		for key, p := range v.peers {
			s := p.seen
			if !s.endpoint.IsValid() {
				continue
			}

			c := choice{Of: Of{key, prefix.FamilyOf(s.endpoint.Addr())}, endpoint: s.endpoint}
			before, had := d.shared[c.Of]
			stable := s.last == v.read.Steady && s.last-s.since >= d.config.Interval
			c.hosts = d.counts()[c.Of][s.endpoint]

			switch {
			case had && (before == s.endpoint || !stable):
				c.endpoint = before // the old endpoint stays until a new one is stable, so that one write is enough
			case stable && c.hosts < enoughHosts:
				c.rank = 1
			default:
				continue
			}
			byFamily[c.Family] = append(byFamily[c.Family], c)
		}
	}

	want := Endpoints{}
	for _, all := range byFamily {
		slices.SortFunc(all, func(a, b choice) int {
			return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.hosts, b.hosts), bytes.Compare(a.Peer[:], b.Peer[:]))
		})
		for _, c := range all[:min(len(all), maxShared)] {
			want[c.Of] = c.endpoint
		}
	}
	return want
}

// worthSharing reports whether other hosts may reach the peer at endpoint. A host with a private address
// is behind NAT itself, and others may see the peer at another global endpoint.
func (d *Discovery) worthSharing(endpoint netip.AddrPort) bool {
	a := endpoint.Addr()
	return d.config.Reachable(a) && (!isGlobal(a) || isGlobal(d.config.Public(prefix.FamilyOf(a))))
}

// isGlobal reports whether packets to a can cross the internet.
func isGlobal(a netip.Addr) bool {
	carrierNAT := netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64}), 10) // RFC 6598
	return a.IsGlobalUnicast() && !a.IsPrivate() && !carrierNAT.Contains(a)
}

// index contains for each endpoint that other hosts share how many do.
type index map[Of]map[netip.AddrPort]int

// counts returns the index of what other hosts share now. It builds the index at the first call after a change.
func (d *Discovery) counts() index {
	if d.index != nil {
		return d.index
	}

	x := index{}
	d.index = x
	for _, shared := range d.others {
		for of, endpoint := range shared {
			if x[of] == nil {
				x[of] = map[netip.AddrPort]int{}
			}
			x[of][endpoint]++
		}
	}
	return x
}

// candidates returns the shared endpoints to try for a peer, first those that most hosts share.
func (x index) candidates(peer wgtypes.Key, families []prefix.Family) []netip.AddrPort {
	var all []netip.AddrPort
	hosts := map[netip.AddrPort]int{}
	for _, f := range families {
		for endpoint, n := range x[Of{peer, f}] {
			all = append(all, endpoint)
			hosts[endpoint] = n
		}
	}
	slices.SortFunc(all, func(a, b netip.AddrPort) int {
		return cmp.Or(cmp.Compare(hosts[b], hosts[a]), a.Compare(b)) // the same order in each call
	})
	return all[:min(len(all), maxCandidates)]
}
