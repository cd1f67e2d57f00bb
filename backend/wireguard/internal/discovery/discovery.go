// SPDX-License-Identifier: Apache-2.0

// Package discovery decides at which endpoints WireGuard peers are tried, which endpoints this host
// shares in its lease, and when the devices have to be read again, because the kernel announces neither
// sessions nor endpoints. It reads no device and no clock, and looks up no name: all of that is input.
// The scripts in testdata show what it decides.
//
// In this package a session is one of WireGuard: the keys that two hosts agree on in a handshake and use
// for at most 3 minutes. A peer is in one of four states:
//
//	        handshake at the endpoint of its lease
//	  +-----------------------------------------------> direct
//	  |                                                   |
//	searching <-----------------------------------------+-+
//	  |  ^        no handshake for 3 minutes            |
//	  |  |                                              |
//	  |  +-- the next endpoint in turn                  |
//	  |                                                 |
//	  +----> hidden ----------------------> shared -----+
//	          handshake at another      for the interval at one endpoint,
//	          endpoint: behind NAT      and fewer than 3 other hosts share it
//
// A searched peer gets in turn the endpoint of its lease, the addresses of its name, and what other
// hosts share (see trial). The endpoint of a peer with a session stays as it is. A shared endpoint stays in
// the lease for 10 minutes after the last session.
package discovery

import (
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/flanneld/flanneld/pkg/base/endpoint"
	"github.com/flanneld/flanneld/pkg/base/least"
	"github.com/flanneld/flanneld/pkg/base/prefix"
	"github.com/flanneld/flanneld/subnet"
)

const (
	// SessionLife is the time after its handshake during which a session may be used
	// (REJECT_AFTER_TIME of the protocol, section 6.1 of its white paper).
	SessionLife = 180 * time.Second
	// Never is the age of a handshake that has not happened.
	Never = time.Duration(math.MaxInt64)
	// LeastPause is the shortest time between two planned readings. The trials of many peers end at
	// different times, but each reading returns all peers, so one reading should serve several trials.
	LeastPause = time.Second
	// mostPause is the longest time between two readings while there are peers behind NAT, peers with
	// names, or endpoints that other hosts share.
	mostPause = time.Minute
	// newsPause is the longest time until the devices are read after another host has changed the
	// endpoints that it shares. They are not read at once, because many hosts may change these at the same
	// time, and one reading is enough for all of them.
	newsPause = 10 * time.Second
)

// Config is what Discovery knows of this host.
type Config struct {
	// Interval is the minimum age of a shared endpoint, and the minimum time between two changes of the
	// lease. With 0, this host shares nothing, and does not try what others share.
	Interval time.Duration
	// Devices contains for each device the families of the outer packets that it sends.
	Devices [][]prefix.Family
	// Reachable reports whether another host can have an address.
	Reachable func(netip.Addr) bool
	// Public returns the published address of this host in a family, or the zero Addr.
	Public func(prefix.Family) netip.Addr
	// Broadcasts returns the broadcast addresses of the networks of this host. Any host can name one as an
	// endpoint, and WireGuard would send handshakes to it.
	Broadcasts func() []netip.Addr
	// Random returns a random time below the argument.
	Random func(time.Duration) time.Duration
}

// Peer is a peer that a device should have.
type Peer struct {
	Key      wgtypes.Key
	Endpoint netip.AddrPort // of its lease
	Other    netip.AddrPort // of the other family in its lease; zero unless the device sends to both families
	Name     endpoint.Named // with a port; zero if the host has no name
	Allowed  []netip.Prefix // its subnets, which do not matter here
}

// String describes p in the words of wg(8).
func (p Peer) String() string {
	return fmt.Sprintf("peer %s endpoint %s allowed ips %v", p.Key, p.Endpoint, p.Allowed)
}

// Peers contains peers by their public keys.
type Peers map[wgtypes.Key]Peer

// Discovery is the state. Its methods may not be called concurrently.
type Discovery struct {
	config  Config
	devices []device
	names   map[string]*name
	lookups map[string][]netip.Addr // see Lookups
	look    time.Duration           // see Plan

	shared  Endpoints            // in the lease of this host
	others  map[string]Endpoints // shared by other leases, by their keys; only leases that share something
	index   index                // of others; nil if it is out of date
	hosts   int                  // number of other leases
	news    bool                 // others has changed since the last reading
	planned time.Duration        // when the lease will be written; zero if there is nothing to write
	allowed time.Duration        // when the lease may be written again
	ripe    bool                 // the next call of Publish may write the lease
}

// device is what the last reading has shown of a device.
type device struct {
	read  Instant // zero before the first reading
	peers map[wgtypes.Key]*peer
}

// peer is what the readings have shown of a peer.
type peer struct {
	handshake handshake
	seen      sighting
	trial     *trial // nil unless the peer is searched
}

// New returns the state at the start, at a time on the steady clock. shared is what the lease of this host
// shares, so that a restart does not withdraw it.
func New(c Config, shared Endpoints, now time.Duration) *Discovery {
	d := &Discovery{config: c, shared: shared, names: map[string]*name{}, lookups: map[string][]netip.Addr{}, others: map[string]Endpoints{}}
	for _, families := range c.Devices {
		peers := map[wgtypes.Key]*peer{}
		for of, endpoint := range shared {
			if slices.Contains(families, of.Family) {
				peers[of.Peer] = &peer{seen: sighting{endpoint: endpoint, since: now, last: now}}
			}
		}
		d.devices = append(d.devices, device{peers: peers})
	}
	return d
}

