// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"bytes"
	"cmp"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/prefix"
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
)

// observation is the endpoint at which a device sees a peer behind NAT.
type observation struct {
	endpoint netip.AddrPort
	since    time.Duration // when the peer was first seen there, on the steady clock
	last     time.Duration // when a reading last showed a session with the peer
}

// observations contains the peers behind NAT that a device sees.
type observations map[wgtypes.Key]observation

// note updates o with the state of a device at the time now. d contains that state and the wanted
// peers. A peer counts as behind NAT if the device sees it at an endpoint that is not in its lease.
// note leaves out an endpoint for which worth returns false, because other hosts cannot use it. It
// removes a peer that is not wanted any more, or that has had no session for more than sharedFor.
func (o observations) note(now time.Duration, d diff, worth func(netip.AddrPort) bool) {
	for _, h := range d.have.Peers {
		w, wanted := d.want[h.PublicKey]
		endpoint := endpointOf(h)
		if wanted && d.ages[h.PublicKey] > sessionLife {
			continue // the endpoint may still be right; it stays for sharedFor
		}
		if !wanted || endpoint == w.endpoint || endpoint == w.other || !worth(endpoint) {
			delete(o, h.PublicKey)
			continue
		}
		seen, known := o[h.PublicKey]
		if !known || seen.endpoint != endpoint {
			seen = observation{endpoint: endpoint, since: now}
		}
		seen.last = now
		o[h.PublicKey] = seen
	}
	for key, seen := range o {
		if _, wanted := d.want[key]; !wanted || now-seen.last > sharedFor {
			delete(o, key)
		}
	}
}

// sharer decides which endpoints this host shares, and when it writes its lease.
type sharer struct {
	interval time.Duration   // minimum age of a shared endpoint, and minimum time between two writes; 0 shares nothing
	shared   sharedEndpoints // in the lease of this host
	allowed  time.Duration   // time from which the lease may be written again, on the steady clock
	planned  time.Duration   // when the lease will be written; zero if there is nothing to write
	offered  sharedEndpoints // written to the lease next; nil if there is nothing to write yet
}

// pause returns the minimum time between two writes of a host in a network with that many hosts.
func (s *sharer) pause(hosts int) time.Duration {
	return max(s.interval, time.Duration(hosts)*shareTurn)
}

// wanted returns the endpoints that this host should share at the time now, up to maxShared of each
// family. seen contains the observations of each device, and others the endpoints that other hosts
// share.
func (s *sharer) wanted(now time.Duration, seen []observations, others *sharedIndex) sharedEndpoints {
	type choice struct {
		sharedEndpoint
		endpoint netip.AddrPort
		new      bool
		hosts    int // number of other hosts that share endpoint
	}
	byFamily := map[prefix.Family][]choice{}
	for _, device := range seen {
		for key, o := range device {
			c := choice{sharedEndpoint: sharedEndpoint{key, prefix.FamilyOf(o.endpoint.Addr())}, endpoint: o.endpoint}
			before, had := s.shared[c.sharedEndpoint]
			stable := o.last == now && now-o.since >= s.interval
			c.hosts = others.hosts(c.sharedEndpoint, o.endpoint)
			switch {
			case had && (before == o.endpoint || !stable):
				c.endpoint = before // the old endpoint stays until a new one is stable, so that one write is enough
			case stable && c.hosts < enoughHosts:
				c.new = true
			default:
				continue
			}
			byFamily[c.family] = append(byFamily[c.family], c)
		}
	}
	want := sharedEndpoints{}
	for _, all := range byFamily {
		slices.SortFunc(all, func(a, b choice) int {
			if a.new != b.new {
				return map[bool]int{true: 1, false: -1}[a.new]
			}
			return cmp.Or(cmp.Compare(a.hosts, b.hosts), bytes.Compare(a.peer[:], b.peer[:]))
		})
		for _, c := range all[:min(len(all), maxShared)] {
			want[c.sharedEndpoint] = c.endpoint
		}
	}
	return want
}

// offer plans a write of want, which follows from a reading of the devices at the time now.
// When the planned time has come, it offers want to due. again is the time after which offer
// must be called again, after another reading; zero if there is nothing to write. hosts is the
// number of hosts in the network. The planned time is random: hosts that see the same peer
// write at different times, so that the last ones see that enough hosts share its endpoint.
func (s *sharer) offer(now time.Duration, hosts int, want sharedEndpoints) (again time.Duration) {
	s.offered = nil
	if maps.Equal(want, s.shared) {
		s.planned = 0
		return 0
	}
	if s.planned == 0 {
		s.planned = max(now, s.allowed) + rand.N(s.pause(hosts)/2+1)
	}
	if now < s.planned {
		return s.planned - now
	}
	s.offered = want
	return leastReadPause
}

// due reports whether the lease must be written at the time now, because offer has offered new
// content. If so, due stores the content in s.shared. Reading devices with thousands of peers
// takes time, in which other hosts may have shared the endpoints that offer has offered. So due
// drops each endpoint that is new in the lease and that enough other hosts share by now.
func (s *sharer) due(now time.Duration, hosts int, others *sharedIndex) bool {
	if s.offered == nil {
		return false
	}
	want := s.offered
	s.offered, s.planned = nil, 0
	maps.DeleteFunc(want, func(of sharedEndpoint, endpoint netip.AddrPort) bool {
		return s.shared[of] != endpoint && others.hosts(of, endpoint) >= enoughHosts
	})
	if maps.Equal(want, s.shared) {
		return false
	}
	s.shared, s.allowed = want, now+s.pause(hosts)
	return true
}

// worthSharing reports whether other hosts may reach the peer that this host sees at endpoint. own
// is the public address of this host in the family of endpoint. The result is false if own is
// private and endpoint is global: this host is then behind NAT itself, and other hosts may see the
// peer at another endpoint.
func worthSharing(own netip.Addr, endpoint netip.AddrPort) bool {
	return !isGlobal(endpoint.Addr()) || isGlobal(own)
}

// isGlobal reports whether packets to a can cross the internet.
func isGlobal(a netip.Addr) bool {
	carrierNAT := netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64}), 10) // RFC 6598
	return a.IsGlobalUnicast() && !a.IsPrivate() && !carrierNAT.Contains(a)
}
