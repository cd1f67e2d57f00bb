// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"context"
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
	// leastReadPause is the shortest one.
	leastReadPause = 100 * time.Millisecond
	// mostReadPause is the longest time between two readings of a device while there are peers behind
	// NAT. The kernel announces neither sessions nor endpoints.
	mostReadPause = time.Minute
	// newsPause is the time after which a device is read because another host shares other endpoints.
	// Many hosts may do so at once.
	newsPause = 10 * time.Second
)

// nat finds the endpoints of peers that are behind NAT. A host shares those that it sees, and tries
// those that others share.
type nat struct {
	shared    sharedIndex
	sharer    sharer
	republish wait.Signal
	news      bool          // others share other endpoints than when the devices were read
	readBy    time.Duration // when to read the devices again, on the steady clock; zero if there is no need
}

func (n *network) newNAT(own subnet.Lease) nat {
	now := n.now().steady
	published := n.shares(own.Claim())
	for of, endpoint := range published {
		for _, d := range n.devices {
			if d.serves(of.family) {
				d.seen[of.peer] = observation{endpoint: endpoint, since: now, last: now}
			}
		}
	}
	n.Backend.shared.Store(&published)
	interval := time.Duration(n.config.EndpointSharingInterval) * time.Second
	return nat{sharer: sharer{interval: interval, published: published}, republish: wait.NewSignal()}
}

// shares returns the endpoints that this host shares at present. prev is its last claim.
func (b *Backend) shares(prev subnet.Claim) sharedEndpoints {
	if b.config.EndpointSharingInterval == 0 {
		return nil
	}
	if now := b.shared.Load(); now != nil {
		return *now
	}
	return b.sharedBy(subnet.Lease{Endpoints: prev.Endpoints})
}

// Republish implements backend.Publisher.
func (n *network) Republish() <-chan struct{} { return n.nat.republish }

// Published implements backend.Publisher. This host does nothing else after a write.
func (*network) Published(subnet.Claim) {}

// noteShared takes over what other hosts share.
func (n *network) noteShared(set backend.Set) {
	if n.nat.sharer.interval == 0 {
		return
	}
	note := func(key string) {
		var now sharedEndpoints
		if l, ok := set.Leases[key]; ok {
			now = n.sharedBy(*l)
		}
		n.nat.news = n.nat.shared.set(key, now) || n.nat.news
	}
	if !set.All {
		for _, key := range set.Changed {
			note(key)
		}
		return
	}
	for key := range set.Leases {
		note(key)
	}
	gone := n.nat.shared.retain(func(key string) bool { return set.Leases[key] != nil })
	n.nat.news = gone || n.nat.news
}

// readingDue reports whether the devices have to be read because of peers behind NAT.
func (n *network) readingDue(now time.Duration) bool { return n.nat.readBy != 0 && now >= n.nat.readBy }

// serves reports whether the device sends to addresses of family f.
func (d *device) serves(f prefix.Family) bool { return slices.Contains(d.outer, f) }

// candidates returns the endpoints to try for a peer of d without a session.
func (n *network) candidates(d *device, p peer) []netip.AddrPort {
	return n.nat.shared.candidates(p.key, d.outer)
}

// worthSharing reports whether other hosts may reach a peer at endpoint.
func (n *network) worthSharing(endpoint netip.AddrPort) bool {
	own, _ := n.env.Underlay.Family(prefix.FamilyOf(endpoint.Addr()))
	return n.reachable(endpoint.Addr()) && worthSharing(own.Public, endpoint)
}

// share decides after a pass without an error whether the own lease has to be written, and when to read
// the devices again. wrote is set if the pass has changed a peer.
func (n *network) share(ctx context.Context, p pass, wrote bool) {
	s, now := &n.nat.sharer, p.now.steady
	if s.interval == 0 {
		return
	}
	by := n.nat.readBy
	within := func(pause time.Duration) {
		if at := now + pause; by == 0 || at < by {
			by = at
		}
	}
	pause := min(mostReadPause, s.pause(len(p.set.Leases))/2)
	read, needed := true, wrote
	var seen []observations
	for _, d := range n.devices {
		read = read && d.read == now
		needed = needed || len(d.seen) > 0
		seen = append(seen, d.seen)
	}
	if read {
		by, n.nat.news = 0, false
		needed = needed || !n.nat.shared.empty()
		for _, d := range n.devices {
			if left := d.trials.pause(now); left > 0 {
				within(left)
			}
		}
	}
	if read && p.set.Complete {
		write, again := s.due(now, len(p.set.Leases), seen, &n.nat.shared)
		if again > 0 {
			within(again)
		}
		if write {
			klog.FromContext(ctx).Info("sharing the endpoints of peers behind NAT in the own lease", "endpoints", len(s.published))
			published := s.published
			n.Backend.shared.Store(&published)
			n.nat.republish.Send()
		}
	}
	if n.nat.news {
		within(min(newsPause, pause))
	}
	if needed {
		within(pause)
	}
	n.nat.readBy = by
}
