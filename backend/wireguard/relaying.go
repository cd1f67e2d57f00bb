// SPDX-License-Identifier: Apache-2.0

package wireguard

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	"k8s.io/klog/v2"
)

const (
	// mostRelayPause is the longest time between two readings of a device while this host and a peer publish
	// that they do not reach each other.
	mostRelayPause = 10 * time.Second
	// relayPatience is the time after which a relay that leaves data unanswered is not published any more. A
	// host that receives data sends something within 10 s (KEEPALIVE_TIMEOUT of the protocol).
	relayPatience = 20 * time.Second
	// relayGrace is the time for which a relay without a session stays published. A relay with
	// WireGuard in user space has no sessions for a short time after its daemon was restarted.
	relayGrace = 30 * time.Second
	// keepaliveSize is the size in bytes of a keepalive, as a device counts it.
	keepaliveSize = 32
)

// contact is what the last reading of a device has shown about one peer, while there are relays.
type contact struct {
	session bool
	since   time.Duration // begin of the session, or of the time without one, on the steady clock

	read       time.Duration // when the counters were read
	rx, tx     int64         // bytes from and to the peer
	unanswered time.Duration // first reading that showed data without an answer; zero if the peer answers
}

// answers reports whether the peer answers: it is false if, at the time now, the peer has left data
// unanswered for relayPatience or longer.
func (c contact) answers(now time.Duration) bool {
	return c.unanswered == 0 || now-c.unanswered < relayPatience
}

// next returns the contact after a reading at the time now. h is the state of the peer in the
// device, and age the age of its last handshake. keepalive is the interval of keepalives, which
// need no answer: only more bytes than those of keepalives count as data. Before the first reading,
// the contact is zero.
func (c contact) next(now time.Duration, h wgtypes.Peer, age, keepalive time.Duration) contact {
	n := contact{session: age <= sessionLife, since: c.since, read: now, rx: h.ReceiveBytes, tx: h.TransmitBytes}
	first := c.read == 0
	if first || n.session != c.session {
		n.since = now
		if n.session {
			n.since -= age
		}
	}
	if first || n.rx != c.rx {
		return n
	}
	n.unanswered = c.unanswered
	if keepalives := int64((now-c.read)/keepalive) + 1; n.unanswered == 0 && n.tx-c.tx > keepalives*keepaliveSize {
		n.unanswered = now
	}
	return n
}

// relaying is the use of relays by a device.
type relaying struct {
	notes     relayNotes // about the leases of other hosts
	news      bool       // notes have changed since the device was read
	decisive  bool       // notes that may change the choice of relays have changed since the device was read
	contacts  map[wgtypes.Key]contact
	published relayLists        // lists in the own lease
	by        map[string]string // relays in use: lease key of the relay by lease key of the peer
}

func newRelaying() relaying {
	return relaying{notes: relayNotes{}, contacts: map[wgtypes.Key]contact{}}
}

// active reports whether the device has to be read because of relays.
func (r *relaying) active() bool { return len(r.notes) > 0 || !r.published.empty() }

// note replaces the note about a lease. If it differs from the one before, note sets news, and also
// decisive if this host publishes the host of the lease as unreachable or as a relay. Most leases
// have the zero note.
func (r *relaying) note(lease string, now relayNote) {
	before := r.notes[lease]
	if !r.notes.set(lease, now) {
		return
	}
	decides := func(key wgtypes.Key) bool {
		return hasKey(r.published.unreachable, key) || hasKey(r.published.relays, key)
	}
	r.news = true
	r.decisive = r.decisive || decides(before.peer) || decides(now.peer)
}

// agreed reports whether a relay may be needed: there is a peer such that this host and the peer both
// publish that they do not reach each other. Only between two such hosts may a relay carry the
// packets. If only this host publishes that, the peer may be down.
func (r *relaying) agreed() bool {
	if r.published.empty() {
		return false
	}
	for _, note := range r.notes {
		if note.misses && hasKey(r.published.unreachable, note.peer) {
			return true
		}
	}
	return false
}

// concerns reports whether one of these leases is that of a peer with a relay, or that of a relay
// in use.
func (r *relaying) concerns(leases []string) bool {
	if len(r.by) == 0 {
		return false
	}
	relays := slices.Collect(maps.Values(r.by))
	return slices.ContainsFunc(leases, func(lease string) bool { return r.by[lease] != "" || slices.Contains(relays, lease) })
}

// observe updates the contacts with the state of the device, which was read at the time now. If
// active returns false, it removes all contacts. It also resets news and decisive.
func (r *relaying) observe(now time.Duration, d diff) {
	r.news, r.decisive = false, false
	if !r.active() {
		clear(r.contacts)
		return
	}
	have := make(map[wgtypes.Key]wgtypes.Peer, len(d.have.Peers))
	for _, h := range d.have.Peers {
		have[h.PublicKey] = h
	}
	contacts := make(map[wgtypes.Key]contact, len(d.want))
	for key := range d.want {
		h, age := wgtypes.Peer{}, never // a peer that the device does not have yet
		if there, ok := have[key]; ok {
			h, age = there, d.ages[key]
		}
		contacts[key] = r.contacts[key].next(now, h, age, d.keepalive)
	}
	r.contacts = contacts
}

// relayPause returns the longest time between two readings of a device while a relay may be needed.
// interval is EndpointSharingInterval. Both hosts of a pair leave their relay twice this time
// after the begin of a new session.
func relayPause(interval time.Duration) time.Duration {
	return min(max(interval/2, leastReadPause), mostRelayPause)
}