// Hear takes what other hosts share from their leases. It visits only the changed leases or, if all is
// set, all of them.
func (d *Discovery) Hear(leases map[string]*subnet.Lease, changed []string, all bool) {
	d.hosts = len(leases)
	if d.config.Interval == 0 {
		return
	}
	if all {
		changed = slices.Concat(slices.Collect(maps.Keys(leases)), slices.Collect(maps.Keys(d.others)))
	}

	for _, key := range changed {
		var shared Endpoints
		if l := leases[key]; l != nil {
			shared = SharedIn(*l, d.config.Reachable)
		}
		if maps.Equal(d.others[key], shared) {
			continue
		}

		d.news = true
		d.index = nil
		delete(d.others, key)
		if len(shared) > 0 {
			d.others[key] = shared
		}
	}
}

// Meet looks up the new names of peers in changed leases. A reading does that for all peers.
func (d *Discovery) Meet(now time.Duration, peers Peers) {
	for _, p := range peers {
		if d.names[p.Name.Host] == nil {
			d.ask(now, p.Name.Host)
		}
	}
}

// Observe takes a reading of a device: the peers that it has and should have. complete reports whether all
// leases of the store are known, so that other peers are gone. ages contains the time since the last handshake
// with each peer that the device has. try contains the endpoints of peers without a session, if there are
// others than that of the lease.
func (d *Discovery) Observe(now Instant, number int, have []wgtypes.Peer, want Peers, complete bool) (ages map[wgtypes.Key]time.Duration, try map[wgtypes.Key]netip.AddrPort) {
	v := &d.devices[number]
	ages = make(map[wgtypes.Key]time.Duration, len(have))
	try = map[wgtypes.Key]netip.AddrPort{}
	peers := make(map[wgtypes.Key]*peer, len(have))
	for _, h := range have {
		p := v.peers[h.PublicKey]
		if p == nil {
			p = &peer{}
		}

		peers[h.PublicKey] = p
		age := p.handshake.age(v.read, now, h.LastHandshakeTime)
		ages[h.PublicKey] = age

		w, wanted := want[h.PublicKey]
		if complete && d.config.Interval != 0 {
			p.seen.note(now.Steady, EndpointOf(h), w, wanted, age <= SessionLife, d.worthSharing)
		}
		if !wanted || age <= SessionLife {
			p.trial = nil
			continue
		}
		p.trial = p.trial.next(now.Steady, d.candidates(now.Steady, number, w), h.TransmitBytes)
		if p.trial != nil {
			try[w.Key] = p.trial.endpoint()
		}
	}

	for key, w := range want {
		if n := d.name(w.Name.Host); n != nil {
			n.wanted = now.Steady
		}
		if peers[key] == nil {
			d.ask(now.Steady, w.Name.Host)
		}
	}

	for key, p := range v.peers {
		_, wanted := want[key]
		// A new device has no peers, and at a start the leases may be unknown.
		if peers[key] == nil && p.seen.fresh(now.Steady) && (wanted || !complete) {
			peers[key] = &peer{seen: p.seen}
		}
	}

	v.read = now
	v.peers = peers
	return ages, try
}

// Plan ends a pass without an error. read reports whether all devices were read, and wrote whether a
// peer was added or changed: it may be behind NAT. Plan returns when the devices have to be read again; zero
// if there is no need.
func (d *Discovery) Plan(now time.Duration, read, wrote, complete bool) (look time.Duration) {
	needed := wrote && d.config.Interval != 0 || len(d.names) > 0
	if read {
		d.look = 0
		d.news = false
		maps.DeleteFunc(d.names, func(_ string, n *name) bool { return n.wanted != now })
		if complete && d.config.Interval != 0 {
			d.planShare(now)
		}

		needed = needed || len(d.others) > 0
		for _, v := range d.devices {
			for _, p := range v.peers {
				needed = needed || p.seen.endpoint.IsValid()
				if p.trial != nil {
					d.lookWithin(now, max(p.trial.until-now, 1))
				}
			}
		}
	}

	if d.news {
		d.lookWithin(now, min(newsPause, d.pause()))
	}
	if needed {
		d.lookWithin(now, d.pause())
	}
	return d.look
}

func (d *Discovery) lookWithin(now, pause time.Duration) {
	d.look = least.Of(d.look, now+pause)
}

// pause is the longest time between two readings while they are needed.
func (d *Discovery) pause() time.Duration {
	if d.config.Interval == 0 {
		return mostPause
	}
	return min(mostPause, d.turn()/2)
}

// candidates returns the endpoints to try for w, a peer without a session: that of its lease, the
// addresses of its name, and then what other hosts share.
func (d *Discovery) candidates(now time.Duration, device int, w Peer) []netip.AddrPort {
	families := d.config.Devices[device]
	var all []netip.AddrPort
	for _, a := range d.ask(now, w.Name.Host) {
		if slices.Contains(families, prefix.FamilyOf(a)) && d.config.Reachable(a) {
			all = append(all, netip.AddrPortFrom(a, w.Name.Port))
		}
	}

	for _, shared := range d.counts().candidates(w.Key, families) {
		if !slices.Contains(all, shared) {
			all = append(all, shared)
		}
	}
	if len(all) > 0 {
		broadcasts := d.config.Broadcasts()
		all = slices.DeleteFunc(all, func(e netip.AddrPort) bool { return e == w.Endpoint || slices.Contains(broadcasts, e.Addr()) })
	}
	return slices.Insert(all, 0, w.Endpoint)
}

// EndpointOf returns the endpoint of a peer in a device; zero if it has none.
func EndpointOf(h wgtypes.Peer) netip.AddrPort {
	if h.Endpoint == nil {
		return netip.AddrPort{}
	}
	a := h.Endpoint.AddrPort()
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}
