// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/flanneld/flanneld/backend"
	"github.com/flanneld/flanneld/pkg/prefix"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
)

const (
	// mostReadPause is the longest time between two readings of a device while there are peers
	// behind NAT, peers with names, or notes about relays. The kernel announces neither sessions
	// nor endpoints.
	mostReadPause = time.Minute
	// newsPause is the time until the devices are read after another host has changed the endpoints that it
	// shares, or its data about relays. Many hosts may change these at once, and one reading serves all.
	newsPause = 10 * time.Second
)

// nat finds the endpoints of peers that are behind NAT. A host shares in its lease the endpoints at
// which it sees such peers, and tries the endpoints that other hosts share.
type nat struct {
	shared    sharedIndex
	sharer    sharer
	republish wait.Signal
	news      bool          // the endpoints that other hosts share have changed since the devices were read
	readBy    time.Duration // when to read the devices again, on the steady clock; zero if there is no need
}

// newNAT returns the state at the start of the network. It begins with the shared endpoints and the
// relay lists in the own lease, so that a restart does not withdraw them. It also stores these in
// the devices and in Backend.published.
func (n *network) newNAT(own subnet.Lease) nat {
	now := n.now().steady
	before := n.publishes(own.Claim())
	for of, endpoint := range before.shared {
		for _, d := range n.devices {
			if d.serves(of.family) {
				d.seen[of.peer] = observation{endpoint: endpoint, since: now, last: now}
			}
		}
	}
	for _, d := range n.devices {
		d.relaying.published = before.relays[d.families[0]]
	}
	n.Backend.published.Store(&before)
	interval := time.Duration(n.config.EndpointSharingInterval) * time.Second
	return nat{sharer: sharer{interval: interval, published: before}, republish: wait.NewSignal()}
}

// Republish implements backend.Publisher.
func (n *network) Republish() <-chan struct{} { return n.nat.republish }

// Published implements backend.Publisher. There is nothing to do after a write.
func (*network) Published(subnet.Claim) {}

// noteShared stores what the leases of set share, and what they say about relays. It visits only
// the changed leases, unless any lease may differ or the last pass has failed.
func (n *network) noteShared(set backend.Set) {
	if n.nat.sharer.interval == 0 {
		return
	}
	own := n.key.PublicKey()
	note := func(key string) {
		var now sharedEndpoints
		l, ok := set.Leases[key]
		if ok {
			now = sharedIn(*l, n.env.Reachable)
		}
		n.nat.news = n.nat.shared.set(key, now) || n.nat.news
		for _, d := range n.devices {
			var now relayNote
			if ok && n.usesRelays() {
				now = newRelayNote(d.tunnel, *l, own)
			}
			d.relaying.note(key, now)
		}
	}
	if !set.All && !n.failed { // a failed pass may have ended before it visited its changes
		for _, key := range set.Changed {
			note(key)
		}
		return
	}
	for key := range set.Leases {
		note(key)
	}
	present := func(key string) bool { return set.Leases[key] != nil }
	n.nat.news = n.nat.shared.retain(present) || n.nat.news
	for _, d := range n.devices {
		d.relaying.news = d.relaying.notes.retain(present) || d.relaying.news
	}
}

// readingDue reports whether the time nat.readBy has come. The devices must then be read because of
// peers behind NAT, names or relays. now is the time on the steady clock.
func (n *network) readingDue(now time.Duration) bool { return n.nat.readBy != 0 && now >= n.nat.readBy }

// candidates returns the endpoints to try for p, a peer of d that has no session: first the
// addresses of its name, then the endpoints that other hosts share. It also makes the resolver look
// up the name again.
func (n *network) candidates(d *device, p peer) []netip.AddrPort {
	var all []netip.AddrPort
	if !p.named.IsZero() {
		for _, a := range n.names.addrs(p.named.Host) {
			if d.serves(prefix.FamilyOf(a)) && n.env.Reachable(a) {
				all = append(all, netip.AddrPortFrom(a, p.named.Port))
			}
		}
	}
	for _, shared := range n.nat.shared.candidates(p.key, d.outer) {
		if !slices.Contains(all, shared) {
			all = append(all, shared)
		}
	}
	return all
}

