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
	// enoughHosts is the number of hosts that share the endpoint of a peer. More would not help.
	enoughHosts = 3
	// sharedFor is the time for which an endpoint stays in the lease after the last session with
	// the peer. A peer that restarts causes no write.
	sharedFor = 10 * time.Minute
	// shareTurn is the minimum interval of the writes of one host, for each host in the network. All
	// watch every lease, so the number of events must not grow with the square of the hosts.
	shareTurn = 30 * time.Millisecond
)

// observation is the endpoint at which a device sees a peer behind NAT.
type observation struct {
	endpoint netip.AddrPort
	since    time.Duration // when the peer was first seen there, on the steady clock
	last     time.Duration // when it last had a session
}

// observations contains the peers behind NAT that a device sees.
type observations map[wgtypes.Key]observation

// note updates o with the state of a device at the time now. d has the wanted peers, and worth
// reports whether other hosts can use an endpoint.
func (o observations) note(now time.Duration, d diff, worth func(netip.AddrPort) bool) {
	for _, h := range d.have.Peers {
		w, wanted := d.want[h.PublicKey]
		endpoint := endpointOf(h)
		if wanted && d.ages[h.PublicKey] > sessionLife {
			continue // for a while the endpoint may still be right
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

// published is what this host publishes in its lease besides its key and its port.
type published struct {
	shared sharedEndpoints
	relays map[prefix.Family]relayLists // by the first family of the device; only those that are not empty
}

// sharer decides which endpoints this host shares, and when it writes its lease.
type sharer struct {
	interval time.Duration // minimum age of a shared endpoint, and minimum time between two writes; 0 shares nothing
	published
	allowed time.Duration // when the lease may be written again, on the steady clock
	planned time.Duration // when it will be; zero if there is nothing to write
	urgent  bool          // the write is planned because of relays
	offered *published    // written to the lease next; nil if there is nothing to write yet
}

// pause returns the minimum time between two writes of a host in a network with that many hosts.
func (s *sharer) pause(hosts int) time.Duration {
	return max(s.interval, time.Duration(hosts)*shareTurn)
}

// wanted returns the endpoints that this host should share at the time now.
func (s *sharer) wanted(now time.Duration, seen []observations, others *sharedIndex) sharedEndpoints {
	type choice struct {
		sharedEndpoint
		endpoint netip.AddrPort
		new      bool
		hosts    int // others that share it
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
				c.endpoint = before // it may still be right, and is replaced in one write
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

// offer offers want, which the devices have shown at the time now, when it is the turn of this host to
// write. again is the time after which to ask again; zero if there is nothing to write. Hosts that see the
// same peer write at different times, so that the last ones see that there are enough. Pods wait for lists
// about relays, so these are written as soon as the number of hosts allows.
func (s *sharer) offer(now time.Duration, hosts int, want published) (again time.Duration) {
	s.offered = nil
	urgent := !maps.EqualFunc(want.relays, s.relays, relayLists.equal)
	if !urgent && maps.Equal(want.shared, s.shared) {
		s.planned = 0
		return 0
	}
	if s.planned == 0 || urgent && !s.urgent {
		spread := s.pause(hosts) / 2
		if urgent {
			spread = min(spread, time.Duration(hosts)*shareTurn)
		}
		turn := max(now, s.allowed) + rand.N(spread+1)
		if s.planned == 0 || turn < s.planned { // lists about relays do not postpone a write
			s.planned = turn
		}
		s.urgent = urgent
	}
	if now < s.planned {
		return s.planned - now
	}
	s.offered = &want
	return leastReadPause
}

// due reports whether the lease has to be written at the time now. It then has s.published. Reading
// devices with thousands of peers takes time, in which other hosts may have shared the endpoints that were
// offered. So due decides again, by what others share now, about those that the lease does not have.
func (s *sharer) due(now time.Duration, hosts int, others *sharedIndex) bool {
	if s.offered == nil {
		return false
	}
	want := *s.offered
	s.offered, s.planned = nil, 0
	maps.DeleteFunc(want.shared, func(of sharedEndpoint, endpoint netip.AddrPort) bool {
		return s.shared[of] != endpoint && others.hosts(of, endpoint) >= enoughHosts
	})
	if maps.EqualFunc(want.relays, s.relays, relayLists.equal) && maps.Equal(want.shared, s.shared) {
		return false
	}
	s.published, s.allowed = want, now+s.pause(hosts)
	return true
}

// worthSharing reports whether other hosts may reach a peer at endpoint. own is the public address of
// this host in that family. A host with a private address, which sees a peer at a global one, is behind
// NAT itself: another host may see the peer elsewhere.
func worthSharing(own netip.Addr, endpoint netip.AddrPort) bool {
	return !isGlobal(endpoint.Addr()) || isGlobal(own)
}

// isGlobal reports whether packets to a can cross the internet.
func isGlobal(a netip.Addr) bool {
	carrierNAT := netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64}), 10) // RFC 6598
	return a.IsGlobalUnicast() && !a.IsPrivate() && !carrierNAT.Contains(a)
}
