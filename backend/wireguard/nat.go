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
	"github.com/flanneld/flanneld/pkg/underlay"
	"github.com/flanneld/flanneld/pkg/wait"
	"github.com/flanneld/flanneld/subnet"
)

const (
	// mostReadPause is the longest time between two readings of a device while there are peers
	// behind NAT, peers with names, or endpoints that other hosts share. Devices must be read for these,
	// because the kernel announces neither sessions nor endpoints.
	mostReadPause = time.Minute
	// newsPause is the longest time until the devices are read after another host has changed the
	// endpoints that it shares. The devices are not read at once, because
	// many hosts may change these at the same time, and one reading is enough for all of them.
	newsPause = 10 * time.Second
)

// nat finds the endpoints of peers that are behind NAT. A host shares in its lease the endpoints at
// which it sees such peers, and tries the endpoints that other hosts share. It also tries the
// addresses of the names that peers have. It decides when the devices are read again.
type nat struct {
	backend *Backend
	devices []*device
	names   *resolver

	broadcasts func() []netip.Addr
	shared     sharedIndex
	sharer     sharer
	republish  wait.Signal
	news       bool          // the endpoints that other hosts share have changed since the devices were read
	readBy     time.Duration // when to read the devices again, on the steady clock; zero if there is no need
}

// newNAT returns the state at the start of the network. now is the time on the steady clock. The state
// begins with the shared endpoints in the own lease, so that a restart does not withdraw them. newNAT
// also stores these in the devices and in Backend.published.
func newNAT(b *Backend, devices []*device, names *resolver, own subnet.Lease, now time.Duration) *nat {
	before := b.publishes(own.Claim())
	for of, endpoint := range before {
		for _, d := range devices {
			if d.serves(of.family) {
				d.seen[of.peer] = observation{endpoint: endpoint, since: now, last: now}
			}
		}
	}
	b.published.Store(&before)
	interval := time.Duration(b.config.EndpointSharingInterval) * time.Second
	return &nat{
		backend: b, devices: devices, names: names, broadcasts: underlay.Broadcasts,
		sharer: sharer{interval: interval, shared: before}, republish: wait.NewSignal(),
	}
}

// noteShared stores what the leases of set share. It visits only
// the changed leases. If all is set, any lease may differ: noteShared then visits all leases, and
// forgets those that are not in set. It does nothing if EndpointSharingInterval is 0.
func (n *nat) noteShared(set backend.Set, all bool) {
	if n.sharer.interval == 0 {
		return
	}
	note := func(key string) {
		var now sharedEndpoints
		if l, ok := set.Leases[key]; ok {
			now = sharedIn(*l, n.backend.env.Reachable)
		}
		n.news = n.shared.set(key, now) || n.news
	}
	if !all {
		for _, key := range set.Changed {
			note(key)
		}
		return
	}
	for key := range set.Leases {
		note(key)
	}
	present := func(key string) bool { return set.Leases[key] != nil }
	n.news = n.shared.retain(present) || n.news
}

// readingDue reports whether the time readBy has come. The devices must then be read because of
// peers behind NAT or names. now is the time on the steady clock.
func (n *nat) readingDue(now time.Duration) bool { return n.readBy != 0 && now >= n.readBy }

// candidates returns the endpoints to try for p, a peer of d that has no session: first the
// addresses of its name, then the endpoints that other hosts share. It also makes the resolver look
// up the name again.
func (n *nat) candidates(d *device, p peer) []netip.AddrPort {
	var all []netip.AddrPort
	if !p.named.IsZero() {
		for _, a := range n.names.addrs(p.named.Host) {
			if d.serves(prefix.FamilyOf(a)) && n.backend.env.Reachable(a) {
				all = append(all, netip.AddrPortFrom(a, p.named.Port))
			}
		}
	}
	for _, shared := range n.shared.candidates(p.key, d.outer) {
		if !slices.Contains(all, shared) {
			all = append(all, shared)
		}
	}
	if len(all) == 0 {
		return nil
	}

	broadcasts := n.broadcasts()
	return slices.DeleteFunc(all, func(e netip.AddrPort) bool { return slices.Contains(broadcasts, e.Addr()) })
}

// noteNames adds the names of the wanted peers to d.named. It also makes the resolver look up the
// names of peers that are not on the device yet, because there is no session with them.
func (n *nat) noteNames(d *device, c diff) {
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
func (n *nat) worthSharing(endpoint netip.AddrPort) bool {
	own, _ := n.backend.env.Underlay.Family(prefix.FamilyOf(endpoint.Addr()))
	return n.backend.env.Reachable(endpoint.Addr()) && worthSharing(own.Public, endpoint)
}

// offer decides whether this host should change what it publishes. It must be called after a pass
// that has read all devices. It returns the time after which another pass must read the devices and
// call offer again. It returns zero if there is nothing to change, if the set is not complete, or if
// EndpointSharingInterval is 0.
func (n *nat) offer(p pass) (again time.Duration) {
	s := &n.sharer
	if s.interval == 0 || !p.set.Complete {
		return 0
	}
	var seen []observations
	for _, d := range n.devices {
		seen = append(seen, d.seen)
	}
	return s.offer(p.now.steady, len(p.set.Leases), s.wanted(p.now.steady, seen, &n.shared))
}

// share publishes the change in sharer.offered, if there is one and the set is complete. It leaves
// out endpoints that enough other hosts have meanwhile begun to share. It publishes nothing if no
// change remains.
func (n *nat) share(ctx context.Context, p pass) {
	s := &n.sharer
	if !p.set.Complete || !s.due(p.now.steady, len(p.set.Leases), &n.shared) {
		return
	}
	now := s.shared
	n.backend.published.Store(&now)
	n.republish.Send()
	klog.FromContext(ctx).Info("sharing the endpoints of peers behind NAT in the own lease", "endpoints", len(now))
}

// followPeers runs after a pass without an error. If the pass has read all devices, followPeers
// calls offer. In any case it sets readBy, the time of the next reading because of peers behind
// NAT and names. wrote is set if the pass has changed a peer.
func (n *nat) followPeers(p pass, wrote bool) {
	by, now := n.readBy, p.now.steady
	within := func(pause time.Duration) {
		if at := now + pause; pause > 0 && (by == 0 || at < by) {
			by = at
		}
	}
	read, news, needed, named := true, n.news, wrote && n.sharer.interval != 0, map[string]bool{}
	for _, d := range n.devices {
		read = read && d.read == now
		needed = needed || len(d.seen) > 0 || len(d.named) > 0
		maps.Copy(named, d.named)
	}
	if read {
		by, news, n.news = 0, false, false
		needed = needed || !n.shared.empty()
		n.names.retain(func(host string) bool { return named[host] })
		within(n.offer(p))
		for _, d := range n.devices {
			within(d.trials.pause(now))
		}
	}
	pause := mostReadPause
	if n.sharer.interval != 0 {
		pause = min(pause, n.sharer.pause(len(p.set.Leases))/2)
	}
	if news {
		within(min(newsPause, pause))
	}
	if needed {
		within(pause)
	}
	n.readBy = by
}