// returns reports whether packets to the peer of c go directly, and no longer by a relay: a session
// has lasted for twice relayPause. Both hosts must change at the same moment, because each drops
// packets that arrive by the other way. Both know when their session began, and after that time
// both have read their devices.
func (c contact) returns(now, interval time.Duration) bool {
	return c.session && now-c.since >= 2*relayPause(interval)
}

// wanted returns the lists that this host should publish at the time now, with at most maxRelayKeys
// keys each. Both are empty if there is no unreachable peer or no relay. A peer without a session
// counts as unreachable after interval, or at once if it publishes that it does not reach this
// host. It stays unreachable until packets to it go directly again (see returns). A relay is listed
// if it answers and has had a session for interval, and stays listed for relayGrace without one.
func (r *relaying) wanted(now, interval time.Duration) relayLists {
	var want relayLists
	notes := r.notes.byPeer()
	for key, c := range r.contacts {
		age := now - c.since
		unreachable, relay := hasKey(r.published.unreachable, key), hasKey(r.published.relays, key)
		switch {
		case unreachable && !c.returns(now, interval):
			want.unreachable = append(want.unreachable, key)
		case notes[key].relay && c.answers(now) && (c.session && (relay || age >= interval) || relay && age < relayGrace):
			want.relays = append(want.relays, key)
		case !c.session && (age >= interval || notes[key].misses):
			want.unreachable = append(want.unreachable, key)
		}
	}
	if len(want.unreachable) == 0 || len(want.relays) == 0 {
		return relayLists{}
	}
	slices.SortFunc(want.relays, compareKeys)
	slices.SortFunc(want.unreachable, func(a, b wgtypes.Key) int {
		// First the peers that can have a relay, then the peers that are published already.
		return cmp.Or(trueFirst(notes[a].misses, notes[b].misses),
			trueFirst(hasKey(r.published.unreachable, a), hasKey(r.published.unreachable, b)), compareKeys(a, b))
	})
	want.unreachable = want.unreachable[:min(len(want.unreachable), maxRelayKeys)]
	want.relays = want.relays[:min(len(want.relays), maxRelayKeys)]
	slices.SortFunc(want.unreachable, compareKeys)
	return want
}

func trueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// choose returns the relays to use at the time now: the public key of the relay by that of the
// peer. It returns none if this host publishes no unreachable peers. own is the public key of this
// host, and want contains the wanted peers.
func (r *relaying) choose(now, interval time.Duration, own wgtypes.Key, want map[wgtypes.Key]peer) map[wgtypes.Key]wgtypes.Key {
	if r.published.empty() {
		return nil
	}
	relays, notes := map[wgtypes.Key]wgtypes.Key{}, r.notes.byPeer()
	usable := func(key wgtypes.Key) bool {
		_, wanted := want[key]
		return wanted && notes[key].relay
	}
	for _, key := range r.published.unreachable {
		if _, wanted := want[key]; !wanted || r.contacts[key].returns(now, interval) {
			continue
		}
		if relay, ok := agreedRelay(own, r.published, notes[key], usable); ok {
			relays[key] = relay
		}
	}
	return relays
}

// pause returns the time until the next peer leaves its relay; zero if no peer is about to.
func (r *relaying) pause(now, interval time.Duration) (pause time.Duration) {
	for _, key := range r.published.unreachable {
		if c := r.contacts[key]; c.session && !c.returns(now, interval) {
			if left := c.since + 2*relayPause(interval) - now; pause == 0 || left < pause {
				pause = left
			}
		}
	}
	return pause
}

// useRelays moves the subnets of peers to their relays. relays contains the key of the relay by
// the key of the peer. useRelays changes c.want and next, which contains the wanted peers by
// lease key. A peer with a relay stays on the device without subnets, so that the device
// continues to try to reach it. useRelays returns the value for relaying.by.
func useRelays(relays map[wgtypes.Key]wgtypes.Key, next map[string]peer, c diff) map[string]string {
	if len(relays) == 0 {
		return nil
	}
	leases, by := map[wgtypes.Key]string{}, map[string]string{}
	for lease, p := range next {
		leases[p.key] = lease
	}
	for _, lease := range slices.Sorted(maps.Keys(next)) { // so that the order of subnets stays the same
		p := next[lease]
		key, ok := relays[p.key]
		if !ok {
			continue
		}
		relay := next[leases[key]]
		relay.allowed = slices.Concat(relay.allowed, p.allowed)
		p.allowed = nil
		next[lease], next[leases[key]] = p, relay
		c.want[p.key], c.want[key] = p, relay
		by[lease] = leases[key]
	}
	return by
}

// setBy records the relays in use after a write, by lease key of the peer, and logs the differences
// from the last write.
func (r *relaying) setBy(ctx context.Context, device string, now map[string]string) {
	log := klog.FromContext(ctx).WithValues("device", device)
	for _, lease := range slices.Sorted(maps.Keys(now)) {
		if relay := now[lease]; r.by[lease] != relay {
			log.Info("packets to a peer go by a relay, which sees the plaintext of the packets", "peer", lease, "relay", relay)
		}
	}
	for _, lease := range slices.Sorted(maps.Keys(r.by)) {
		if now[lease] == "" {
			log.Info("packets to a peer go without a relay again", "peer", lease, "relay", r.by[lease])
		}
	}
	r.by = now
}