// noteNames stores the names of the wanted peers in d.named. It also makes the resolver look up the
// names of peers that are not on the device yet, because there is no session with them.
func (n *network) noteNames(d *device, c diff) {
	fresh := map[string]bool{} // names of peers that are not on the device yet
	for _, p := range c.want {
		if !p.named.IsZero() {
			d.named[p.named.Host], fresh[p.named.Host] = true, true
		}
	}
	if len(fresh) == 0 {
		return
	}
	for _, h := range c.have.Peers {
		delete(fresh, c.want[h.PublicKey].named.Host)
	}
	for host := range fresh {
		n.names.addrs(host)
	}
}

// worthSharing reports whether other hosts may reach the peer that this host sees at endpoint.
func (n *network) worthSharing(endpoint netip.AddrPort) bool {
	own, _ := n.env.Underlay.Family(prefix.FamilyOf(endpoint.Addr()))
	return n.env.Reachable(endpoint.Addr()) && worthSharing(own.Public, endpoint)
}

// offer decides whether this host should change what it publishes. It must be called after a pass
// that has read all devices. It returns the time after which another pass must read the devices and
// call offer again; zero if there is nothing to change or the set is not complete.
func (n *network) offer(p pass) (again time.Duration) {
	s := &n.nat.sharer
	if s.interval == 0 || !p.set.Complete {
		return 0
	}
	var seen []observations
	want := published{relays: map[prefix.Family]relayLists{}}
	for _, d := range n.devices {
		seen = append(seen, d.seen)
		if lists := d.relaying.wanted(p.now.steady, s.interval); !lists.empty() {
			want.relays[d.families[0]] = lists
		}
	}
	want.shared = s.wanted(p.now.steady, seen, &n.nat.shared)
	return s.offer(p.now.steady, len(p.set.Leases), want)
}

// share publishes the change in sharer.offered, if there is one, unless other hosts have made it
// unnecessary since by what they share. It reports whether the lists about relays have changed,
// because then the relays must be chosen again.
func (n *network) share(ctx context.Context, p pass) (relays bool) {
	s := &n.nat.sharer
	before := s.published
	if !p.set.Complete || !s.due(p.now.steady, len(p.set.Leases), &n.nat.shared) {
		return false
	}
	now := s.published
	n.Backend.published.Store(&now)
	n.nat.republish.Send()
	log := klog.FromContext(ctx)
	if !maps.Equal(now.shared, before.shared) {
		log.Info("sharing the endpoints of peers behind NAT in the own lease", "endpoints", len(now.shared))
	}
	for _, d := range n.devices {
		r := &d.relaying
		if lists := now.relays[d.families[0]]; !lists.equal(r.published) {
			r.published, relays = lists, true
			log.Info("publishing the peers without a session, and relays, in the own lease", "device", d.name, "unreachable", len(lists.unreachable), "relays", len(lists.relays))
		}
	}
	return relays
}

// followPeers runs after a pass without an error. If the pass has read all devices, followPeers
// calls offer. In any case it sets nat.readBy, the time of the next reading because of peers behind
// NAT, names and relays. wrote is set if the pass has changed a peer.
func (n *network) followPeers(p pass, wrote bool) {
	by, now := n.nat.readBy, p.now.steady
	within := func(pause time.Duration) {
		if at := now + pause; pause > 0 && (by == 0 || at < by) {
			by = at
		}
	}
	read, news, needed, named := true, n.nat.news, wrote && n.nat.sharer.interval != 0, map[string]bool{}
	for _, d := range n.devices {
		read = read && d.read == now
		needed = needed || len(d.seen) > 0 || len(d.named) > 0 || d.relaying.active()
		news = news || d.relaying.news
		maps.Copy(named, d.named)
	}
	if read {
		by, news, n.nat.news = 0, false, false
		needed = needed || !n.nat.shared.empty()
		n.names.retain(func(host string) bool { return named[host] })
		within(n.offer(p))
		for _, d := range n.devices {
			within(d.trials.pause(now))
			within(d.relaying.pause(now, n.nat.sharer.interval))
		}
	}
	pause := mostReadPause
	if n.nat.sharer.interval != 0 {
		pause = min(pause, n.nat.sharer.pause(len(p.set.Leases))/2)
	}
	if slices.ContainsFunc(n.devices, func(d *device) bool { return d.relaying.agreed() }) {
		pause = min(pause, relayPause(n.nat.sharer.interval))
	}
	if news {
		within(min(newsPause, pause))
	}
	if needed {
		within(pause)
	}
	n.nat.readBy = by
}
